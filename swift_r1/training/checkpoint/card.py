"""README.md of a checkpoint: a model card made of the parts of a report (`swift report`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from swift_r1.data.hubs import is_hub_id
from swift_r1.data.sources import parse_dataset
from swift_r1.errors import UsageError
from swift_r1.report import parts
from swift_r1.report.blocks import Block, Section, Table
from swift_r1.report.markdown import plain, section
from swift_r1.tracking.metrics import read_json_lines


def model_card(run_dir: Path, step: int) -> str:
    """The card of `checkpoint-<step>`, in Markdown with the hubs' YAML block. Reads args.json and logging.jsonl."""
    content = json.loads((run_dir / "args.json").read_text(encoding="utf-8"))
    args, rows = content["args"], [row for row in read_json_lines(run_dir / "logging.jsonl") if row["step"] <= step]
    training, evaluated = parts.training_rows(rows), parts.evaluation_table(rows)
    facts = parts.facts(content) | {"steps": str(step)} | parts.cost(content, training, None)
    sections: dict[str, list[Block]] = {
        "What was run": [Table(["", ""], list(facts.items()), texts=2), *parts.command(content)],
        "Training": [parts.training_table(training)] if training else [],
        "Evaluation": [evaluated] if evaluated.rows else [],
    }
    title = f"# {plain(Path(args['model']).name)}, {args['rlhf_type'].upper()}\n\nTrained with swift-r1."
    shown = [section(Section(name, blocks)) for name, blocks in sections.items() if blocks]
    return "\n\n".join([f"---\n{_header(args)}\n---", title, *shown]) + "\n"


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
