"""The rollout servers of a run, before its trainer starts: they are there, alike, and this run writes their weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swift_r1.errors import UsageError
from swift_r1.flags.fields import as_words
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.reward import NO_REWARD
from swift_r1.flags.run import RunFlags
from swift_r1.flags.server import LOOPBACK
from swift_r1.flags.world import World
from swift_r1.launch.checks.model_folder import config_of
from swift_r1.runtime.processes import say, waiting
from swift_r1.wire.protocol import TurnFlags

_HANDOVER_S = 60.0
"""Until the trainer, which imports torch first, renews the lease that was taken for it."""


def with_servers_turns(words: Sequence[str], args: RunFlags, world: World) -> RunFlags:
    """Waits for the first rollout server; returns the arguments with what it was told of several turns, and says so.

    Raises:
        ServerUnreachable: it is not ready within `--vllm_server_timeout` seconds.
        UsageError: it wants another API key; its flags do not go with these; or nothing gives a reward.
    """
    from swift_r1.wire.client import RolloutClient

    with waiting() as report:
        url = _urls(args, report)[0]
        with RolloutClient(url, api_key=args.api_key) as client:
            turns = client.wait_until_ready(args.vllm_server_timeout, report=report).turns
    changed, news = with_turn_flags(words, args, turns, url)
    if not changed.reward_funcs and changed.distillation is None:
        raise UsageError(
            f"{NO_REWARD} (the rollout server {url} plays no environment either: --use_gym_env)"
        )
    if news and world.nnodes > 1:
        raise UsageError(
            f"with several nodes give the trainer what the rollout server {url} was told: {news}"
        )
    if news:
        say(
            f"the rollout server {url} was told {news}: this trainer takes that, and runs the turns itself"
        )
    return changed


def with_turn_flags(
    words: Sequence[str], args: RunFlags, turns: TurnFlags, url: str
) -> tuple[RunFlags, str]:
    """Returns the arguments of the command line `words`, parsed as `args` before, with what the server at `url` names
    and they do not; and that as words, empty where there is nothing. Plugin files of both are loaded, but none of a
    server on another machine. Raises UsageError: both name a flag differently, or its value does not go with others."""
    theirs = turns.model_dump(exclude_defaults=True)
    plugins = [Path(path) for path in theirs.pop("external_plugins", ())]
    # Nobody else's server says which code this machine runs.
    here = [path for path in plugins if path.is_file() and urlsplit(url).hostname in LOOPBACK]
    own = {name: getattr(args, name) for name in theirs if getattr(args, name) not in (None, {})}
    faults = [
        f"{_as_text({name: value})} here and {_as_text({name: theirs[name]})} at the rollout server {url}: give the "
        "same to both, or leave one out"
        for name, value in own.items()
        if value != theirs[name]
    ]
    if not args.external_plugins:
        faults += [
            f"the rollout server {url} was told --external_plugins {path}, which is not a file of this machine's: give "
            "--external_plugins to the trainer too, which runs the turns"
            for path in plugins
            if path not in here
        ]
    if faults:
        raise UsageError(*faults)
    news = {name: value for name, value in theirs.items() if name not in own}
    known = {Path(path).expanduser().resolve() for path in args.external_plugins}
    more = [str(path) for path in here if path.resolve() not in known]
    if more:
        news["external_plugins"] = [*args.external_plugins, *more]
    if not news:
        return args, ""
    try:
        parsed = parse_arguments(type(args), words, from_server=news)
    except UsageError as error:
        raise UsageError(
            f"with {_as_text(news)}, as the rollout server {url} was told:", *error.faults
        ) from error
    return replace(parsed, output_dir=args.output_dir), _as_text(news)


def _as_text(flags: Mapping[str, Any]) -> str:
    return " ".join(as_words(flags))


def wait_for_servers(
    args: RunFlags,
    resumed: Path | None,
    while_waiting: Callable[[], None] = lambda: None,
    images: int = 0,
) -> str:
    """Waits for the rollout servers with a countdown on stderr, and for the right to write their weights; returns the
    leases' token, which the trainer goes on with. `while_waiting` is called every few seconds; `images` are the most
    that a row has.

    Raises:
        ServerUnreachable: one is not ready within `--vllm_server_timeout` seconds; of a file, none is.
        UsageError: one wants another API key, or another trainer writes to it; they are not alike, or do not take the
            images.
    """
    from swift_r1.rollout.pool.session import another_model, why_not_alike
    from swift_r1.sync.writer import WeightWriter, saved_token
    from swift_r1.wire.client import RolloutClient

    end = time.monotonic() + args.vllm_server_timeout
    with ExitStack() as cleanup:
        tell = cleanup.enter_context(waiting())

        def report(text: str) -> None:
            while_waiting()
            tell(text)

        clients = [
            cleanup.enter_context(RolloutClient(url, api_key=args.api_key))
            for url in _urls(args, report)
        ]
        infos = [
            one.wait_until_ready(max(end - time.monotonic(), 1.0), report=report) for one in clients
        ]
        why = why_not_alike(
            [(one.base_url, info) for one, info in zip(clients, infos, strict=True)]
        )
        if why:
            raise UsageError(why)
        most = infos[0].max_images
        if images > most:
            raise UsageError(
                f"a row has {images} images, and the rollout server at {clients[0].base_url} takes {most or 'none'} in a "
                f"""prompt: start it with --vllm_limit_mm_per_prompt '{{"image": {images}}}'"""
            )
        # the tokenizer is compared when it is loaded
        config = config_of(Path(args.model).expanduser())
        known = (config.get("text_config") or config).get("vocab_size", infos[0].vocab_size)
        if known != infos[0].vocab_size:
            raise UsageError(another_model(infos[0].model, args.model))
        token = saved_token(resumed)
        for client in clients:
            writer = WeightWriter(client, ttl_s=_HANDOVER_S, token=token)
            writer.take_when_free(args.vllm_server_timeout, report=tell)
            token = writer.token
    assert token is not None
    return token


def _urls(args: RunFlags, report: Callable[[str], None]) -> Sequence[str]:
    """Returns the addresses of the servers that a run begins with: those of a file that are ready. Raises as
    `ready_servers`."""
    if args.vllm_server_file is None:
        return args.rollout_base_urls
    from swift_r1.wire.server_file import ready_servers

    return list(
        ready_servers(args.vllm_server_file, args.api_key, args.vllm_server_timeout, report)
    )
