"""Which engine `--model` means."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx

from swift_r1.arguments.evaluation import EvalArguments
from swift_r1.arguments.server import LOOPBACK
from swift_r1.errors import ServerUnreachable, SwiftError, UsageError
from swift_r1.evaluation.engines.base import Engine
from swift_r1.evaluation.engines.endpoint import EndpointEngine
from swift_r1.evaluation.engines.local import LocalEngine
from swift_r1.evaluation.engines.server import OwnServerEngine, ServerEngine, vllm_version
from swift_r1.evaluation.model import base_of
from swift_r1.sampling.pool.client import RolloutClient
from swift_r1.wire.protocol import ServerInfo

_LOOK_S = 10.0
_PAUSE_S = 0.5


def open_engine(args: EvalArguments, folder: Path) -> Engine:
    """The engine; nothing heavy is loaded before its `start`.

    Raises:
        UsageError: there is no such engine here, or no tokenizer for it.
        ServerUnreachable: no server or endpoint within `--vllm_server_timeout`.
    """
    if args.is_url:
        return _at_url(args)
    stop = args.stop_words
    if args.infer_backend == "transformers":
        return LocalEngine(args.model, args.torch_dtype, args.per_device_eval_batch_size, args.seed, stop)
    if vllm_version() is None:
        raise UsageError("vLLM is not installed here: --infer_backend transformers needs none")
    dtype, longest = _of_config(args)
    return OwnServerEngine(
        args.model, _server_words(args), folder / "server.log", dtype, longest, args.seed, args.stop_words
    )


def _at_url(args: EvalArguments) -> Engine:
    if args.endpoint in ("auto", "rollouts"):
        engine = _rollout_server(args)
        if engine is not None:
            return engine
    render = args.endpoint == "completions"
    tokenizer = _load(args.tokenizer, f"--tokenizer {args.tokenizer}") if render and args.tokenizer else None
    if render and tokenizer is None:
        raise UsageError("--endpoint completions sends rendered prompts: name the model's folder with --tokenizer")
    return EndpointEngine(
        args.base_url,
        args.api_key,
        args.served_model_name,
        args.max_concurrent_requests,
        args.vllm_server_timeout,
        args.request_timeout,
        args.seed,
        args.stop_words,
        tokenizer,
    )


def _rollout_server(args: EvalArguments) -> ServerEngine | None:
    """The engine of a `swift rollout` server; None where there is another kind of server.

    Raises:
        UsageError: one was asked for (`--endpoint rollouts`), or its tokenizer cannot be had.
        ServerUnreachable: it is not ready in time.
    """
    if not _is_ours(args):
        if args.endpoint == "rollouts":
            raise UsageError(f"--endpoint rollouts: there is no `swift rollout` server at {args.base_url}")
        return None
    client = RolloutClient(args.base_url, args.api_key)
    try:
        info = client.wait_until_ready(args.vllm_server_timeout)
        return ServerEngine(client, info, _tokenizer(args, info), args.vllm_server_timeout, args.seed, args.stop_words)
    except SwiftError:
        client.close()
        raise


def _is_ours(args: EvalArguments) -> bool:
    """Whether a `swift rollout` server is at the URL, ready or not. Waits for whatever is there.

    Raises:
        ServerUnreachable: nothing answers within `--vllm_server_timeout`.
        UsageError: it wants another key.
    """
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    end = time.monotonic() + args.vllm_server_timeout
    while True:
        try:
            answer = httpx.get(f"{args.base_url}/info", headers=headers, timeout=_LOOK_S, trust_env=trusts(args))
            break
        except httpx.HTTPError as error:
            if time.monotonic() >= end:
                raise ServerUnreachable(
                    f"nothing answers at {args.base_url} within {args.vllm_server_timeout:g} s: {error or type(error)}"
                ) from error
            time.sleep(_PAUSE_S)
    try:
        content = answer.json()
    except ValueError:
        return False
    if not isinstance(content, dict):
        return False
    if answer.status_code == 200:
        return content.keys() >= {"instance", "tokenizer_hash", "weight_version"}
    # Ours says what is wrong in one sentence; OpenAI's protocol has an object there, and no such path.
    ours = isinstance(content.get("error"), str)
    if ours and answer.status_code == 401:
        raise UsageError(f"the rollout server at {args.base_url} wants another API key (--api_key)")
    return ours and answer.status_code == 503


def trusts(args: EvalArguments) -> bool:
    """Whether the environment's proxies are used: they are for the internet, not for a server beside us."""
    return httpx.URL(args.base_url).host not in LOOPBACK


def _tokenizer(args: EvalArguments, info: ServerInfo) -> Any:
    hint = "name its folder with --tokenizer, or let the server render the prompts: --endpoint chat"
    return _load(args.tokenizer or info.model, f"the tokenizer of the server's model {info.model}", f": {hint}")


def _load(path: str, what: str, hint: str = "") -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{what} cannot be loaded here{hint}") from error


def _of_config(args: EvalArguments) -> tuple[str, int | None]:
    """dtype and longest sequence of a model folder."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base_of(args.model) or args.model)
    own = str(config.dtype or "float32").removeprefix("torch.")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    return args.torch_dtype or own, args.max_model_len or longest


def _server_words(args: EvalArguments) -> list[str]:
    """The engine's flags for `swift rollout`."""
    values = {
        "torch_dtype": args.torch_dtype,
        "max_model_len": args.max_model_len,
        "vllm_gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "vllm_enforce_eager": None if args.vllm_enforce_eager is None else str(args.vllm_enforce_eager).lower(),
        "vllm_tensor_parallel_size": args.vllm_tensor_parallel_size,
        "vllm_data_parallel_size": args.vllm_data_parallel_size,
        "vllm_enable_prefix_caching": str(args.vllm_enable_prefix_caching).lower(),
        "vllm_engine_kwargs": json.dumps(args.vllm_engine_kwargs) if args.vllm_engine_kwargs else None,
        "seed": args.seed,
    }
    return [word for name, value in values.items() if value is not None for word in (f"--{name}", str(value))]
