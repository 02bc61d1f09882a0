"""Safetensors files of a checkpoint: written as a stream, hashed on the way, read tensor by tensor.

Nothing is read again to be hashed, and only the bucket in hand is in memory twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from swift_r1.models.expected import as_in_checkpoint
from swift_r1.models.multimodal import kept_on_disk
from swift_r1.models.weights import Weight, bucketed, whole_dtype, whole_shape
from swift_r1.runtime.ranks import Ranks
from swift_r1.sync.buckets import header_of
from swift_r1.training.backends.base import BUCKET_BYTES, Backend
from swift_r1.training.checkpoint.folder import Entry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE = 1 << 20
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r".*?\.\d+\.")

Named = Sequence[tuple[str, Tensor]]


def one_each(buckets: Iterable[Named], ranks: int) -> Iterator[list[tuple[str, Tensor]]]:
    """What this rank gets of each `ranks` buckets: where ranks take turns each has one then, and all write theirs at
    the same time, while else each would wait for the one whose turn it is. A list is emptied when the next is asked
    for."""
    coming = iter(buckets)
    own: list[tuple[str, Tensor]] = []
    for bucket in coming:
        own += bucket
        del bucket  # nothing else has its tensors
        for _ in range(ranks - 1):
            own += next(coming, ())
        yield own
        own.clear()


def write_stream(path: Path, contents: Named, tensors: Iterable[tuple[str, Tensor]]) -> Entry:
    """Writes a file and syncs it; `tensors` are taken one at a time.

    Args:
        contents: the same tensors in the same order, for their dtypes and shapes alone (on `meta`, say).

    Raises OSError: the disk refuses; ValueError: another tensor came than was promised.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("wb", buffering=0) as file:

        def write(data: memoryview) -> None:
            nonlocal size
            size += len(data)
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                digest.update(piece)
                while piece:
                    piece = piece[file.write(piece) :]

        header = header_of(
            [(name, _DTYPES[one.dtype], one.shape) for name, one in contents], {"format": "pt"}
        )
        write(memoryview(header))
        coming = iter(contents)
        for name, tensor in tensors:
            promised, like = next(coming)
            if (name, tensor.dtype, tensor.shape) != (promised, like.dtype, like.shape):
                raise ValueError(
                    f"{path}: {name} {tensor.dtype} {list(tensor.shape)} came in the place of {promised} {like.dtype} "
                    f"{list(like.shape)}"
                )
            write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "bytes": size}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Entry:
    """Writes a file of these tensors. Raises as `write_stream`."""
    ordered = _widest_first(tensors)
    return write_stream(path, ordered, ordered)


def _widest_first(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Orders tensors so that each is aligned in a file."""
    return sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)


class SavedTensors:
    """The tensors of the files `<kind>*.safetensors` in a folder, by name; each is read when it is asked for."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._where: dict[str, Any] = {}
        for path in sorted(folder.glob(f"{kind}*.safetensors")):
            file: Any = safe_open(path, "pt")
            self._where |= dict.fromkeys(file.keys(), file)

    def __call__(self, name: str, rows: slice = slice(None)) -> Tensor:
        """It, or only these of its rows."""
        file = self._where[name]
        tensor: Tensor = (
            file.get_tensor(name) if rows == slice(None) else file.get_slice(name)[rows]
        )
        return tensor

    def all(self) -> dict[str, Tensor]:
        return {name: self(name) for name in self._where}


class _Unit(NamedTuple):
    """Weights that are gathered together, and what they are in the file: meta tensors, which `as_in_checkpoint` has
    converted where `converts` (not elsewhere: it changes the order of a file). Or, of no weights, tensors that are
    copied from the files of `source`."""

    weights: Sequence[Weight]
    contents: Named
    converts: bool
    source: Mapping[str, Path] = MappingProxyType({})

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.contents)


