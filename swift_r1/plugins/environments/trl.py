"""`trl:script.py`: a script of TRL as it is, with its environments, its data set and its reward functions.
`trl:module:Class`, `trl:file.py:Class`: one class alone, written for `environment_factory` of TRL's GRPOTrainer.

A script runs up to the place where it makes its trainer; TRL need not be installed for that. `--env_args` are the
script's command line, `{"argv": ["--env-host", "http://127.0.0.1:8001"]}`, or arguments of the class.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import runpy
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from swift_r1.errors import UsageError, a_kind, describe, one_line
from swift_r1.plugins.agents import AgentResult
from swift_r1.plugins.environments.base import ENDLESS_ROWS, ENV_ROW, EnvironmentAgent, Row
from swift_r1.plugins.environments.chat import Chat, Message, with_text

_CONFIG = "trl.trainer.grpo_config"
# they import torch and vLLM
_TRAINERS = ("trl.trainer.grpo_trainer", _CONFIG, "trl.experimental.async_grpo")
_NO_PROMPT = "The environment says what to do."  # in a row's place of what only `reset` says


@dataclass(frozen=True)
class Given:
    """What a script gives its trainer. A factory is under None where all rows have the same."""

    factories: Mapping[str | None, Callable[[], Any]]
    dataset: Any = None
    eval_dataset: Any = None
    reward_funcs: Sequence[Any] = ()
    reward_weights: Sequence[float] | None = None
    tools: Sequence[Callable[..., Any]] = ()
    most_calls: int | None = None


class TrlAgent(EnvironmentAgent):
    """The environment's public methods are tools, and `reset` says what stands behind the prompt. The episode's reward
    is what `get_reward` says and, weighted, what the reward functions say; each is in the result by its name."""

    given: ClassVar[Given | None] = None

    @classmethod
    def prepare(cls) -> None:
        cls.loaded()
        _described(_nothing_known)  # imports for seconds, which each episode would need

    @classmethod
    def loaded(cls) -> Given:
        """Runs the script, or imports the class, once in this process."""
        if cls.given is None:
            cls.given = _loaded(cls.name, cls.args)
        return cls.given

    @classmethod
    def rows(cls, split: str, count: int | None) -> Iterator[Row]:
        given = cls.loaded()
        raws = given.eval_dataset if split == "eval" else given.dataset
        if raws is None and given.dataset is not None:
            raise UsageError(
                f"--env trl:{cls.name}: its trainer has no eval_dataset: give --split_dataset_ratio or --val_dataset"
            )
        if raws is None:
            raws = [{}] * (count or ENDLESS_ROWS)
        elif count is not None:
            raws = islice(raws, count) if not hasattr(raws, "__len__") else raws
        elif not hasattr(raws, "__len__"):
            raise UsageError(
                f"--env trl:{cls.name}: its dataset has no length: say how many rows, --dataset env#N"
            )
        for row in raws:
            prompt = row.get("prompt") or _NO_PROMPT
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            yield {"messages": messages, ENV_ROW: dict(row)}

    async def play(self, client: Any, row: Row, own: Row) -> AgentResult:
        given = self.loaded()
        several = None not in given.factories
        name = own.get("environment") if several else None
        if name not in given.factories:
            known = ", ".join(map(str, given.factories))
            raise UsageError(
                f"--env trl:{self.name}: a row has the environment {name!r}; there are {known}"
            )
        environment = given.factories[name]()
        methods = _methods(environment)
        messages = (
            row["messages"]
            if own.get("prompt") or ENV_ROW not in row
            else [{"role": "user", "content": ""}]
        )
        columns = {
            column: value
            for column, value in own.items()
            if not (several and column == "environment")
        }
        observation = await _awaited(environment.reset(**columns))
        if not isinstance(observation, str | None):
            raise UsageError(
                f"--env trl:{self.name}: reset returned {a_kind(observation)}, not text or None"
            )
        prompt = with_text(messages, observation, between="")
        tools = {tool.__name__: tool for tool in (*given.tools, *methods)}
        chat = Chat(client, prompt, [_described(tool) for tool in tools.values()])

        async def answer(name: str, arguments: Mapping[str, Any]) -> str:
            if name not in tools:
                raise ValueError(f"Tool {name} not found.")
            return str(await _awaited(tools[name](**arguments)))

        calls = failed = rounds = 0
        message = await chat.turn()
        while message is not None and message.get("tool_calls") and chat.ended is None:
            if rounds == given.most_calls:
                break
            rounds += 1
            calls += len(message["tool_calls"])
            failed += await chat.call(message, answer)
            message = await chat.turn()
        rewards = await _rewards(given, environment, prompt, chat.messages[len(prompt) :], own)
        return {**rewards, "tool_calls_made": float(calls), "tool_calls_failed": float(failed)}


async def _rewards(
    given: Given, environment: Any, prompt: list[Message], completion: list[Message], own: Row
) -> dict[str, Any]:
    """Returns `reward` and its parts; a part without an opinion is None."""
    parts: dict[str, float | None] = {}
    total: list[float] = []
    columns = {name: [value] for name, value in own.items() if name not in ("prompt", "completion")}
    weights = given.reward_weights or [1.0] * len(given.reward_funcs)
    for function, weight in zip(given.reward_funcs, weights, strict=True):
        more = {
            "environments": [environment],
            "log_metric": _nothing,
            "log_extra": _nothing,
            "trainer_state": None,
        }
        [value] = await _awaited(
            function(prompts=[prompt], completions=[completion], **columns, **more)
        )
        name = getattr(function, "__name__", type(function).__name__)
        parts[name] = value = _opinion(value)
        total += [weight * value] if value is not None else []
    if hasattr(environment, "get_reward"):
        value = parts[type(environment).__name__] = _opinion(
            await _awaited(environment.get_reward())
        )
        total += [value] if value is not None else []
    return {"reward": sum(total) if total else None, **parts}


def _opinion(value: Any) -> float | None:
    """Returns None for NaN, which is no opinion to TRL either."""
    return None if value is None or math.isnan(value) else float(value)


def _nothing(*_: Any, **__: Any) -> None: ...


def _nothing_known() -> None:
    """Has a schema."""


async def _awaited(value: Any | Awaitable[Any]) -> Any:
    return await value if inspect.isawaitable(value) else value


def _methods(environment: Any) -> list[Callable[..., Any]]:
    """Returns the tools of an environment."""
    members = inspect.getmembers(environment, inspect.ismethod)
    return [
        method
        for name, method in members
        if name not in ("reset", "get_reward") and not name.startswith("_")
    ]


def _described(tool: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        made: dict[str, Any] = get_json_schema(tool)
    except Exception as error:  # transformers' own errors
        raise UsageError(
            f"--env trl: {tool.__qualname__} needs type hints and a docstring: {one_line(error)}"
        ) from error
    made["function"].pop("return", None)
    return made


def _loaded(name: str, args: Mapping[str, Any]) -> Given:
    path, _, attribute = name.rpartition(":")
    if not path:
        path = name
        attribute = ""
    try:
        if not attribute:
            unknown = sorted(set(args).difference(("argv",)))
            if unknown:
                raise UsageError(
                    f"--env_args of a script for TRL: unknown {unknown[0]}; there is argv, its command line"
                )
            return _of_script(path, args.get("argv", ()))
        made = _class(path, attribute)
        given = Given({None: lambda: made(**args)})
    except UsageError:
        raise
    except _Made as error:
        raise UsageError(
            f"--env trl:{name}: {path} makes a trainer where it is imported: name no class"
        ) from error
    except (Exception, SystemExit) as error:
        missing = (
            ""
            if _has_trl()
            else "; TRL is not installed: if it is needed, pip install 'swift-r1[trl]'"
        )
        raise UsageError(f"--env trl:{name}: {describe(error)}{missing}") from error
    return given


def _class(path: str, attribute: str) -> Any:
    """Returns `attribute` of a file or module."""
    if path.endswith(".py"):
        if not os.path.isfile(path):
            raise UsageError(
                f"--env trl:{path}:{attribute}: there is no file {path} (looked in {os.getcwd()})"
            )
        with _trl_replaced():
            return _member(runpy.run_path(path), path, attribute)
    return _member(vars(importlib.import_module(path)), path, attribute)


def _member(names: Mapping[str, Any], path: str, attribute: str) -> Any:
    found = names.get(attribute)
    if not callable(found) or not hasattr(found, "reset"):
        fit = ", ".join(
            name
            for name, value in names.items()
            if inspect.isclass(value) and hasattr(value, "reset")
        )
        raise UsageError(
            f"--env trl:{path}:{attribute}: {path} has no environment class {attribute} (a class with reset); "
            f"there are {fit or 'none'}"
        )
    return found


class _Made(BaseException):
    """Ends a script where it makes its trainer; no `except Exception` of it holds this up."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given


