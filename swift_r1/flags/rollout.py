"""Flags of generation: who samples the completions, how, and in how many turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from swift_r1.errors import no_such
from swift_r1.flags.engine import EngineFlags
from swift_r1.flags.fields import (
    Scope,
    check_no_key,
    check_pattern,
    check_stop_word,
    check_url,
    flag,
    resumable_flag,
)
from swift_r1.flags.parser import API_KEY_VARIABLE
from swift_r1.sandboxes.base import SandboxLimits, SandboxSpec, proxy_address
from swift_r1.sandboxes.providers import PROVIDERS

GYM_SCHEDULER = "gym_scheduler"
TOOL_SCHEDULER = "tool_scheduler"


_VLLM = Scope(lambda args: args.use_vllm, "without --use_vllm true")
_A_SERVER = Scope(
    lambda args: bool(args.use_vllm or args.teacher_model_server), "without --use_vllm true"
)
_COLOCATED = Scope(
    lambda args: args.colocates, "without --vllm_mode colocate: give it to `swift rollout`"
)
_OWN_ADDRESS = Scope(
    lambda args: not args.colocates,
    "with --vllm_mode colocate, whose engines have addresses and a key already: use --vllm_mode server",
)
_AN_ENGINE = Scope(lambda args: args.use_vllm, "without --use_vllm true", allow_default=True)
_ASYNC = Scope(lambda args: args.async_generate, "without --async_generate true")
_GYM = Scope(lambda args: args.plays_gym, "without --use_gym_env true")
_TURNS = Scope(
    lambda args: args.scheduler_name is not None or args.plays_agent,
    "without --multi_turn_scheduler, --tools, --use_gym_env true or an agent",
)
_CALLS = Scope(
    lambda args: args.calls_tools,
    f"without --tools, --mcp_servers or --multi_turn_scheduler {TOOL_SCHEDULER}",
)
_SERVERS = Scope(
    lambda args: args.calls_tools or args.plays_agent,
    f"with another --multi_turn_scheduler than {TOOL_SCHEDULER}, or an environment, which would not call them",
)
_PARSES = Scope(
    lambda args: args.calls_tools or args.plays_agent,
    f"without --tools, --multi_turn_scheduler {TOOL_SCHEDULER} or an agent",
)
_SCHEDULES = Scope(
    lambda args: args.scheduler_name is not None,
    "without --multi_turn_scheduler, --tools or --use_gym_env true",
)


def url_of(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _check_limits(values: Mapping[str, Any]) -> None:
    known = [limit.name for limit in fields(SandboxLimits)]
    for name in values:
        if name not in known:
            raise ValueError(no_such("limit", name, known))
    SandboxLimits(**values)


def _check_proxy(named: str) -> None:
    proxy_address(named)


@dataclass(frozen=True, kw_only=True)
class GenerationArguments(EngineFlags):
    """Rollouts."""

    use_vllm: bool | None = flag(
        None,
        "generate with vLLM instead of in the trainer's process (default: true, with --vllm_mode colocate, where model "
        "and run are large enough to gain and a GPU has room for both; a line says which)",
        ms_swift="false",
    )
    vllm_mode: str = flag(
        "server",
        "where vLLM runs: in a `swift rollout` server that you start, or in processes that this run starts beside "
        "each rank",
        _VLLM,
        choices=("server", "colocate"),
        ms_swift="colocate",
    )
    vllm_max_model_len: int | None = resumable_flag(
        None,
        "colocate: longest prompt plus completion in tokens (default: --max_length and the longest completion, else "
        "the model's)",
        _COLOCATED,
        at_least=2,
    )
    vllm_gpu_memory_utilization: float | None = resumable_flag(
        None,
        "colocate, on a GPU: the engine's share (default: by the memory estimate, which a line says; else 0.3)",
        _COLOCATED,
        more_than=0,
        at_most=1,
        gpu_only=True,
        ms_swift="0.9",
    )
    sleep_level: int = resumable_flag(
        0,
        "on a GPU: what the engine frees between rounds: 0 nothing, 1 its memory, with its weights kept in host "
        "memory, 2 with its weights discarded; a `swift rollout` sleeps if vLLM's enable_sleep_mode is on there",
        _AN_ENGINE,
        at_least=0,
        at_most=2,
        gpu_only=True,
    )
    offload_model: bool = resumable_flag(
        False,
        "on a GPU: trained models and reference are in host memory while the engine generates",
        _AN_ENGINE,
        gpu_only=True,
    )
    offload_optimizer: bool = resumable_flag(
        False, "on a GPU: float32 weights, gradients and moments are too", _AN_ENGINE, gpu_only=True
    )
    vllm_engine_kwargs: dict[str, Any] = resumable_flag(
        {}, "colocate: other arguments of vLLM's engine", _COLOCATED, check=check_no_key
    )
    vllm_server_host: list[str] = resumable_flag(
        [], "address of each `swift rollout` server", _VLLM, _OWN_ADDRESS
    )
    vllm_server_port: list[int] = resumable_flag(
        [8000],
        "port of the servers; one for all hosts, or one each",
        _VLLM,
        _OWN_ADDRESS,
        at_least=1,
        at_most=65535,
    )
    vllm_server_base_url: list[str] = resumable_flag(
        [],
        "URL of each server",
        _VLLM,
        _OWN_ADDRESS,
        check=check_url,
        instead_of=("vllm_server_host", "vllm_server_port"),
    )
    vllm_server_file: str | None = resumable_flag(
        None,
        "file with one server URL per line, read about once a second: servers join and leave the running training "
        "(docs/server.md)",
        _VLLM,
        _OWN_ADDRESS,
        instead_of=("vllm_server_host", "vllm_server_port", "vllm_server_base_url"),
    )
    vllm_server_timeout: float = resumable_flag(
        240.0,
        "seconds to wait for a server, at the start and when it is lost",
        _A_SERVER,
        more_than=0,
    )
    weight_transport: str = resumable_flag(
        "auto",
        "how weights go to the server: auto takes shared memory where it is on this host, else http; nccl needs GPUs "
        "on both sides",
        _VLLM,
        choices=("auto", "shm", "http", "nccl"),
    )
    weight_delta: str = resumable_flag(
        "auto",
        "send only the weights that a step has changed, by http: auto to servers on other hosts, where that is smaller",
        _VLLM,
        choices=("auto", "true", "false"),
    )
    weight_fanout: int | None = resumable_flag(
        None,
        "by http weights go to so many servers, which pass them on to the others; 0: to all from rank 0; by default 2 "
        "from 5 servers on other hosts on, else 0",
        _VLLM,
        at_least=0,
    )
    weight_check_steps: int = resumable_flag(
        10,
        "updates between two comparisons of the server's log-probs with the trainer's; 0: none",
        _VLLM,
        at_least=0,
    )
    batch_invariant: bool = flag(
        False,
        "a token's numbers do not depend on what is computed beside it: without vLLM, on a CPU, engine and trainer then "
        "have the same bits, and rollout/logp_diff is 0 (docs/why-exact.md); with vLLM, on a GPU, only its engine does so",
    )
    async_generate: bool = flag(
        False, "generate and score the next rounds while the trainer trains (docs/async.md)"
    )
    max_staleness: int = flag(
        1,
        "rounds of training that may lie between the weights that wrote a completion and those that learn from it; 0: "
        "exactly the run without --async_generate",
        _ASYNC,
        at_least=0,
    )
    api_key: str | None = resumable_flag(
        None,
        "the server's key (better: in SWIFT_API_KEY)",
        _A_SERVER,
        _OWN_ADDRESS,
        secret=API_KEY_VARIABLE,
    )
    num_generations: int = flag(
        8,
        "completions per prompt: the size of a group; 1 with PPO or reinforce_plus_plus",
        at_least=1,
    )
    temperature: float = flag(1.0, "sampling temperature", more_than=0, ms_swift="0.9")
    top_p: float = flag(
        1.0,
        "nucleus sampling: keep the likeliest tokens up to this probability mass",
        more_than=0,
        at_most=1,
        ms_swift="1, 0.9 in version 3",
    )
    top_k: int = flag(
        -1,
        "sample from the k likeliest tokens; -1: all",
        at_least=-1,
        ms_swift="-1, 50 in version 3",
    )
    min_p: float = flag(
        0.0,
        "keep tokens with at least this share of the likeliest token's probability",
        at_least=0,
        less_than=1,
    )
    repetition_penalty: float = flag(
        1.0,
        "divides (or multiplies, where negative) the logits of tokens that were there already; the engine samples from "
        "the penalised distribution, the policy's ratios are without it (docs/algorithms.md)",
        more_than=0,
    )
    structured_outputs_regex: str | None = flag(
        None,
        "completions match this pattern as a whole (vLLM); tokens that cannot follow are not sampled",
        check=check_pattern,
    )
    max_completion_length: int = flag(
        512, "maximum completion length in tokens", at_least=1, aliases=("response_length",)
    )
    stop_words: list[str] = flag([], "strings that end a completion", check=check_stop_word)

    @property
    def cuts_sampling(self) -> bool:
        """Whether completions come from a part of the policy's distribution, which is not changed otherwise."""
        cut = (
            self.top_p < 1
            or self.top_k > 0
            or self.min_p > 0
            or self.structured_outputs_regex is not None
        )
        return cut and self.repetition_penalty == 1

    @property
    def samples_otherwise(self) -> bool:
        """Whether completions come from another distribution than the policy's at `--temperature`."""
        return self.cuts_sampling or self.repetition_penalty != 1

    @property
    def colocates(self) -> bool:
        """Whether engines are this run's own; the launcher then fills in `vllm_server_base_url`."""
        return bool(self.use_vllm) and self.vllm_mode == "colocate"

    @property
    def starts_engine(self) -> bool:
        return self.colocates

    @property
    def asks_servers(self) -> bool:
        """Whether completions come from servers that others have started, and that may say how turns go."""
        return bool(self.use_vllm) and self.vllm_mode == "server"

    @property
    def rollout_base_urls(self) -> tuple[str, ...]:
        """URLs of the rollout servers without a slash at the end; none where the trainer generates itself, or
        `--vllm_server_file` has them."""
        if (
            not self.use_vllm
            or self.vllm_server_file
            or (self.colocates and not self.vllm_server_base_url)
        ):
            return ()
        if self.vllm_server_base_url:
            return tuple(url.rstrip("/") for url in self.vllm_server_base_url)
        hosts = self.vllm_server_host or ["127.0.0.1"]
        ports = self.vllm_server_port
        number = max(len(hosts), len(ports))
        pairs = zip(hosts * (number // len(hosts)), ports * (number // len(ports)), strict=False)
        return tuple(url_of(host, port) for host, port in pairs)


@dataclass(frozen=True, kw_only=True)
class TurnArguments:
    """Several turns."""

    multi_turn_scheduler: str | None = flag(
        None, "name of a registered multi-turn scheduler (multi_turns)"
    )
    max_turns: int | None = flag(
        None,
        "maximum turns per completion (default: no limit; 1000 for agents)",
        _TURNS,
        at_least=1,
    )
    use_gym_env: bool | None = flag(
        None,
        "play episodes of an environment; the total reward is added as gym_reward (default: true if --gym_env is "
        "given)",
    )
    gym_env: str | None = flag(
        None, "name of the environment (default: the column env_config says)", _GYM
    )
    context_manager: str | None = flag(
        None, "name of a context manager for the environment's episodes", _GYM
    )

    @property
    def plays_gym(self) -> bool:
        """`--use_gym_env` with its default."""
        return self.gym_env is not None if self.use_gym_env is None else self.use_gym_env

    @property
    def plays_agent(self) -> bool:
        """Whether an agent plays whole episodes."""
        return False

    @property
    def scheduler_name(self) -> str | None:
        """The scheduler's name; that of environments where only one of those is named."""
        return self.multi_turn_scheduler or (GYM_SCHEDULER if self.plays_gym else None)


@dataclass(frozen=True, kw_only=True)
class MultiTurnArguments(TurnArguments):
    """Several turns."""

    loss_scale: str = flag(
        "default",
        "of several turns, which are trained: default all that the policy wrote, last_round those of its last message",
        choices=("default", "last_round"),
        elsewhere={
            "all": "is written default here (prompts are never trained)",
            **dict.fromkeys(
                ("react", "hermes", "qwen", "agentflan", "alpha_umi"),
                "is written default here (tokens have no weights by pattern)",
            ),
        },
        ms_swift="last_round without a scheduler, where both are the same",
    )
    completion_length_limit_scope: str = flag(
        "per_round",
        "whether --max_completion_length counts per turn or for the whole completion",
        _TURNS,
        choices=("per_round", "total"),
    )
    multi_turn_timeout: float = resumable_flag(
        60.0,
        "seconds that a scheduler or environment may take between two turns",
        _SCHEDULES,
        more_than=0,
    )
    max_episode_seconds: float | None = flag(
        None,
        "seconds since the start of an episode, after which the model gets no further turn in it (default: no limit)",
        _TURNS,
        more_than=0,
    )
    tools: list[str] = flag(
        [],
        "registered tools that the model may call in rows without a `tools` column (docs/tools.md)",
    )
    mcp_servers: str | None = flag(
        None,
        "JSON file of MCP servers, in the form of other MCP clients; the model may call their tools (docs/tools.md)",
        _SERVERS,
    )
    tool_call_parser: str | None = flag(
        None,
        "vLLM's parser of the model's tool calls, by name (default: guessed from the chat template, a line says which)",
        _PARSES,
    )
    tool_timeout: float = flag(
        10.0, "seconds before a tool call's process is killed", _CALLS, more_than=0
    )
    max_tool_response_length: int = flag(
        10_000,
        "characters of a tool's answer that the model sees; the rest is cut, and a mark says so",
        _CALLS,
        at_least=1,
    )
    sandbox_provider: str = flag(
        "local",
        "where the tool shell has its sandboxes: in namespaces of this machine, or at Docker, E2B or Modal "
        "(docs/sandbox.md)",
        _CALLS,
        choices=PROVIDERS,
    )
    sandbox_image: str = flag(
        "host",
        "root of these sandboxes: for local host (this machine's programs), a folder with a root; for others their "
        "name of an image or template",
        _CALLS,
    )
    sandbox_limits: dict[str, Any] = flag(
        {},
        "limits of each sandbox: cpus, cpu_seconds, memory_bytes, processes, disk_bytes, output_bytes, seconds",
        _CALLS,
        check=_check_limits,
    )
    sandbox_network: str | None = flag(
        None,
        "HOST:PORT of a proxy, all of a network that sandboxes reach (default: they reach nothing)",
        _CALLS,
        check=_check_proxy,
    )

    @property
    def scheduler_name(self) -> str | None:
        """The scheduler's name; that of environments or tools where only those are named."""
        return super().scheduler_name or (
            TOOL_SCHEDULER if self.tools or self.mcp_servers else None
        )

    @property
    def sandbox_spec(self) -> SandboxSpec:
        """What a sandbox of the tool `shell` is made of."""
        limits = SandboxLimits(**self.sandbox_limits)
        return SandboxSpec(self.sandbox_image, limits, self.sandbox_network)

    @property
    def calls_tools(self) -> bool:
        """Whether the run itself calls the tools."""
        return self.scheduler_name == TOOL_SCHEDULER
