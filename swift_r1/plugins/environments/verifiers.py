"""`verifiers:ID`: environments for the package verifiers (`load_environment`), each a module on Python's path.

The environment plays its own rollout with the episode's client, and scores it with its own rubric. `--env_args` are
arguments of its `load_environment`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import Any, ClassVar

from swift_r1.errors import UsageError, describe, one_line
from swift_r1.plugins.agents import AgentResult
from swift_r1.plugins.environments.base import ENV_ROW, EnvironmentAgent, Row, Script
from swift_r1.plugins.environments.chat import MODEL, is_limit
from swift_r1.runtime.processes import handlers_kept


class VerifiersAgent(EnvironmentAgent):
    """The episode's reward is the rubric's weighted sum; each of its functions is in the result by its name."""

    loaded: ClassVar[Any] = None

    @classmethod
    def prepare(cls) -> Any:
        """Loads the environment once in this process. Raises UsageError where that fails, or its rubric compares the
        episodes of a group, which are scored one by one here."""
        if cls.loaded is None:
            where = f"--env verifiers:{cls.name}"
            import verifiers

            if not hasattr(verifiers, "load_environment"):
                has = f"verifiers {verifiers.__version__} has no load_environment"
                raise UsageError(f"{where}: {has}: pip install 'swift-r1[verifiers]'")
            # Environments put handlers of their own in the place of this process's.
            with handlers_kept(signal.SIGINT, signal.SIGTERM), _silent("verifiers"):
                try:
                    loaded = verifiers.load_environment(cls.name, **cls.args)
                except (Exception, SystemExit) as error:
                    raise UsageError(f"{where}: {_cause(error)}") from error
            rubric = loaded.rubric
            comparing = [
                one.__name__ for one in rubric._get_reward_funcs() if rubric._is_group_func(one)
            ]
            if comparing:
                raise UsageError(
                    f"{where}: its reward {comparing[0]} compares episodes, which are scored one by one"
                )
            cls.loaded = loaded
        return cls.loaded

    @classmethod
    def rows(cls, split: str, count: int | None) -> Iterator[Row]:
        """Yields the environment's training set; its evaluation set where rows are held out."""
        environment = cls.prepare()
        with _silent("verifiers"):
            dataset = (
                environment.get_dataset() if split == "train" else environment.get_eval_dataset()
            )
        if split == "eval" and environment.eval_dataset is None:
            raise UsageError(
                f"--env verifiers:{cls.name} has no evaluation set: give --split_dataset_ratio or --val_dataset"
            )
        for row in dataset:
            prompt = row["prompt"]
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            plain = [
                {name: value for name, value in message.items() if value is not None}
                for message in messages
            ]
            yield {
                "messages": plain,
                ENV_ROW: {**row, "prompt": prompt if isinstance(prompt, str) else plain},
            }

    @classmethod
    def scripts(cls, own: Row) -> dict[str, Script]:
        answer = own.get("answer")
        parser = cls.prepare().parser
        if not isinstance(answer, str) or not answer:
            return super().scripts(own)
        # a parser without a way to write, or with other fields: as it is
        with contextlib.suppress(Exception):
            field = getattr(parser, "answer_field", "answer")
            answer = parser.format(**{name[0]: "..." for name in parser._fields} | {field: answer})
        return {"the row's answer": lambda chance: answer, **super().scripts(own)}

    async def play(self, client: Any, row: Row, own: Row) -> AgentResult:
        import verifiers

        environment = self.prepare()
        given = {"example_id": 0, "task": environment.env_id, "prompt": row["messages"]} | own
        state = await environment.rollout(given, client, MODEL, dict(environment.sampling_args))
        silent = 0
        error = state.get("error")
        if error is not None:
            # the model ended its turn at once
            silent = int(isinstance(error, verifiers.InvalidModelResponseError))
            if not silent and not (state["trajectory"] and is_limit(error.__cause__ or error)):
                raise error.__cause__ or error
            state["error"], state["is_truncated"] = None, not silent
        if not state["trajectory"] and state.get("prompt_too_long"):
            raise RuntimeError("its first prompt is longer than the model takes")
        if silent and not state["trajectory"]:  # there is nothing that a rubric could read
            return {"reward": 0.0, "is_truncated": 0.0, "turns": 1.0}
        with _raising("verifiers.rubrics"):
            await environment.rubric.score_rollout(state)
        parts = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        steps = state["trajectory"]
        more: dict[str, Any] = {
            "is_truncated": float(bool(state.get("is_truncated"))),
            "turns": float(len(steps) + silent),
        }
        turns = [*(step.get("reward") for step in steps), *[0.0] * silent]
        if turns and all(isinstance(one, int | float) for one in turns):
            more["turn_rewards"] = turns
        return {**more, **parts, "reward": float(state["reward"])}


def _cause(error: BaseException) -> str:
    """Returns why an environment does not load: verifiers says which one, and its cause what went wrong."""
    cause = error.__cause__
    if cause is None:
        return describe(error)
    return (
        f"{one_line(error)} ({one_line(cause)})"
        if isinstance(cause, ImportError)
        else describe(cause)
    )


@contextlib.contextmanager
def _silent(name: str) -> Iterator[None]:
    """Silences a logger: what it would say is in the error that is raised."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def _raising(name: str) -> Iterator[None]:
    """Raises what a reward function has raised, which is 0 to its rubric, with a line in the log."""
    logger = logging.getLogger(name)
    errors = _Errors()
    logger.addHandler(errors)
    try:
        yield
    finally:
        logger.removeHandler(errors)
    if errors.texts:
        raise RuntimeError(errors.texts[0])
