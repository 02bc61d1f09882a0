"""Making `--env` known: as an agent of that name, and its rows as the data set `env`, so that nobody converts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from swift_r1.data.preprocessors import RowPreprocessor
from swift_r1.data.registry import DatasetMeta, register_dataset
from swift_r1.plugins.agents import agents
from swift_r1.plugins.environments.base import Row, adapter
from swift_r1.plugins.environments.process import read_rows

ENV_DATASET = "env"


def register_environment(spec: str, args: Mapping[str, Any], kept: Sequence[str] = ()) -> None:
    """Registers `--env`: `#N` takes N of its rows, or makes as many; `kept` is `--reward_env`. Raises as `adapter`."""
    agents[spec] = adapter(spec, args)

    def load(split: str, count: int | None) -> Iterator[Row]:
        return read_rows(spec, args, kept, split, count)

    about = f"the rows of --env {spec}"
    meta = DatasetMeta(
        dataset_name=ENV_DATASET, loader=load, preprocess_func=RowPreprocessor(), help=about
    )
    register_dataset(meta, exist_ok=True, origin=f"--env {spec}")
