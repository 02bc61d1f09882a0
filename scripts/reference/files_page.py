def page() -> str:
    return ""
