"""Finds keys and passwords in addresses and named values, addresses that nothing can be asked at, and loopback."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, urlsplit

_SECRET_NAME = re.compile(
    "((api|access|private|secret)[_-]?key|secret|passw(or)?d|passphrase|authorization|credentials?"
    "|(^|(?<!bos|eos|pad|unk|sep|cls)(?<!mask|stop)[_-])token)$",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Whether a value of this name is a key, by the name's end: `api_key` and `HF_TOKEN`, not `eos_token_id`."""
    return _SECRET_NAME.search(name) is not None


def keys_in(value: Any, name: str = "") -> Iterator[str]:
    """The names under which a value from JSON or YAML has keys, or addresses with a password."""
    if isinstance(value, Mapping):
        for own, one in value.items():
            yield from keys_in(one, str(own))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from keys_in(one, name)
    elif isinstance(value, str) and value and (is_secret_name(name) or has_password(value)):
        yield name


def has_password(text: str) -> bool:
    """Whether it is an address with a user or a password in it."""
    return re.match(r"[a-zA-Z][\w+.-]*://[^/?#\s]*@", text) is not None


def without_password(url: str) -> str:
    """Returns a URL to show; without its query too, which may hold a key."""
    return re.sub(r"\?.*", "?***", re.sub("(?<=://)[^/]*@", "***@", url))


def is_loopback(url: str) -> bool:
    """Whether it is an address of this machine, for which a proxy of the environment is not meant."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def why_no_url(url: str) -> str | None:
    """Why nothing can be asked at such an address, or should not be: addresses are logged and written to files."""
    if "@" in re.split("[/?#]", url.partition("://")[2], maxsplit=1)[0]:
        return "has a user or a password in it, and addresses are written to files: give a key by its flag or variable"
    if any(
        is_secret_name(name) for name, _ in parse_qsl(urlsplit(url).query if "?" in url else "")
    ):
        return (
            "has a key in it, and addresses are written to files: give it by its flag or variable"
        )
    if not url.startswith(("http://", "https://")):
        return "must begin with http:// or https://"
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = parts.port
        if "[" in parts.netloc or re.fullmatch(r"[0-9]+(\.[0-9]+){3}", host):
            ip_address(host)
        elif not re.fullmatch(r"([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?", host):
            return "has no host that can be looked up"
    except ValueError as error:  # its address, or its port
        return f"is no URL ({error})"
    return "is no URL" if port == 0 or " " in url or not url.isprintable() else None
