"""The runs of a sweep, from its file, each with the flags that `swift rlhf` takes, checked before the first one
starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError
from swift_r1.flags.fields import as_words, flag_specs, spellings
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.world import World
from swift_r1.lab.sweep.flags import SweepArguments
from swift_r1.launch.colocate import on_this_machine
from swift_r1.launch.environment import has_gpu

_OF_THE_SWEEP = {
    **dict.fromkeys(
        ("output_dir", "add_version"),
        "the sweep names its runs' folders: output_dir stands beside flags",
    ),
    **dict.fromkeys(("seed",), "give seeds: [0, 1, 2] beside flags"),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume_only_model"), "the sweep resumes its own runs"
    ),
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port"), "a sweep runs on one machine"
    ),
}
_LONGEST_NAME = 120
_NAMED_FLAG = re.compile(r"--(\w+)")


@dataclass(frozen=True)
class Point:
    """A point of a sweep: what differs from `flags`, a name for it that a folder can have, and its place among the
    points."""

    place: int
    name: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a point. `words` follow `swift rlhf`, and are the same at every start of the sweep."""

    name: str
    point: str
    seed: int | None
    folder: Path
    words: Sequence[str]
    args: RlhfArguments
    world: World


def make_points(args: SweepArguments) -> list[Point]:
    """Returns the grid's combinations, the last flag varying fastest, or the list's points; one where only seeds
    vary."""
    if args.runs:
        listed = [_plain(json.loads(text)) for text in args.runs]
    else:
        listed = [
            dict(zip(_plain(args.grid), values, strict=True))
            for values in product(*args.grid.values())
        ]
    points: dict[str, Point] = {}
    for changes in listed:
        given = changes.pop("name", None) if args.runs else None
        name = str(given or _named(changes))
        short = (
            re.sub(r"[^\w.+=,-]+", "-", name, flags=re.ASCII)[:_LONGEST_NAME].strip("-.,") or "run"
        )
        unique = short
        number = 1
        while unique in points:
            number += 1
            unique = f"{short}-{number}"
        points[unique] = Point(len(points), unique, changes)
    return list(points.values())


def _named(changes: Mapping[str, Any]) -> str:
    texts = {
        name: "+".join(map(str, value)) if isinstance(value, list) else value
        for name, value in changes.items()
    }
    return ",".join(f"{name}={text}" for name, text in texts.items())


def plan_runs(
    args: SweepArguments,
    file: str,
    folder: Path,
    environ: Mapping[str, str],
) -> list[PlannedRun]:
    """Returns every run, those of the first seed first, so that all points can soon be compared.

    Raises:
        UsageError: what is wrong with the flags of any point, each fault once, with its line in `file`.
    """
    points = make_points(args)
    seeds: Sequence[int | None] = args.seeds or [None]
    checked = _for_points(points, file, lambda point: _check_point(args, point, environ))
    planned = []
    for seed, (point, (words, found, world)) in product(seeds, zip(points, checked, strict=True)):
        name = point.name if seed is None else f"{point.name},seed={seed}".removeprefix("run,")
        seeded = [] if seed is None else ["--seed", str(seed)]
        own = [
            "--output_dir",
            str(folder / name),
            "--add_version",
            "false",
            "--resume_from_checkpoint",
            "last",
        ]
        run = PlannedRun(
            name,
            point.name,
            seed,
            (folder / name).absolute(),
            [*words, *seeded, *own],
            found,
            world,
        )
        planned.append(run)
    return planned


