"""A model's weights in the files of a checkpoint, as `from_pretrained` reads them: a file a rank, written together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from swift_r1.models.lora import Weight
from swift_r1.models.quantization import whole_dtype, whole_shape
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import BUCKET_BYTES, Training, bucketed
from swift_r1.training.checkpoint.tensor_files import Content, Entry, write_stream
from swift_r1.weights.expected import as_in_checkpoint

INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r".*?\.\d+\.")


@dataclass(frozen=True, slots=True)
class _Unit:
    """Weights that are gathered together, and what they are in the file; `converts` where that is something else."""

    weights: Sequence[Weight]
    contents: Sequence[Content]
    converts: bool

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


class ModelShards:
    """Which rank writes which weights, in shares of about the same size.

    transformers has some models in memory otherwise than in files (a layer's experts as one tensor); what it does about
    that when it saves is done here layer by layer.
    """

    def __init__(self, model: nn.Module, weights: Sequence[Weight], ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        ignored = model._keys_to_ignore_on_save or ()
        units = _units(model, [weight for weight in weights if weight.name not in ignored])
        share = sum(unit.nbytes for unit in units) / ranks.world_size
        self._owned: list[tuple[int, _Unit]] = []
        done = 0
        for unit in units:
            self._owned.append((min(int(done / share), ranks.world_size - 1), unit))
            done += unit.nbytes
        owners = sorted({owner for owner, _ in self._owned})
        self._files = {
            owner: "model.safetensors" if len(owners) == 1 else f"model-{number:05}-of-{len(owners):05}.safetensors"
            for number, owner in enumerate(owners, start=1)
        }

    @property
    def file(self) -> str | None:
        """The name of this rank's file, None where it writes none."""
        return self._files.get(self._ranks.rank)

    def tensors(self, backend: Training) -> Iterator[tuple[str, Tensor]]:
        """What this rank's file holds, in order (collective: every rank must exhaust it)."""
        for owner, unit in self._owned:
            gathered: dict[str, Tensor] = {}
            for bucket in backend.weight_buckets(unit.weights, to=owner):
                gathered |= bucket
            if owner == self._ranks.rank:
                if unit.converts:
                    gathered = as_in_checkpoint(self._model, gathered)
                yield from ((one.name, gathered[one.name]) for one in unit.contents)

    def write(self, folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> Entry:
        """Writes this rank's file from `tensors`; raises as `write_stream`."""
        assert self.file is not None
        own = [one for owner, unit in self._owned if owner == self._ranks.rank for one in unit.contents]
        return write_stream(folder / self.file, own, tensors)

    def write_index(self, folder: Path) -> None:
        """Says which file has which weight; nothing where there is one file."""
        if len(self._files) > 1:
            where = {one.name: self._files[owner] for owner, unit in self._owned for one in unit.contents}
            size = sum(unit.nbytes for _, unit in self._owned)
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _units(model: nn.Module, weights: Sequence[Weight]) -> list[_Unit]:
    """In buckets; where transformers converts, what is converted together must be gathered together: a layer."""
    # Widest first: in a file each is aligned then.
    ordered = sorted(weights, key=lambda weight: -whole_dtype(weight.base).itemsize)
    empty = {
        weight.name: torch.empty(whole_shape(weight.base), dtype=whole_dtype(weight.base), device="meta")
        for weight in ordered
    }
    reverted = as_in_checkpoint(model, empty)
    if all(reverted.get(name) is tensor for name, tensor in empty.items()):
        return [
            _Unit(bucket, _contents({one.name: empty[one.name] for one in bucket}), False)
            for bucket in bucketed(ordered, BUCKET_BYTES)
        ]
    units = []
    for _, layer in groupby(sorted(weights, key=_layer_of), _layer_of):
        own = list(layer)
        units.append(_Unit(own, _contents(as_in_checkpoint(model, {one.name: empty[one.name] for one in own})), True))
    return units


def _layer_of(weight: Weight) -> str:
    match = _LAYER.match(weight.name)
    return match[0] if match else ""


def _contents(tensors: Mapping[str, Tensor]) -> list[Content]:
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    return [Content(name, tensor.dtype, tensor.shape) for name, tensor in ordered]
