"""The flags of `swift eval`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, ClassVar, Self

from swift_r1.data.prompt_templates import newlines, system_message
from swift_r1.errors import UsageError
from swift_r1.flags.data import ARGUMENTS, DATASET_INFO, SYSTEM, TEMPLATE, THINKING, USE_HF
from swift_r1.flags.eval_tasks import BENCHMARKS, PROMPT_FLAGS, EvalTask, limited, read_tasks
from swift_r1.flags.fields import check_stop_word, flag, no_effect, scope_faults
from swift_r1.flags.parser import API_KEY_VARIABLE, Command
from swift_r1.flags.reward import PluginArguments, VerifierArguments
from swift_r1.flags.server import VllmArguments
from swift_r1.flags.world import World
from swift_r1.wire.urls import why_no_url, without_password

_ENGINE_FLAGS = [
    "torch_dtype",
    "max_model_len",
    "vllm_gpu_memory_utilization",
    "vllm_enforce_eager",
    "vllm_tensor_parallel_size",
    "vllm_data_parallel_size",
    "vllm_enable_prefix_caching",
    "vllm_engine_kwargs",
]
_URL_FLAGS = ["api_key", "tokenizer", "vllm_server_timeout"]


@dataclass(frozen=True, kw_only=True)
class AskingArguments:
    """Sampling and prompts."""

    n: int = flag(1, "completions per question", at_least=1, aliases=("num_generations",))
    temperature: float = flag(1.0, "sampling temperature; 0: greedy", at_least=0, at_most=1000)
    top_p: float = flag(
        1.0,
        "nucleus sampling: keep the likeliest tokens up to this probability mass",
        more_than=0,
        at_most=1,
    )
    max_completion_length: int = flag(2048, "maximum completion length in tokens", at_least=1)
    stop_words: list[str] = flag([], "strings that end a completion", check=check_stop_word)
    instruction: str | None = flag(
        None,
        "text below each question (default: the benchmark's, unless --system or a template is given)",
    )
    system: str | None = SYSTEM
    prompt_template: str | None = TEMPLATE
    response_prefix: str = flag(
        "", "what the model's turn begins with, '<think>'; part of its text when it is judged"
    )
    enable_thinking: bool | None = THINKING
    chat_template_kwargs: dict[str, Any] = ARGUMENTS
    use_hf: bool | None = USE_HF
    custom_dataset_info: list[str] = DATASET_INFO
    eval_limit: int | None = flag(
        None, "most questions of each benchmark, its first (default: all)", at_least=1
    )


@dataclass(frozen=True, kw_only=True)
class ModelUnderTest:
    """Evaluation."""

    model: str = flag(
        "",
        "folder or Hugging Face id of a model, a checkpoint, or the URL of a `swift rollout` server",
    )
    benchmarks: list[str] = flag(
        [],
        "gsm8k, math500, aime24, amc23, minerva, olympiad_bench; any data set or file; gsm8k=FILE; name#100; or a JSON "
        "object (docs/evaluation.md)",
        objects=True,
    )
    reward_func: str | None = flag(
        None, "the reward function that judges data sets that are not benchmarks"
    )
    output_dir: str | None = flag(
        None, "folder of the evaluation; the same command continues in it (default: by model)"
    )
    compare: list[str] = flag(
        [], "two folders of evaluations: how much better the second is; takes no model"
    )
    seed: int = flag(42, "seed of the completions, and of --compare's resampling", at_least=0)


@dataclass(frozen=True, kw_only=True)
class AskedServerArguments:
    """Server."""

    api_key: str | None = flag(
        None, "key of the server (better: in SWIFT_API_KEY)", secret=API_KEY_VARIABLE
    )
    tokenizer: str | None = flag(
        None, "model folder with the tokenizer of a server (default: the model that it serves)"
    )
    vllm_server_timeout: float = flag(240.0, "seconds to wait for a lost server", more_than=0)


@dataclass(frozen=True, kw_only=True)
class EvalArguments(
    VllmArguments,
    VerifierArguments,
    PluginArguments,
    AskedServerArguments,
    AskingArguments,
    ModelUnderTest,
    Command,
):
    """Every flag of `swift eval`, flat: the attribute has the flag's name."""

    command: ClassVar[str] = "eval"

    @property
    def is_url(self) -> bool:
        return self.model.startswith(("http://", "https://"))

    @property
    def base_url(self) -> str:
        """`--model` without a slash at its end, where it is a URL."""
        return self.model.rstrip("/")

    def tasks(self) -> list[EvalTask]:
        """Returns what `--benchmarks` names, in its order; raises as `read_tasks`."""
        defaults: dict[str, Any] = {
            "num_generations": self.n,
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "max_completion_length": self.max_completion_length,
            "instruction": self.instruction,
            "reward": self.reward_func,
        }
        defaults |= {name: getattr(self, name) for name in PROMPT_FLAGS}
        return read_tasks(
            "--benchmarks", [limited(value, self.eval_limit) for value in self.benchmarks], defaults
        )

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        if self.compare:
            if len(self.compare) != 2:
                yield f"--compare takes two folders, not {len(self.compare)}"
            unread = sorted(given - {"compare", "seed", "output_dir"})
            if unread:
                names = ", ".join(f"--{name}" for name in unread)
                yield f"--compare reads finished evaluations: leave out {names}"
            return
        if not self.model:
            yield "--model is missing: a folder, a checkpoint, a Hugging Face id or a URL"
        elif self.is_url and (why := why_no_url(self.model)) is not None:
            yield f"--model {why}: {without_password(self.model)!r}"
        if not self.benchmarks:
            yield "--benchmarks is missing: --benchmarks gsm8k math500"
        yield from scope_faults(self, given & {"enable_thinking", "chat_template_kwargs"})
        try:
            tasks = self.tasks()
        except UsageError as error:
            yield from error.faults
        else:
            for task in tasks:
                if task.reward is None:
                    near = difflib.get_close_matches(task.name, BENCHMARKS, n=1)
                    hint = f" (did you mean {near[0]}?)" if near else ""
                    yield (
                        f"--benchmarks {task.name}: it is not a benchmark{hint}, so say who judges it: "
                        "--reward_func math"
                    )
        yield from self._unread(given)

    def _unread(self, given: frozenset[str]) -> Iterator[str]:
        """Flags that have no effect with this model."""
        unread = _ENGINE_FLAGS if self.is_url else _URL_FLAGS
        unused = [name for name in unread if name in given]
        if unused and self.model:
            why = "the URL of a server" if self.is_url else "a server of its own"
            yield no_effect(unused, f"with {why}")

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        if self.is_url:
            name = self.base_url.split("://")[-1].replace("/", "_")
        else:  # the last part; of a checkpoint its run's too
            parts = PurePosixPath(self.model.rstrip("/")).parts
            name = (
                "-".join(
                    parts[-2:] if parts and parts[-1].startswith("checkpoint-") else parts[-1:]
                )
                or "model"
            )
        return replace(
            self.with_secrets(environ),
            system=system_message(self.system),
            response_prefix=newlines(self.response_prefix),
            output_dir=self.output_dir or (None if self.compare else f"output/eval/{name}"),
        )

    def with_secrets(self, environ: Mapping[str, str]) -> Self:
        args = super().with_secrets(environ)
        return args if self.is_url else replace(args, api_key=None)
