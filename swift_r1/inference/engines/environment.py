"""What vLLM's own processes must find in their environment, whatever started the server.

Allocator, OpenMP runtime and processor binding are the launcher's (`swift_r1.launch.environment`).
"""

from __future__ import annotations

from collections.abc import Mapping


def engine_environment(environment: Mapping[str, str], has_gpu: bool, eager: bool) -> dict[str, str]:
    """Variables to add for the engine's processes; what the user has set is left alone.

    Args:
        environment: the present one.
        eager: nothing is to be compiled.
    """
    # Engines start afresh, with nothing of this process's threads or locks; and they report to no one.
    wanted = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if eager and not has_gpu:
        # Else one helper of the sampler is compiled, 10 s at the first request, and needs a C++ compiler.
        wanted["TORCH_COMPILE_DISABLE"] = "1"
    return {name: value for name, value in wanted.items() if name not in environment}
