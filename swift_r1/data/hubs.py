"""Hugging Face and ModelScope through their own libraries, and folders that `datasets` reads."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from swift_r1.data.files import arrow_rows
from swift_r1.errors import UsageError, one_line

if TYPE_CHECKING:
    import datasets

T = TypeVar("T")
Hub = Literal["hf", "ms"]
_HUB_NAMES: Mapping[Hub, str] = {"hf": "Hugging Face", "ms": "ModelScope"}
_ADDRESSES: Mapping[Hub, tuple[str, str]] = {
    "hf": ("HF_ENDPOINT", "https://huggingface.co"),
    "ms": ("MODELSCOPE_ENDPOINT", "https://www.modelscope.cn"),
}
_BATCH = 100  # rows read at once
_ANSWER_S = 5.0  # for a hub's first answer, whatever it is
_logger = logging.getLogger("swift_r1.data")


@dataclass(frozen=True, slots=True)
class SetLocation:
    """Names the place of a set: an id on a hub (`revision` None: the newest), or a folder (`hub` None)."""

    name: str
    hub: Hub | None = None
    revision: str | None = None


def default_hub(use_hf: bool | None) -> Hub:
    """Returns the hub of ids without a prefix: `--use_hf`, else the environment's USE_HF, else ModelScope, as in
    ms-swift."""
    if use_hf is None:
        use_hf = os.environ.get("USE_HF", "").strip().lower() in ("1", "true", "yes", "on")
    return "hf" if use_hf else "ms"


def ask(hub: Hub) -> _Asked:
    """Asks a hub whether it is there, once in this process, without waiting for the answer."""
    variable, usual = _ADDRESSES[hub]
    return _asked(os.environ.get(variable) or usual)


def why_unreachable(hub: Hub) -> str | None:
    """Returns why a hub cannot be reached; None where it answers. Their own clients go on trying for half a minute."""
    return ask(hub).why()


@functools.cache
def _asked(address: str) -> _Asked:
    return _Asked(address)


class _Asked:
    def __init__(self, address: str) -> None:
        self._address = address
        self._until = time.monotonic() + _ANSWER_S
        self._why: str | None = f"{address} does not answer"
        # A thread, since looking up a name knows no deadline.
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        import httpx

        try:
            # Nothing is sent or believed, and the clients have their own way to check certificates.
            httpx.head(self._address, timeout=_ANSWER_S, verify=False)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._why = f"{self._address}: {one_line(error)}"
            return
        except httpx.HTTPError:
            pass  # it is there
        self._why = None

    def why(self) -> str | None:
        self._thread.join(max(0.0, self._until - time.monotonic()))
        return self._why


def is_hub_id(name: str) -> bool:
    """Returns whether a name is written like an id: `owner/name`."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None


def split_rows(
    place: SetLocation,
    subset: str,
    split: str,
    data: datasets.Dataset | datasets.IterableDataset,
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yields the rows of a split (`load_split`), or some of them, as `arrow_rows` does, with images as the files that they
    are; UsageError where they cannot be read."""
    try:
        for table in data.with_format("arrow").iter(_BATCH):
            yield from arrow_rows(table)
    except Exception as error:  # files are read, and a stream is downloaded, as the rows are taken
        raise _failure(place, subset, split, error) from error


# memory-mapped tables, which are needed for the cache's key and for the rows
@functools.lru_cache(maxsize=16)
def load_split(
    place: SetLocation, subset: str, split: str, *, streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    """Returns one split as `datasets` has it; UsageError, which names the cache that was searched, where it cannot be
    loaded."""
    try:
        return _load(place, None if subset == "default" else subset, split, streaming)
    except UsageError:
        raise
    except Exception as error:  # the libraries let through whatever their network and parsing raise
        raise _failure(place, subset, split, error) from error


def _load(place: SetLocation, config: str | None, split: str, streaming: bool) -> Any:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()

    def load(what: str, revision: str | None = None) -> Any:
        return datasets.load_dataset(
            what, config, split=split, revision=revision, streaming=streaming
        )

    if place.hub == "ms":
        return load(_modelscope_folder(place))
    if place.hub is None:
        folder = Path(place.name).absolute()  # an absolute path is never taken for an id
        if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return load(str(folder))
        found = datasets.load_from_disk(folder)  # what `save_to_disk` wrote
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                raise UsageError(
                    f"dataset {place.name} has no split {split}: it has {', '.join(found)}"
                )
            found = found[split]
        return found.to_iterable_dataset() if streaming else found

    import huggingface_hub

    if why_unreachable("hf") is not None:  # they look into their caches alone then
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True

    def cached_folder() -> str:
        from huggingface_hub import snapshot_download

        return snapshot_download(
            place.name, repo_type="dataset", revision=place.revision, local_files_only=True
        )

    return _online_or_cached(place, lambda: load(place.name, place.revision), cached_folder, load)


def _modelscope_folder(place: SetLocation) -> str:
    """Returns the set's files, downloaded or, where ModelScope cannot be reached, as they were last time."""
    try:
        from modelscope.hub.snapshot_download import dataset_snapshot_download, snapshot_download
    except ImportError as error:
        raise UsageError(
            f"dataset {place.name} is on ModelScope, whose library is not installed: pip install modelscope "
            "(or hf:: for Hugging Face)"
        ) from error
    for name in ("modelscope", "modelscope_hub"):  # they log every request
        logging.getLogger(name).setLevel(logging.ERROR)
    name = place.name
    revision = place.revision

    def download() -> str:
        why = why_unreachable("ms")
        if why is not None:
            raise ConnectionError(why)
        return str(dataset_snapshot_download(name, revision=revision))

    return _online_or_cached(
        place,
        download,
        lambda: str(
            snapshot_download(
                repo_id=name, repo_type="dataset", revision=revision, local_files_only=True
            )
        ),
        str,
    )


def _online_or_cached(
    place: SetLocation,
    online: Callable[[], T],
    cached_folder: Callable[[], str],
    of_folder: Callable[[str], T],
) -> T:
    """Returns what the hub gives; where it cannot be reached, the same of the folder in its cache, with a warning."""
    assert place.hub is not None
    try:
        return online()
    except Exception as failure:  # noqa: BLE001  whatever their network raises, and several subsets in the cache
        try:
            folder = cached_folder()
            found = of_folder(folder)
        except Exception:  # noqa: BLE001  it is not in the cache either: the first failure is the one to report
            raise failure from None
        _logger.warning(
            "dataset %s: %s cannot be reached, so the copy in the cache is used: %s",
            *(place.name, _HUB_NAMES[place.hub], folder),
        )
        return found


def _failure(place: SetLocation, subset: str, split: str, error: Exception) -> UsageError:
    part = f"(subset {subset}, split {split})"
    cause = f"{type(error).__name__}: {one_line(error)}"
    if place.hub is None:
        return UsageError(f"dataset {place.name} {part}: the folder cannot be read: {cause}")
    cache = (
        Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub").expanduser()
        / "datasets"
    )
    if place.hub == "hf":
        from huggingface_hub import constants

        cache = Path(constants.HF_HUB_CACHE)
    return UsageError(
        f"dataset {place.name} {part} cannot be loaded from {_HUB_NAMES[place.hub]}: {cause}; looked in the cache "
        f"{cache} too. A local file or folder can be given instead: --dataset path/to/rows.jsonl"
    )
