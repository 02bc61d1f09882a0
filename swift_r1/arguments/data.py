"""Flags of the prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swift_r1.arguments.fields import flag


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Data."""

    dataset: list[str] = flag(
        [], "registered names or files (jsonl, json, csv, parquet); name#1000 samples 1000 rows", required=True
    )
    val_dataset: list[str] = flag([], "held-out prompts for --eval_steps, written like --dataset")
    split_dataset_ratio: float = flag(0.0, "share of --dataset held out for evaluation", at_least=0, at_most=0.9)
    dataset_shuffle: bool = flag(True, "shuffle the prompts anew each epoch")
    data_seed: int | None = flag(None, "seed of sampling and order of the data (default: --seed)")
    columns: dict[str, Any] = flag({}, 'rename dataset columns: \'{"question": "query"}\'')
    system: str | None = flag(None, "system message put before every prompt that has none")
    max_length: int | None = flag(None, "longest prompt in tokens; longer ones are left out and counted", at_least=1)
    dataloader_num_workers: int = flag(0, "processes that render and tokenise prompts ahead", at_least=0)
