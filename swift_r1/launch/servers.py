"""The rollout servers of a run, before its trainer starts: they are there, alike, and this run writes their weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from swift_r1.errors import UsageError
from swift_r1.flags.reward import NO_REWARD
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.told import with_told
from swift_r1.flags.world import World
from swift_r1.launch.checks.model_folder import config_of
from swift_r1.runtime.processes import say

_HANDOVER_S = 60.0
"""Until the trainer, which imports torch first, renews the lease that was taken for it."""


def with_servers_turns(words: Sequence[str], args: RlhfArguments, world: World) -> RlhfArguments:
    """Waits for the first rollout server; returns the arguments with what it was told of several turns, and says so.

    Raises:
        ServerUnreachable: it is not ready within `--vllm_server_timeout` seconds.
        UsageError: it wants another API key; its flags do not go with these; or nothing gives a reward.
    """
    from swift_r1.wire.client import RolloutClient

    url = _urls(args, say)[0]
    with RolloutClient(url, api_key=args.api_key) as client:
        turns = client.wait_until_ready(args.vllm_server_timeout, report=say).turns
    found, news = with_told(words, args, turns, url)
    if not found.reward_funcs and found.teaches_by is None:
        raise UsageError(f"{NO_REWARD} (the rollout server {url} plays no environment either: --use_gym_env)")
    if news and world.nnodes > 1:
        raise UsageError(f"with several nodes give the trainer what the rollout server {url} was told: {news}")
    if news:
        say(f"the rollout server {url} was told {news}: this trainer takes that, and runs the turns itself")
    return found


def wait_for_servers(
    args: RlhfArguments, resumed: Path | None, while_waiting: Callable[[], None] = lambda: None
) -> str:
    """Waits for the rollout servers with a countdown on stderr, and for the right to write their weights; returns the
    leases' token, which the trainer goes on with. `while_waiting` is called every few seconds.

    Raises:
        ServerUnreachable: one is not ready within `--vllm_server_timeout` seconds; of a file, none is.
        UsageError: one wants another API key, or another trainer writes to it; or they are not alike.
    """
    from swift_r1.rollout.pool.session import another_model, why_not_alike
    from swift_r1.sync.writer import WeightWriter, saved_token
    from swift_r1.wire.client import RolloutClient

    def report(text: str) -> None:
        while_waiting()
        say(text)

    end = time.monotonic() + args.vllm_server_timeout
    with ExitStack() as cleanup:
        clients = [cleanup.enter_context(RolloutClient(url, api_key=args.api_key)) for url in _urls(args, report)]
        infos = [one.wait_until_ready(max(end - time.monotonic(), 1.0), report=report) for one in clients]
        why = why_not_alike([(one.base_url, info) for one, info in zip(clients, infos, strict=True)])
        if why:
            raise UsageError(why)
        config = config_of(Path(args.model).expanduser())  # the tokenizer is compared when it is loaded
        known = (config.get("text_config") or config).get("vocab_size", infos[0].vocab_size)
        if known != infos[0].vocab_size:
            raise UsageError(another_model(infos[0].model, args.model))
        token = saved_token(resumed)
        for client in clients:
            writer = WeightWriter(client, ttl_s=_HANDOVER_S, token=token)
            writer.take_when_free(args.vllm_server_timeout, report=say)
            token = writer.token
    assert token is not None
    return token


def _urls(args: RlhfArguments, report: Callable[[str], None]) -> Sequence[str]:
    """Of the servers that a run begins with: those of a file that are ready. Raises as `ready_servers`."""
    if args.vllm_server_file is None:
        return args.rollout_base_urls
    from swift_r1.wire.server_file import ready_servers

    return list(ready_servers(args.vllm_server_file, args.api_key, args.vllm_server_timeout, report))
