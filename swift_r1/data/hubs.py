"""Hugging Face and ModelScope through their own libraries, and folders that `datasets` reads."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from swift_r1.errors import UsageError

if TYPE_CHECKING:
    import datasets

Hub = Literal["hf", "ms"]
HUB_NAMES: Mapping[Hub, str] = {"hf": "Hugging Face", "ms": "ModelScope"}
USE_HF = "USE_HF"
_DEFAULT = "default"
_logger = logging.getLogger("swift_r1.data")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a set lies: an id on a hub (`revision` None: the newest), or a folder (`hub` None)."""

    name: str
    hub: Hub | None = None
    revision: str | None = None

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.name} ({HUB_NAMES[self.hub]})" if self.hub else self.name


def default_hub(use_hf: bool | None) -> Hub:
    """The hub of ids without a prefix: `--use_hf`, else the environment's USE_HF, else ModelScope, as in ms-swift."""
    if use_hf is None:
        use_hf = os.environ.get(USE_HF, "").strip().lower() in ("1", "true", "yes", "on")
    return "hf" if use_hf else "ms"


def is_hub_id(name: str) -> bool:
    """Whether a name is written like an id: `owner/name`."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith(".") for part in parts) and not name.startswith("~")


def split_rows(place: Place, subset: str, split: str, *, streaming: bool) -> Iterator[dict[str, Any]]:
    """The rows of one split.

    Raises:
        UsageError: it cannot be had; the message names the cache that was looked in, and how to give a local file.
    """
    data = load_split(place, subset, split, streaming=streaming)
    try:
        yield from data
    except Exception as error:  # files are read, and a stream is downloaded, as the rows are taken
        raise _failure(place, subset, split, error) from error


def split_identity(place: Place, subset: str, split: str) -> str:
    """A hash of the split's content as `datasets` computes it.

    Raises:
        UsageError: as `split_rows`.
    """
    return load_split(place, subset, split, streaming=False)._fingerprint  # type: ignore[union-attr]


@functools.lru_cache(maxsize=16)  # tables in memory maps: asked for by the key of the cache, and by the rows
def load_split(
    place: Place, subset: str, split: str, *, streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    """One split as `datasets` has it.

    Raises:
        UsageError: as `split_rows`.
    """
    try:
        return _load(place, subset, split, streaming)
    except UsageError:
        raise
    except Exception as error:  # the libraries let through whatever their network and parsing raise
        raise _failure(place, subset, split, error) from error


def _load(place: Place, subset: str, split: str, streaming: bool) -> Any:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    config = None if subset == _DEFAULT else subset
    if place.hub == "ms":
        folder = _modelscope_folder(place)
        return datasets.load_dataset(folder, config, split=split, streaming=streaming)
    if place.hub is None and _is_saved(Path(place.name)):
        return _saved(place, split, streaming)
    if place.hub is None:  # an absolute path is never taken for an id
        return datasets.load_dataset(str(Path(place.name).absolute()), config, split=split, streaming=streaming)
    try:
        return datasets.load_dataset(place.name, config, split=split, revision=place.revision, streaming=streaming)
    except Exception as failure:  # noqa: BLE001  whatever their network raises, and several subsets in the cache
        from huggingface_hub import snapshot_download

        try:
            folder = snapshot_download(place.name, repo_type="dataset", revision=place.revision, local_files_only=True)
            found = datasets.load_dataset(folder, config, split=split, streaming=streaming)
        except Exception:  # noqa: BLE001  it is not there either: the first failure is to be told
            raise failure from None
        _as_in_the_cache(place, folder)
        return found


def _modelscope_folder(place: Place) -> str:
    """The set's files, downloaded or, where ModelScope cannot be reached, as they were when they last were."""
    try:
        from modelscope.hub.snapshot_download import dataset_snapshot_download, snapshot_download
    except ImportError as error:
        raise UsageError(
            f"dataset {place.name} is on ModelScope, whose library is not installed: pip install modelscope "
            "(or hf:: for Hugging Face)"
        ) from error
    for name in ("modelscope", "modelscope_hub"):  # they tell every request
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return dataset_snapshot_download(place.name, revision=place.revision)
    except Exception as failure:  # noqa: BLE001  whatever their network raises
        try:
            folder = snapshot_download(
                repo_id=place.name, repo_type="dataset", revision=place.revision, local_files_only=True
            )
        except Exception:  # noqa: BLE001  it is not there either: what the network raised is to be told
            raise failure from None
        _as_in_the_cache(place, folder)
        return folder


def _as_in_the_cache(place: Place, folder: str) -> None:
    assert place.hub is not None
    _logger.warning(
        "dataset %s cannot be asked for at %s, so it is as in the cache, %s",
        *(place.name, HUB_NAMES[place.hub], folder),
    )


def _is_saved(folder: Path) -> bool:
    """What `save_to_disk` of `datasets` wrote."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved(place: Place, split: str, streaming: bool) -> Any:
    import datasets

    found = datasets.load_from_disk(place.name)
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise UsageError(f"dataset {place.name} has no split {split}: it has {', '.join(found)}")
        found = found[split]
    return found.to_iterable_dataset() if streaming else found


def _failure(place: Place, subset: str, split: str, error: Exception) -> UsageError:
    cause = " ".join(str(error).split())[:300]
    part = f" (subset {subset}, split {split})"
    if place.hub is None:
        return UsageError(f"dataset {place.name}{part}: the folder cannot be read: {type(error).__name__}: {cause}")
    return UsageError(
        f"dataset {place.name}{part} cannot be had from {HUB_NAMES[place.hub]}: {type(error).__name__}: {cause}; "
        f"looked in the cache {cache_of(place.hub)} too. A local file or folder can be given instead: "
        "--dataset path/to/rows.jsonl"
    )


def cache_of(hub: Hub) -> str:
    """The folder in which a hub's library keeps what it has downloaded."""
    if hub == "hf":
        from huggingface_hub import constants

        return str(constants.HF_HUB_CACHE)
    named = os.environ.get("MODELSCOPE_CACHE")
    return str(Path(named or "~/.cache/modelscope/hub").expanduser() / "datasets")
