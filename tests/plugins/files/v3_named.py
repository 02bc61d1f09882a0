"""v3: named constructor parameters, and imports while it runs."""

from swift.plugin.orm import ORM, orms


class Short(ORM):
    """Shorter is better, up to the longest completion."""

    def __init__(self, max_completion_length: int, unknown: int = 5):
        self.longest = max_completion_length * unknown

    def __call__(self, completions, **kwargs):
        import importlib

        from swift.llm import InferRequest
        from swift.plugin import orms as registered
        from swift.utils import get_logger

        assert registered["v3_short"] is Short
        assert importlib.import_module("swift.plugin.orm").ORM is ORM
        get_logger().info("scored %s", InferRequest(messages=[]))
        return [1.0 - min(1.0, len(text) / self.longest) for text in completions]


orms["v3_short"] = Short