class _Trainer:
    """Stands in for TRL's trainers."""

    def __init__(
        self, model: Any = None, reward_funcs: Any = None, args: Any = None, **given: Any
    ) -> None:
        raise _Made({"reward_funcs": reward_funcs, "args": args, **given})


class _Config(SimpleNamespace):
    """Stands in for all else that is TRL's, where that is not installed."""

    def __init__(self, *_: Any, **settings: Any) -> None:
        super().__init__(**settings)


def _of_script(path: str, argv: Sequence[str]) -> Given:
    if not os.path.isfile(path):
        raise UsageError(f"--env trl:{path}: there is no file {path} (looked in {os.getcwd()})")
    folder = os.path.dirname(os.path.abspath(path))
    before = sys.argv, list(sys.path)
    sys.argv = [path, *map(str, argv)]
    sys.path.insert(0, folder)
    try:
        with _trl_replaced():
            runpy.run_path(path, run_name="__main__")
    except _Made as made:
        return _of_trainer(path, made.given)
    finally:
        sys.argv = before[0]
    raise UsageError(f"--env trl:{path}: the script ended without making a GRPOTrainer")


def _of_trainer(path: str, made: Mapping[str, Any]) -> Given:
    factory = made.get("environment_factory")
    config = made.get("args")
    functions = made.get("reward_funcs")
    if factory is None:
        raise UsageError(f"--env trl:{path}: its trainer has no environment_factory")
    functions = (
        functions
        if isinstance(functions, list | tuple)
        else [functions]
        if functions is not None
        else []
    )
    unfit = [one for one in functions if not callable(one) or hasattr(one, "forward")]
    if unfit:
        raise UsageError(
            f"--env trl:{path}: its reward {unfit[0]!r} is a model: give it to --reward_model"
        )
    return Given(
        factory if isinstance(factory, dict) else {None: factory},
        made.get("train_dataset"),
        _held_out(made.get("eval_dataset")),
        functions,
        getattr(config, "reward_weights", None),
        made.get("tools") or (),
        getattr(config, "max_tool_calling_iterations", None),
    )


