"""`--vllm_server_file`: the rollout servers of a run, a URL a line, which a user or a launcher changes as it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from swift_r1.errors import RunFailed, ServerUnreachable
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import ServerInfo
from swift_r1.wire.urls import why_no_url, without_password

_LOOK_S = 0.5
_REPORT_EVERY_S = 5.0
_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class ServerList:
    """The content of such a file: URLs without a slash at the end, each once, and what is wrong with the other
    lines."""

    urls: tuple[str, ...]
    faults: tuple[str, ...] = ()


def parsed(text: str, name: str) -> ServerList:
    """The servers in the `text` of a file called `name`. What follows a # is a comment."""
    urls: dict[str, None] = {}
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        why = why_no_url(word)
        if why is None:
            urls[word.rstrip("/")] = None
        else:
            faults.append(f"{name}, line {number}: {without_password(word)!r} {why}")
    return ServerList(tuple(urls), tuple(faults))


def servers_of(path: str) -> ServerList:
    """Raises OSError where the file cannot be read."""
    return parsed(Path(path).read_text(encoding="utf-8", errors="replace"), path)


def server_file_faults(path: str) -> list[str]:
    """Returns what is wrong with the file at the start of a run."""
    try:
        return [f"--vllm_server_file {fault}" for fault in servers_of(path).faults]
    except OSError as error:
        return [f"--vllm_server_file {path} cannot be read: {error.strerror or error}"]


def ready_servers(
    path: str, api_key: str | None, deadline_s: float, report: Callable[[str], None]
) -> dict[str, ServerInfo]:
    """The servers of the file that are ready, as soon as one is; `report` gets a line with a countdown every few
    seconds.

    Raises:
        ServerUnreachable: none was within `deadline_s` seconds.
        UsageError: one wants another API key.
    """

    def look(url: str) -> ServerInfo | str:
        with RolloutClient(url, api_key) as client:
            try:
                return client.why_not_ready() or client.info()
            except (ServerUnreachable, RunFailed) as error:
                # it went between two questions, or is of another version
                return str(error)

    next_report = time.monotonic()
    end = next_report + deadline_s
    while True:
        try:
            urls = servers_of(path).urls
        except OSError as error:
            urls = ()
            why = f"it cannot be read ({error.strerror or error})"
        else:
            why = "it names none"
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            seen = dict(zip(urls, threads.map(look, urls), strict=True))
        ready = {url: info for url, info in seen.items() if isinstance(info, ServerInfo)}
        if ready:
            return ready
        why = "; ".join(f"{url}: {info}" for url, info in seen.items()) or why
        left = end - time.monotonic()
        if left <= 0:
            raise ServerUnreachable(
                f"no rollout server of {path} was ready within {deadline_s:g} s ({why})"
            )
        if time.monotonic() >= next_report:
            report(f"waiting for a rollout server of {path}: {why}; {left:.0f} s left")
            next_report = time.monotonic() + _REPORT_EVERY_S
        time.sleep(min(_LOOK_S, left))
