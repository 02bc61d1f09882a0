"""What a rollout server was told of several turns, as flags of the trainer, which runs them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swift_r1.errors import UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.server import LOOPBACK
from swift_r1.wire.protocol import TurnFlags


def with_told(words: Sequence[str], args: RlhfArguments, turns: TurnFlags, url: str) -> tuple[RlhfArguments, str]:
    """The arguments of the command line `words`, parsed as `args` before, with what the server at `url` names and they
    do not; and that as words, empty where there is nothing. Plugin files of both are loaded, but none of a server on
    another machine. UsageError where both name a flag differently, or its value does not go with the others."""
    told = turns.model_dump(exclude_defaults=True)
    theirs = [Path(path) for path in told.pop("external_plugins", ())]
    # Nobody else's server says which code this machine runs.
    here = [path for path in theirs if path.is_file() and urlsplit(url).hostname in LOOPBACK]
    both = {name: (getattr(args, name), value) for name, value in told.items() if getattr(args, name) not in (None, {})}
    faults = [
        f"{named({name: own})} here and {named({name: value})} at the rollout server {url}: give the same to both, or "
        "leave one out"
        for name, (own, value) in both.items()
        if own != value
    ]
    if not args.external_plugins:
        faults += [
            f"the rollout server {url} was told --external_plugins {path}, which is not a file of this machine's: give "
            "--external_plugins to the trainer too, which runs the turns"
            for path in theirs
            if path not in here
        ]
    if faults:
        raise UsageError(*faults)
    news = {name: value for name, value in told.items() if name not in both}
    known = {Path(path).expanduser().resolve() for path in args.external_plugins}
    more = [str(path) for path in here if path.resolve() not in known]
    if more:
        news["external_plugins"] = [*args.external_plugins, *more]
    if not news:
        return args, ""
    try:
        found = parse_arguments(type(args), words, told=news)
        return replace(found, output_dir=args.output_dir), named(news)
    except UsageError as error:
        raise UsageError(f"with {named(news)}, as the rollout server {url} was told:", *error.faults) from error


def named(flags: Mapping[str, Any]) -> str:
    """Flags as they are written on a command line."""
    words: list[str] = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(one if isinstance(one, str) else json.dumps(one) for one in values)]
    return " ".join(words)
