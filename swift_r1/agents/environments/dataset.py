"""The data set `env`: the rows that an environment brings along, so that nobody converts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from swift_r1.agents.environments.base import Row
from swift_r1.agents.environments.process import read_rows
from swift_r1.data.preprocessors import RowPreprocessor
from swift_r1.data.registry import DatasetMeta, register_dataset

ENV_DATASET = "env"


def register_environment_rows(spec: str, args: Mapping[str, Any]) -> None:
    """Makes the rows of `--env` known as `--dataset env`; `#N` takes N of them, or makes as many."""

    def load(split: str, count: int | None, seed: int) -> Iterator[Row]:
        return read_rows(spec, args, split, count, seed)

    about = f"the rows of --env {spec}"
    meta = DatasetMeta(dataset_name=ENV_DATASET, loader=load, preprocess_func=RowPreprocessor(), help=about)
    register_dataset(meta, exist_ok=True, origin=f"--env {spec}")
