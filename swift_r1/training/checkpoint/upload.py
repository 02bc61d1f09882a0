"""Sends checkpoints to a hub while the run trains. A failed upload is an error in the log that says how to do it by hand,
and never the end of the run."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from swift_r1.data.hubs import Hub
from swift_r1.errors import one_line

logger = logging.getLogger("swift_r1.training")

TOKEN_VARIABLE = "SWIFT_HUB_TOKEN"
_LOOK_S = 5.0  # between two signs of life while an upload is waited for
_RESUMING = ["state/*", "manifest.json"]  # of a checkpoint, what is not the model
_BY_HAND = {"hf": "hf upload {repo} {folder} .", "ms": "modelscope upload {repo} {folder}"}


@dataclass(frozen=True)
class HubFlags:
    """The flags `--hub_...`: where checkpoints are sent, and when."""

    hub: Hub
    repo: str
    private: bool
    strategy: str
    timeout: float  # seconds that the end of the run waits for an upload


class Uploader:
    """Sends a run's checkpoints, on rank 0. One at a time; while one is sent, later ones are left out, but for the
    last."""

    def __init__(
        self, flags: HubFlags, progress: Callable[[str], None] = lambda _doing: None
    ) -> None:
        self.flags = flags
        self.progress = progress
        self._thread = ThreadPoolExecutor(1)
        self._sending: Future[None] | None = None

    def saved(self, folder: Path, last: bool) -> None:
        """Sends a checkpoint that is whole. Returns at once, except for the last of the run."""
        busy = self._sending is not None and not self._sending.done()
        if not last and (busy or self.flags.strategy == "end"):
            return
        logger.info("sending %s to %s", folder.name, self.flags.repo)
        self._sending = sending = self._thread.submit(self._send, folder)
        deadline = time.monotonic() + self.flags.timeout
        while last and not sending.done():
            self.progress("an upload")
            left = deadline - time.monotonic()
            if left <= 0:
                self._failed(folder, f"it took longer than --hub_timeout {self.flags.timeout:g} s")
                return
            wait([sending], min(left, _LOOK_S))

    def _send(self, folder: Path) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        try:
            url = (_to_hugging_face if self.flags.hub == "hf" else _to_modelscope)(
                self.flags, folder, token
            )
        except Exception as error:  # noqa: BLE001  whatever the libraries raise, the run goes on
            said = f"{type(error).__name__}: {one_line(error)}"
            self._failed(folder, said.replace(token, "***") if token else said)
        else:
            logger.info("%s is on the hub: %s", folder.name, url)

    def _failed(self, folder: Path, cause: str) -> None:
        by_hand = _BY_HAND[self.flags.hub].format(repo=self.flags.repo, folder=folder)
        logger.error("%s was not sent to the hub: %s; by hand: %s", folder, cause[:400], by_hand)


def _parts(flags: HubFlags, folder: Path) -> dict[str, list[str]]:
    """Returns what is sent, by its place in the repository, with the patterns that are left out: the model at the root,
    and for resuming the whole checkpoint in a folder of its own."""
    whole = {"checkpoint": "last-checkpoint", "all_checkpoints": folder.name}.get(flags.strategy)
    return {"": _RESUMING} | ({} if whole is None else {whole: []})


def _to_hugging_face(flags: HubFlags, folder: Path, token: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    api = HfApi(os.environ.get("HF_ENDPOINT"), token)
    url = api.create_repo(flags.repo, private=flags.private, exist_ok=True)
    for place, left_out in _parts(flags, folder).items():
        api.upload_folder(
            repo_id=flags.repo,
            folder_path=folder,
            path_in_repo=place,
            ignore_patterns=left_out,
            commit_message=f"{folder.name}, by swift-r1",
        )
    return str(url)


def _to_modelscope(flags: HubFlags, folder: Path, token: str | None) -> str:
    from modelscope.hub.api import HubApi

    for name in ("modelscope", "modelscope_hub"):  # they log every request
        logging.getLogger(name).setLevel(logging.ERROR)
    api = HubApi()
    visibility = "private" if flags.private else "public"
    api.create_repo(flags.repo, token=token, visibility=visibility, exist_ok=True)
    for place, left_out in _parts(flags, folder).items():
        api.upload_folder(
            flags.repo,
            str(folder),
            path_in_repo=place,
            ignore_patterns=left_out,
            commit_message=f"{folder.name}, by swift-r1",
            token=token,
            use_cache=False,  # it would be a file in the checkpoint
        )
    return str(api.get_model_url(flags.repo))
