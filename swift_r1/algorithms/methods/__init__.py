"""The methods: each file here declares losses, estimators, or a way to learn from a teacher, and has their formulas.

A file that is put here is a method, with its flags; nothing else names it. None loads torch (`method.py`).
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from swift_r1.algorithms.method import Distillation, Estimator, Loss, Method

_M = TypeVar("_M", bound=Method)
_FIRST = "grpo"  # the default, whose file comes before the others, in the order of the alphabet


def _declared(kind: type[_M]) -> dict[str, _M]:
    """Returns what the files declare of one kind, by name."""
    names = sorted(
        (module.name for module in iter_modules(__path__)), key=lambda name: (name != _FIRST, name)
    )
    modules = [import_module(f"{__name__}.{name}") for name in names]
    return {
        one.name: one
        for module in modules
        for one in vars(module).get("METHODS", ())
        if isinstance(one, kind)
    }


LOSSES = _declared(Loss)
ESTIMATORS = _declared(Estimator)
DISTILLATIONS = _declared(Distillation)
