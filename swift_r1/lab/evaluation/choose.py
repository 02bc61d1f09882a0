"""The choice of the engine that `--model` means."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from swift_r1.errors import ServerUnreachable, SwiftError, UsageError
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.lab.evaluation.endpoint import EndpointEngine, http_options
from swift_r1.lab.evaluation.engine import EvalEngine, InProcessEngine
from swift_r1.lab.evaluation.server import OwnServerEngine, ServerEngine
from swift_r1.wire.client import RolloutClient, other_key

_LOOK_S = 10.0
_PAUSE_S = 0.5


def open_engine(args: EvalArguments, folder: Path) -> EvalEngine:
    """Returns the engine; nothing heavy is loaded before its `start`. Raises UsageError: there is no such engine here,
    or no tokenizer for it; ServerUnreachable: no server or endpoint within `--vllm_server_timeout`."""
    if not args.is_url:
        local = args.infer_backend == "transformers"
        return InProcessEngine(args) if local else OwnServerEngine(args, folder / "server.log")
    if args.endpoint in ("auto", "rollouts"):
        if _is_rollout_server(args):
            return _rollout_server(args)
        if args.endpoint == "rollouts":
            raise UsageError(
                f"--endpoint rollouts: there is no `swift rollout` server at {args.base_url}"
            )
    if args.endpoint != "completions":
        return EndpointEngine(args)
    if not args.tokenizer:
        raise UsageError(
            "--endpoint completions sends rendered prompts: name the model's folder with --tokenizer"
        )
    return EndpointEngine(args, _tokenizer(args.tokenizer, f"--tokenizer {args.tokenizer}"))


def _rollout_server(args: EvalArguments) -> ServerEngine:
    """Waits for the server; raises as `open_engine`."""
    client = RolloutClient(args.base_url, args.api_key)
    try:
        info = client.wait_until_ready(args.vllm_server_timeout)
        hint = ": name its folder with --tokenizer, or let the server render the prompts: --endpoint chat"
        what = f"the tokenizer of the server's model {info.model}"
        tokenizer = _tokenizer(args.tokenizer or info.model, what, hint)
        return ServerEngine(args, client, info, tokenizer, args.vllm_server_timeout)
    except SwiftError:
        client.close()
        raise


def _is_rollout_server(args: EvalArguments) -> bool:
    """Returns whether a `swift rollout` server, ready or not, is at the URL, where something must answer within
    `--vllm_server_timeout`; raises UsageError where it wants another key."""
    end = time.monotonic() + args.vllm_server_timeout
    while True:
        try:
            with httpx.Client(**http_options(args), timeout=_LOOK_S) as http:
                answer = http.get("/info")
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
        raise UsageError(other_key(f"the rollout server at {args.base_url}", bool(args.api_key)))
    return ours and answer.status_code == 503


def _tokenizer(path: str, what: str, hint: str = "") -> Any:
    from swift_r1.models.loading import load_tokenizer

    try:
        return load_tokenizer(path)
    except UsageError as error:
        raise UsageError(f"{what} cannot be loaded here{hint}") from error