def _check_point(
    args: SweepArguments,
    point: Point,
    environ: Mapping[str, str],
) -> tuple[list[str], RlhfArguments, World]:
    known = spellings(RlhfArguments)
    given = dict[str, Any]()
    for block in (args.flags, point.changes):
        given |= {
            known[name].name if name in known else name: value
            for name, value in _plain(block).items()
        }
    secrets = {
        name: spec.info.secret
        for name, spec in flag_specs(RlhfArguments).items()
        if spec.info.secret
    }
    refused = _OF_THE_SWEEP | {
        name: f"all would see it: set {variable} instead" for name, variable in secrets.items()
    }
    faults = [f"--{name}: {refused[name]}" for name in given if name in refused]
    if faults:
        raise UsageError(*faults)
    words = as_words(given)
    found = parse_arguments(RlhfArguments, words, environ)
    if found.asks_servers:
        faults.append(
            "--vllm_mode server: a rollout server takes the weights of one trainer; give --vllm_mode colocate, an "
            "engine for each run, or --use_vllm false"
        )
    if args.metric.startswith("eval/") and not found.evaluates:
        faults.append(f"nothing is evaluated, so there is no {args.metric}: give --eval_steps")
    rewards = [f"rewards/{name}/mean" for name in found.reward_names]
    if args.metric.startswith("rewards/") and args.metric not in rewards:
        faults.append(f"there is no metric {args.metric}: --reward_funcs make {', '.join(rewards)}")
    variables = {**environ, **found.process_variables}
    world, _ = World.from_environment(variables)
    if world.nnodes > 1:
        faults.append(f"a sweep runs on one machine, and NNODES is {world.nnodes}")
    if faults:
        raise UsageError(*faults)
    return words, on_this_machine(found, has_gpu(variables))[0], world


def _plain(block: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name).replace("-", "_"): value for name, value in block.items()}


def check_runs(
    args: SweepArguments,
    file: str,
    runs: Sequence[PlannedRun],
    environ: Mapping[str, str],
) -> None:
    """Plugins, data, rewards and models of the runs, as `swift rlhf` checks them; once for points that differ in
    numbers alone, most of which change nothing in that. The sweep's own folder can be written. Raises UsageError like
    `plan_runs`."""
    from swift_r1.launch.checks.preflight import check_inputs

    by_name = {point.name: point for point in make_points(args)}
    kinds: dict[str, PlannedRun] = {}
    for run in runs:
        flags = run.args.to_dict()
        texts = {name: value for name, value in flags.items() if type(value) not in (int, float)}
        kinds.setdefault(json.dumps(texts, sort_keys=True), run)

    def check(point: Point) -> None:
        [run] = [one for one in kinds.values() if one.point == point.name]
        check_inputs(run.args, run.world, environ, [])

    _for_points([by_name[run.point] for run in kinds.values()], file, check)


def _for_points(points: Sequence[Point], file: str, do: Callable[[Point], Any]) -> list[Any]:
    """`do` for each point. Raises UsageError: the faults of all together, each once."""
    results: list[Any] = []
    faults: dict[str, list[Point]] = {}
    for point in points:
        try:
            results.append(do(point))
        except UsageError as error:
            for fault in error.faults:
                faults.setdefault(fault, []).append(point)
    if faults:
        lines = _lines(file)
        whole = len(points)
        raise UsageError(
            *(_located(fault, whose, whole, file, lines) for fault, whose in faults.items())
        )
    return results


def _located(
    fault: str,
    whose: Sequence[Point],
    points: int,
    file: str,
    lines: Mapping[str, int],
) -> str:
    """Returns the fault after the line of the first flag that it names, and before the points that have it, if not all
    have."""
    blocks = (f"runs.{whose[0].place}", "grid", "flags")
    keys = (f"{block}.{name}" for name in _NAMED_FLAG.findall(fault) for block in blocks)
    line = next((f", line {lines[key]}" for key in keys if key in lines), "")
    others = f" and {len(whose) - 1} more" if len(whose) > 1 else ""
    return f"{file}{line}: {fault}" + (
        "" if len(whose) == points else f" (point {whose[0].name}{others})"
    )


def _lines(file: str) -> dict[str, int]:
    """Returns the line of each key of a YAML file that has been read: `flags.model`, `runs.0.loss_type`."""
    import yaml

    found: dict[str, int] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name = f"{path}{str(key.value).replace('-', '_')}"
                found[name] = key.start_mark.line + 1
                walk(value, f"{name}.")
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                walk(value, f"{path}{number}.")

    walk(yaml.compose(Path(file).read_text(encoding="utf-8"), yaml.SafeLoader), "")
    return found
