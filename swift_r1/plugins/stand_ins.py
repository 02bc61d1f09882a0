"""Stand-ins for names of ms-swift whose meaning we do not have: they import, and say at their use what is missing.

One plugin file often imports ten names and uses two, so importing, subclassing and annotating must work; only making
an object, calling, or reading an attribute fails.
"""

from __future__ import annotations

from typing import Any, NoReturn


class NotHere(NotImplementedError):
    """A name of ms-swift was used that only ms-swift gives a meaning to."""


class _Meta(type):
    """The class of stand-ins: they can be subclassed and annotated with, not called and not looked into."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _missing(cls)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks for: annotations, pickling, signatures
            raise AttributeError(f"{cls.__name__} has no {name}")
        _missing(cls)

    def __iter__(cls) -> NoReturn:
        _missing(cls)

    def __getitem__(cls, key: Any) -> NoReturn:
        _missing(cls)

    def __setitem__(cls, key: Any, value: Any) -> NoReturn:
        _missing(cls)


def stand_in(name: str, instead: str) -> type:
    """A class named after `name` (`swift.template.Template`) that fails at its use.

    Args:
        name: where ms-swift has it.
        instead: what to do here, the end of the error's sentence.
    """
    module, _, short = name.rpartition(".")
    return _Meta(short, (), {"__module__": module, "_swift_name": name, "_instead": instead})


def _missing(cls: type) -> NoReturn:
    name, instead = type.__getattribute__(cls, "_swift_name"), type.__getattribute__(cls, "_instead")
    own = "" if cls.__name__ == name.rpartition(".")[2] else f" (used through {cls.__name__})"
    raise NotHere(f"{name}{own} only means something in ms-swift: {instead}")
