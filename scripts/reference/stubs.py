"""A class, function or registry as its source declares it: signatures and docstrings, without bodies."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection, Iterator
from functools import cache
from types import ModuleType
from typing import Any

_SHOWN = ("__init__", "__call__", "run")


def stub(module: str, name: str, without: Collection[str] = ()) -> str:
    """The declaration of a name of `module`, in the module that it comes from, `without` some of its methods."""
    home = _home(sys.modules[module], name)
    source = inspect.getsource(home)
    return "\n".join(
        line.partition("  # noqa")[0]
        for line in _declared(_statement(source, home, name), source.splitlines(), without)
    )


@cache
def _home(module: ModuleType, name: str) -> ModuleType:
    """The module whose source declares it."""
    value = getattr(module, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return sys.modules[value.__module__]
    for other in (module, *sorted(sys.modules.values(), key=lambda one: one.__name__)):
        if (
            other.__name__.startswith("swift_r1")
            and other.__dict__.get(name) is value
            and _declares(other, name)
        ):
            return other
    raise LookupError(f"no module declares {name}")


def _declares(module: ModuleType, name: str) -> bool:
    try:
        _statement(inspect.getsource(module), module, name)
    except (LookupError, OSError):
        return False
    return True


def _statement(source: str, module: ModuleType, name: str) -> list[ast.stmt]:
    """The statement that declares a name, and for a variable the text below it."""
    body = ast.parse(source).body
    for place, one in enumerate(body):
        if (
            isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and one.name == name
        ):
            return [one]
        targets = (
            [one.target]
            if isinstance(one, ast.AnnAssign)
            else one.targets
            if isinstance(one, ast.Assign)
            else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            below = body[place + 1] if place + 1 < len(body) else None
            return [one, below] if below is not None and _is_text(below) else [one]
    raise LookupError(f"{module.__name__} does not declare {name}")


def _is_text(one: Any) -> bool:
    return (
        isinstance(one, ast.Expr)
        and isinstance(one.value, ast.Constant)
        and isinstance(one.value.value, str)
    )


def _declared(
    statements: list[ast.stmt], lines: list[str], without: Collection[str]
) -> Iterator[str]:
    for one in statements:
        if isinstance(one, ast.ClassDef):
            yield from _head(one, lines)
            fields = False
            for member in one.body[_is_text(one.body[0]) :]:
                if isinstance(member, ast.AnnAssign | ast.Assign):
                    if not lines[member.lineno - 1].strip().startswith("_"):
                        yield from [""] * (not fields)
                        yield from _source(member, lines)
                        fields = True
                elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and (
                    (not member.name.startswith("_") or member.name in _SHOWN)
                    and member.name not in without
                ):
                    yield ""
                    yield from _head(member, lines)
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _head(one, lines)
        else:
            yield from _source(one, lines)


def _head(
    one: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> Iterator[str]:
    """From its decorators to its docstring."""
    first = min([one.lineno, *(decorator.lineno for decorator in one.decorator_list)])
    body = one.body[0]
    if body.lineno == one.lineno:  # `def close(self) -> None: ...`
        yield lines[one.lineno - 1]
        return
    last = body.end_lineno if _is_text(body) else body.lineno - 1
    declared = lines[first - 1 : last]
    while not _is_text(body) and not declared[-1].rstrip().endswith(":"):
        declared.pop()  # a comment above the first statement
    if not _is_text(body) and not isinstance(one, ast.ClassDef):
        declared[-1] += " ..."
    yield from declared


def _source(one: ast.stmt, lines: list[str]) -> list[str]:
    """With the comment above it."""
    first = one.lineno - 1
    while lines[first - 1].strip().startswith("#"):
        first -= 1
    return lines[first : one.end_lineno]