class ModelShards:
    """A model's weights in files as `from_pretrained` reads them: one per rank, of about the same size.

    transformers has some models in memory otherwise than in files (a layer's experts as one tensor); what it does about
    that when it saves is done here layer by layer. Parameters are written in `dtype`, None: in their own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: Sequence[Weight],
        ranks: Ranks,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self.dtype = dtype
        ignored: Iterable[str] = model._keys_to_ignore_on_save or ()
        units = _units(model, [weight for weight in weights if weight.name not in ignored], dtype)
        units += _copied(kept_on_disk(model, str(model.name_or_path)))
        # in a file each tensor is aligned then
        units.sort(key=lambda unit: -unit.contents[0][1].dtype.itemsize)
        share = sum(unit.nbytes for unit in units) / ranks.world_size
        self._owned: list[tuple[int, _Unit]] = []
        done = 0
        for unit in units:
            self._owned.append((min(int(done / share), ranks.world_size - 1), unit))
            done += unit.nbytes
        owners = sorted({owner for owner, _ in self._owned})
        self._files = {
            owner: "model.safetensors"
            if len(owners) == 1
            else f"model-{number:05}-of-{len(owners):05}.safetensors"
            for number, owner in enumerate(owners, start=1)
        }

    @property
    def file(self) -> str | None:
        """The name of this rank's file, None where it writes none."""
        return self._files.get(self._ranks.rank)

    def tensors(self, backend: Backend) -> Iterator[tuple[str, Tensor]]:
        """What this rank's file holds, in order (collective: every rank must exhaust it)."""
        shares = [
            [unit for one, unit in self._owned if one == owner]
            for owner in range(self._ranks.world_size)
        ]
        # A unit for each rank is gathered, and then all ranks write at the same time.
        for units in zip_longest(*shares):
            gathered: dict[str, Tensor] = {}
            for owner, unit in enumerate(units):
                for bucket in (
                    backend.weight_buckets(unit.weights, to=owner) if unit and unit.weights else ()
                ):
                    gathered |= bucket
            own = units[self._ranks.rank]
            if own is not None:
                for name, file in own.source.items():
                    with safe_open(file, "pt") as stored:
                        gathered[name] = stored.get_tensor(name)
                if own.converts:
                    gathered = as_in_checkpoint(self._model, gathered)
                yield from ((name, gathered[name].to(like.dtype)) for name, like in own.contents)

    def write(self, path: Path, tensors: Iterator[tuple[str, Tensor]]) -> Entry:
        """Writes this rank's file from `tensors`; raises as `write_stream`."""
        own = [
            one for owner, unit in self._owned if owner == self._ranks.rank for one in unit.contents
        ]
        return write_stream(path, own, tensors)

    def write_index(self, folder: Path) -> None:
        """Says which file has which weight; nothing where there is one file."""
        if len(self._files) > 1:
            where = {
                name: self._files[owner] for owner, unit in self._owned for name, _ in unit.contents
            }
            size = sum(unit.nbytes for _, unit in self._owned)
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
            (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _units(
    model: PreTrainedModel, weights: Sequence[Weight], dtype: torch.dtype | None
) -> list[_Unit]:
    """Groups weights into buckets; where transformers converts, what is converted together must be gathered together: a
    layer."""

    def written(weight: Weight) -> torch.dtype:
        is_parameter = isinstance(weight.base, nn.Parameter)
        return dtype if dtype is not None and is_parameter else whole_dtype(weight.base)

    ordered = sorted(weights, key=lambda weight: -written(weight).itemsize)
    with torch.device("meta"):
        empty = {
            one.name: torch.empty(whole_shape(one.base), dtype=written(one)) for one in ordered
        }

    def empty_of(own: Sequence[Weight]) -> dict[str, Tensor]:
        return {weight.name: empty[weight.name] for weight in own}

    reverted = as_in_checkpoint(model, empty)
    if all(reverted.get(name) is tensor for name, tensor in empty.items()):
        buckets = bucketed(ordered, lambda weight: weight.nbytes, BUCKET_BYTES)
        return [_Unit(bucket, _widest_first(empty_of(bucket)), False) for bucket in buckets]
    layers = (list(layer) for _, layer in groupby(sorted(weights, key=_layer_of), _layer_of))
    return [
        _Unit(own, _widest_first(as_in_checkpoint(model, empty_of(own))), True) for own in layers
    ]


def _copied(source: Mapping[str, Path]) -> Iterator[_Unit]:
    """One for each tensor."""
    for name, path in source.items():
        with safe_open(path, "pt") as file:
            found = file.get_slice(name)
            dtype = next(dtype for dtype, word in _DTYPES.items() if word == found.get_dtype())
            like = torch.empty(found.get_shape(), dtype=dtype, device="meta")
        yield _Unit((), [(name, like)], False, {name: path})


def _layer_of(weight: Weight) -> str:
    match = _LAYER.match(weight.name)
    return match[0] if match else ""