def _held_out(given: Any) -> Any:
    """Returns the rows of a script's `eval_dataset`, which may be several by name."""
    return [row for rows in given.values() for row in rows] if isinstance(given, dict) else given


def _has_trl() -> bool:
    return importlib.util.find_spec("trl") is not None


@contextmanager
def _trl_replaced() -> Iterator[None]:
    """Puts stand-ins in the place of TRL's trainers meanwhile, and of all of TRL where it is not installed."""
    replaced = _TRAINERS if _has_trl() else (*_TRAINERS, "trl", "trl.trainer", "trl.experimental")
    before = {name: sys.modules.pop(name, None) for name in replaced}
    sys.modules.update({name: _StandIn(name) for name in replaced})
    _forget_trainers()
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
        _forget_trainers()


def _forget_trainers() -> None:
    """Forgets what TRL's packages have looked up in their modules."""
    for module in [sys.modules[name] for name in ("trl", "trl.trainer") if name in sys.modules]:
        for attribute in ("GRPOTrainer", "GRPOConfig"):
            vars(module).pop(attribute, None)


class _StandIn(ModuleType):
    """A module of TRL with a trainer that is ours, a configuration, and callbacks that do nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if (
            self.__name__ == _CONFIG
            and name == "GRPOConfig"
            and not isinstance(sys.modules["trl"], _StandIn)
        ):
            return _unchecked_config()
        return _Trainer if name.endswith("GRPOTrainer") else _Config


@cache
def _unchecked_config() -> type:
    """Returns TRL's own configuration, whose fields its parser of command lines reads, without its look at GPUs."""
    ours = sys.modules.pop(_CONFIG)
    try:
        own = importlib.import_module(_CONFIG).GRPOConfig
    finally:
        sys.modules[_CONFIG] = ours
    return type("GRPOConfig", (own,), {"__post_init__": _nothing})
