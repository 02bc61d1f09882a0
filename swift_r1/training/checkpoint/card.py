"""README.md of a checkpoint: a model card made from what the run has written down so far."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from swift_r1.data.hubs import is_hub_id
from swift_r1.data.sources import parse_dataset
from swift_r1.errors import UsageError
from swift_r1.tracking.metrics import read_json_lines

_POINTS = 12  # of the reward's curve
_CURVE = {"reward": ".3f", "completions/mean_length": ".0f", "kl": ".4f", "entropy": ".3f"}


def model_card(run_dir: Path, step: int) -> str:
    """The card of `checkpoint-<step>`, in Markdown with the hubs' YAML block. Reads args.json and logging.jsonl."""
    content = json.loads((run_dir / "args.json").read_text(encoding="utf-8"))
    args, rows = content["args"], [row for row in read_json_lines(run_dir / "logging.jsonl") if row["step"] <= step]
    what = {
        "model": args["model"],
        "trained": f"{args['train_type']}, {step} optimizer steps on {content['world_size']} processes",
        "data": ", ".join(args["dataset"]),
        "rewards": ", ".join(
            f"{name} x {weight:g}"
            for name, weight in zip(args["reward_funcs"], args["reward_weights"] or [], strict=False)
        ),
        "algorithm": f"{args['rlhf_type']}, loss {args['loss_type']}, {args['num_generations']} completions a prompt",
        "learning rate": f"{args['learning_rate']:g}, {args['lr_scheduler_type']}",
    }
    training = [row for row in rows if "reward" in row]
    shown = [name for name in _CURVE if any(row.get(name) is not None for row in training)]
    evaluations = [{name: value for name, value in row.items() if name.endswith("/accuracy")} for row in rows]
    measured = [{"step": row["step"], **found} for row, found in zip(rows, evaluations, strict=True) if found]
    parts = [
        f"---\n{_header(args)}\n---",
        f"# {Path(args['model']).name}, {args['rlhf_type'].upper()}",
        "Trained with swift-r1.",
        _table(["", ""], [[name, text] for name, text in what.items()]),
        "## Training",
        _curve(_thinned(training), {name: _CURVE[name] for name in shown}),
        "## Evaluation" if measured else "",
        _curve(measured, dict.fromkeys(sorted({name for row in measured for name in row} - {"step"}), ".3f")),
        "## Command",
        f"```sh\n{shlex.join(content['command'])}\n```",
        "## Versions",
        ", ".join(f"{name} {version}" for name, version in content["versions"].items() if version),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(args: Mapping[str, Any]) -> str:
    from huggingface_hub import ModelCardData

    names = []
    for value in args["dataset"]:
        with suppress(UsageError):  # the path of a file that was there when the run began
            names.append(parse_dataset(value).name)
    return ModelCardData(
        base_model=args["model"] if is_hub_id(args["model"]) and not os.path.exists(args["model"]) else None,
        datasets=[name for name in names if is_hub_id(name) and not os.path.exists(name)] or None,
        library_name="transformers" if args["train_type"] == "full" else "peft",
        pipeline_tag="text-generation",
        tags=["swift-r1", args["rlhf_type"], "reinforcement-learning"],
    ).to_yaml()


def _thinned(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most `_POINTS` of them, the first and the last among them."""
    last = len(rows) - 1
    return [rows[place] for place in sorted({round(n * last / (_POINTS - 1)) for n in range(_POINTS)})] if rows else []


def _curve(rows: Sequence[Mapping[str, Any]], forms: Mapping[str, str]) -> str:
    def cell(row: Mapping[str, Any], name: str) -> str:
        value = row.get(name)
        return "" if value is None else f"{value:{forms[name]}}"

    return _table(["step", *forms], [[str(row["step"]), *(cell(row, name) for name in forms)] for row in rows])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
