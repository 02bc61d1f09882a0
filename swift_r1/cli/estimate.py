"""`swift estimate`: memory, bytes and seconds of a run on hardware that is not here."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.cli.files import json_file, write_json
from swift_r1.errors import EXIT_OK, UsageError, read_yaml
from swift_r1.flags.fields import as_words, spellings
from swift_r1.flags.parser import CONFIG_SUFFIXES, parse_arguments, spelling
from swift_r1.flags.world import World
from swift_r1.lab.estimate.flags import EstimateArguments
from swift_r1.runtime.files import read_text

if TYPE_CHECKING:
    from swift_r1.fleet.run_file import RunFile

_USAGE = """swift estimate run.yaml|config.yaml [--chip h100] [--gpus G] [--measured RUN_FOLDER] [--flag value ...]

Estimates the memory of each role, the bytes of a weight update and a completion, the seconds of each phase of a round,
and which role the others wait for; with --gpus, how to divide that many GPUs. Takes a file of `swift launch`, or flags
of `swift rlhf`. Needs the model's config.json, but neither its weights nor the hardware. See
docs/estimate.md for the formulas and their errors."""
_EXAMPLES = """
swift estimate run.yaml --chip h200
swift estimate --model models/smollm2-135m --use_vllm true --max_completion_length 4096 --gpus 16 --chip h100
swift estimate grpo.yaml --gpus 64 --mean_completion_length 1200 --json estimate.json
swift estimate run.yaml --measured output/model/v0-20261123-101500
"""
HELP = (_USAGE, EstimateArguments, _EXAMPLES, ("Estimate",))
_ANY_SERVER = "http://127.0.0.1:8000"


def run(words: Sequence[str]) -> int:
    """Runs the command; loads no model and reaches no server.

    Raises:
        UsageError: bad flags or files, no config of the model, fewer GPUs than the model needs.
    """
    run_file = _run_file(words)
    args, world = _arguments(words, run_file)
    file = json_file(args.json)
    from swift_r1.lab.estimate.chips import DEFAULT_CHIP, chip_of
    from swift_r1.lab.estimate.job import assumed, job_of, layout_of
    from swift_r1.lab.estimate.layout import estimate_layout
    from swift_r1.lab.estimate.measured import lengths_of, read_measured
    from swift_r1.lab.estimate.show import show, to_json
    from swift_r1.lab.estimate.split import best_split
    from swift_r1.runtime.terminal import Terminal

    without = (
        run_file is not None
        and args.gpus is None
        and not any(role.gpus for role in run_file.roles.values())
    )
    chip = chip_of(args.chip or ("cpu" if without else DEFAULT_CHIP))
    if chip.is_cpu and args.gpus is not None:
        raise UsageError(f"--gpus {args.gpus}: --chip {chip.name} has none")

    use = assumed(chip)
    lengths = None
    if args.measured is not None:
        recorded = Path(args.measured).expanduser()
        lengths = lengths_of(recorded, chip)
        if _trained_on_cpu(recorded) == chip.is_cpu:
            use = read_measured(recorded, chip)
        else:
            print(
                f"--measured {recorded}: of another kind of device than {chip.name}, so only its lengths are taken"
            )

    job = job_of(args, world.size, chip, use, lengths, run_file)
    split = None if args.gpus is None else best_split(job, args.gpus)
    if split is not None and not split.best:
        raise UsageError(f"--gpus {args.gpus}: {split.why_not}")

    given = (
        estimate_layout(job, layout_of(args, world.size, run_file))
        if split is None or run_file
        else None
    )
    show(job, given, split, Terminal(width=max(110, Terminal().width)))
    if file is not None:
        write_json(file, to_json(job, given, split))
    return EXIT_OK


def _trained_on_cpu(folder: Path) -> bool:
    """Says whether the run of this folder trained on a CPU."""
    # read once already
    content: Any = json.loads(read_text(folder / "args.json"))
    return not content["hardware"]["gpus"] or bool(content["args"]["use_cpu"])


def _run_file(words: Sequence[str]) -> RunFile | None:
    """Returns the file of `swift launch`, where the first word is one: it has roles."""
    if not words or not words[0].lower().endswith(CONFIG_SUFFIXES[:2]):
        return None
    import yaml

    try:
        content = read_yaml(Path(words[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None  # the parser says what is wrong with it
    if not isinstance(content, dict) or not {"roles", "rlhf"}.intersection(content):
        return None
    from swift_r1.fleet.run_file import read_run_file

    return read_run_file(words[0])


def _arguments(words: Sequence[str], run_file: RunFile | None) -> tuple[EstimateArguments, World]:
    """Returns the run's flags, with those of the command line in their place, and its processes."""
    if run_file is None:
        args = parse_arguments(EstimateArguments, words)
        world, _ = World.from_environment({**os.environ, **args.process_variables})
        return args, world

    known = spellings(EstimateArguments)
    given = set()
    for word in words[1:]:
        name = spelling(word.partition("=")[0])
        if word.startswith("--") and name in known:
            given.add(known[name].name)
    from swift_r1.fleet.run_file import TRAIN, with_addresses

    flags = {name: value for name, value in run_file.flags.items() if name not in given}
    flags = with_addresses(flags, {name: [_ANY_SERVER] for name in run_file.roles if name != TRAIN})
    train = run_file.roles[TRAIN]
    environ = {
        "NPROC_PER_NODE": str(train.processes),
        "NNODES": str(train.count),
        "MASTER_ADDR": "node0",
    }
    args = parse_arguments(EstimateArguments, [*as_words(flags), *words[1:]], environ)
    return args, World(train.processes, train.count)
