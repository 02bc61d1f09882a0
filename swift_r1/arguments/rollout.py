"""Flags of generation: who samples the completions, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift_r1.arguments.fields import flag


@dataclass(frozen=True, kw_only=True)
class GenerationArguments:
    """Rollouts."""

    use_vllm: bool | None = flag(
        None,
        "generate with vLLM instead of in the trainer's process (default: on a CPU true, with --vllm_mode colocate, "
        "where model and run are large enough to gain; a line says which)",
        ms_swift="false",
    )
    vllm_mode: str = flag(
        "server",
        "where vLLM runs: in a `swift rollout` of yours, or in processes of this run's own beside each rank",
        choices=("server", "colocate"),
        ms_swift="colocate",
    )
    vllm_max_model_len: int | None = flag(
        None,
        "colocate: longest prompt plus completion in tokens (default: --max_length and the longest completion, else "
        "the model's)",
        at_least=2,
    )
    vllm_enforce_eager: bool | None = flag(None, "colocate: no torch.compile and no CUDA graphs; as of `swift rollout`")
    vllm_gpu_memory_utilization: float | None = flag(
        None, "colocate, on a GPU: its share for the engine (default: 0.3)", more_than=0, at_most=1, ms_swift="0.9"
    )
    sleep_level: int = flag(
        0,
        "colocate, on a GPU: what the engine gives back between rounds: 0 nothing, 1 its memory, with its weights kept "
        "in the host's, 2 with its weights discarded",
        at_least=0,
        at_most=2,
    )
    offload_model: bool = flag(
        False,
        "with --sleep_level: the trained models and the reference are in host memory during generation",
    )
    offload_optimizer: bool = flag(
        False, "with --sleep_level: float32 weights, gradients and moments are in host memory during generation"
    )
    vllm_engine_kwargs: dict[str, Any] = flag({}, "colocate: any other argument of vLLM's engine, as JSON")
    vllm_server_host: list[str] = flag([], "address of the `swift rollout` server; several: of each of them")
    vllm_server_port: list[int] = flag(
        [8000], "port of the `swift rollout` server; one for all hosts, or one each", at_least=1, at_most=65535
    )
    vllm_server_base_url: list[str] = flag([], "URL of the server, or of each of several, instead of host and port")
    vllm_server_timeout: float = flag(
        240.0, "seconds to wait for the server, at the start and each time it is lost", more_than=0
    )
    weight_transport: str = flag(
        "auto",
        "how weights go to the server: auto takes shared memory where it is on this host, else http; nccl needs GPUs "
        "on both sides",
        choices=("auto", "shm", "http", "nccl"),
    )
    weight_delta: str = flag(
        "auto",
        "send only the weights that a step has changed, by http: auto to servers on other hosts, where that is smaller",
        choices=("auto", "true", "false"),
    )
    weight_check_steps: int = flag(
        10, "weight updates between two comparisons of the server's log-probs with the trainer's; 0: none", at_least=0
    )
    async_generate: bool = flag(
        False, "the server generates for coming rounds, and they are scored, while the trainer trains (docs/async.md)"
    )
    max_staleness: int = flag(
        1,
        "rounds of training that may lie between the weights that wrote a completion and those that learn from it; 0: "
        "exactly the run without --async_generate",
        at_least=0,
    )
    api_key: str | None = flag(None, "the server's key (better: the environment variable SWIFT_API_KEY)", secret=True)
    num_generations: int = flag(8, "completions a prompt: the size of a group; with PPO it may be 1", at_least=1)
    temperature: float = flag(1.0, "sampling temperature", more_than=0, ms_swift="0.9")
    top_p: float = flag(
        1.0,
        "sample from the likeliest tokens of this mass (docs/algorithms.md)",
        more_than=0,
        at_most=1,
        ms_swift="1, 0.9 in version 3",
    )
    top_k: int = flag(
        -1, "sample from so many likeliest tokens; -1: from all", at_least=-1, ms_swift="-1, 50 in version 3"
    )
    max_completion_length: int = flag(512, "longest completion in tokens", at_least=1)
    stop_words: list[str] = flag([], "strings that end a completion")

    @property
    def cuts_sampling(self) -> bool:
        """Whether completions come from a part of the policy's distribution."""
        return self.top_p < 1 or self.top_k > 0

    @property
    def colocates(self) -> bool:
        """Whether engines are this run's own; the launcher then fills in `vllm_server_base_url`."""
        return bool(self.use_vllm) and self.vllm_mode == "colocate"

    @property
    def rollout_base_urls(self) -> tuple[str, ...]:
        """URLs of the rollout servers without a slash at the end; none where the trainer generates itself."""
        if not self.use_vllm or (self.colocates and not self.vllm_server_base_url):
            return ()
        if self.vllm_server_base_url:
            return tuple(url.rstrip("/") for url in self.vllm_server_base_url)
        hosts, ports = self.vllm_server_host or ["127.0.0.1"], self.vllm_server_port
        number = max(len(hosts), len(ports))
        pairs = zip(hosts * (number // len(hosts)), ports * (number // len(ports)), strict=False)
        return tuple(f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in pairs)
