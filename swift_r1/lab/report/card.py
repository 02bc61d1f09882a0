"""README.md of a checkpoint: a model card made of the parts of a report (`swift report`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swift_r1.data.hubs import is_hub_id
from swift_r1.data.sources import parse_dataset
from swift_r1.errors import UsageError
from swift_r1.lab.diagnosis.past import Past
from swift_r1.lab.diagnosis.trend import movement_of, trend_of
from swift_r1.lab.report import parts
from swift_r1.lab.report.blocks import Block, Note, Section, Table
from swift_r1.lab.report.markdown import plain, section
from swift_r1.record.folder import RunFolder
from swift_r1.record.metric_log import MetricLog


def model_card(run_dir: Path, step: int) -> str:
    """Returns the card of `checkpoint-<step>`, in Markdown with the hubs' YAML block. Raises ValueError where args.json
    or logging.jsonl is damaged, LookupError where it lacks something."""
    run = RunFolder(run_dir, run_dir.name)
    log = MetricLog(run_dir)
    log.refresh()
    args = run.args
    training = parts.training_table(log, step)
    evaluated = parts.evaluation_table(log, step)
    problems = [*run.problems, *log.problems]
    if problems:
        raise ValueError("; ".join(problems))
    facts = parts.facts(run) | {"steps": str(step)} | parts.cost(run, log)
    sections: dict[str, list[Block]] = {
        "What was run": [Table(["", ""], list(facts.items()), texts=2), *parts.command(run)],
        "Training": [*_result(run, log, step), training] if training.rows else [],
        "Evaluation": [evaluated] if evaluated.rows else [],
    }
    title = (
        f"# {plain(Path(args['model']).name)}, {_algorithm(run).upper()}\n\nTrained with swift-r1."
    )
    shown = [section(Section(name, blocks)) for name, blocks in sections.items() if blocks]
    return "\n\n".join([f"---\n{_header(args, _algorithm(run))}\n---", title, *shown]) + "\n"


def _result(run: RunFolder, log: MetricLog, step: int) -> list[Block]:
    """Returns whether the reward rose until this step, in a line; nothing where more is logged by now."""
    if log.last_step > step:
        return []
    past = Past.of(log, run)
    trend = trend_of(past, "reward")
    text = movement_of(past) if past.replays else trend.text if trend is not None else ""
    return [Note(text)] if text else []


def _algorithm(run: RunFolder) -> str:
    return "sft" if run.command[1:2] == ["sft"] else str(run.args["rlhf_type"])


def _header(args: Mapping[str, Any], algorithm: str) -> str:
    from huggingface_hub import ModelCardData

    names = []
    for value in args["dataset"]:
        with suppress(UsageError):  # the path of a file that was there when the run began
            names.append(parse_dataset(value).name)
    return ModelCardData(
        base_model=args["model"]
        if is_hub_id(args["model"]) and not os.path.exists(args["model"])
        else None,
        datasets=[name for name in names if is_hub_id(name) and not os.path.exists(name)] or None,
        library_name="transformers" if args["train_type"] == "full" else "peft",
        pipeline_tag="text-generation",
        tags=["swift-r1", algorithm, *([] if algorithm == "sft" else ["reinforcement-learning"])],
    ).to_yaml()
