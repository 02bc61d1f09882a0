"""Sends checkpoints to a hub while the run trains: by a process for each, which ends at a deadline.

`python -m swift_r1.training.checkpoint.upload ORDER` is that process; it prints the address, or why it cannot. The
token is in its environment. A failed upload is a warning that says how to do it by hand, and never the end of the run.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swift_r1.data.hubs import Hub
from swift_r1.errors import one_line
from swift_r1.runtime.processes import end_with_parent, module_words
from swift_r1.workers.process import SupervisedProcess

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
    timeout: float  # seconds that an upload may take


class Uploader:
    """Sends a run's checkpoints, on rank 0. One at a time; while one is sent, later ones are left out, but for the
    last."""

    def __init__(
        self, flags: HubFlags, progress: Callable[[str], None] = lambda _doing: None
    ) -> None:
        self.flags = flags
        self.progress = progress
        self._process: SupervisedProcess | None = None
        self._folder = Path()

    def saved(self, folder: Path, last: bool) -> None:
        """A checkpoint is whole. Returns at once, except for the last of the run."""
        sending = (
            self._process is not None and self._process.poll() is None and not self._process.late
        )
        if not last and (sending or self.flags.strategy == "end"):
            return
        self._conclude()
        order = asdict(self.flags) | {"folder": str(folder)}
        self._folder = folder
        logger.info(
            "sending %s to %s (at most %g s)", folder.name, self.flags.repo, self.flags.timeout
        )
        words = [sys.executable, *module_words(__name__, json.dumps(order))]
        environ = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._process = SupervisedProcess(
            words, environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process.deadline = time.monotonic() + self.flags.timeout
        if last:
            self._conclude()

    def _conclude(self) -> None:
        """Waits for the upload that is under way, to its deadline, and says what became of it."""
        process = self._process
        self._process = None
        if process is None:
            return
        said = None
        while said is None:
            self.progress("an upload")
            left = process.deadline - time.monotonic()
            try:
                output, _ = process.communicate(timeout=min(max(left, 0.0), _LOOK_S))
                said = output.decode()
            except subprocess.TimeoutExpired:
                if left <= 0:
                    process.kill()
                    process.communicate()
                    said = f"it took longer than --hub_timeout {self.flags.timeout:g} s"
        if process.returncode == 0:
            logger.info("%s is on the hub: %s", self._folder.name, said.strip())
            return
        by_hand = _BY_HAND[self.flags.hub].format(repo=self.flags.repo, folder=self._folder)
        cause = " ".join(said.split())[:400] or f"exit code {process.returncode}"
        logger.warning("%s was not sent to the hub: %s; by hand: %s", self._folder, cause, by_hand)

    def close(self) -> None:
        """Ends what is under way, where the run did not come to its end."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()


def send(order: dict[str, str], token: str | None) -> str:
    """The model to the repository's root, and for resuming the whole checkpoint too, in a folder of its own; returns
    the address. Raises what the hub's library raises."""
    folder = order["folder"]
    repo = order["repo"]
    parts: list[tuple[str, list[str]]] = [("", _RESUMING)]
    if order["strategy"] in ("checkpoint", "all_checkpoints"):
        parts.append(
            ("last-checkpoint" if order["strategy"] == "checkpoint" else Path(folder).name, [])
        )
    message = f"{Path(folder).name}, by swift-r1"
    if order["hub"] == "hf":
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        url = str(api.create_repo(repo, private=bool(order["private"]), exist_ok=True))
        for place, left_out in parts:
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                path_in_repo=place,
                ignore_patterns=left_out,
                commit_message=message,
            )
        return url
    from modelscope.hub.api import HubApi

    other = HubApi()
    other.create_repo(
        repo, token=token, visibility="private" if order["private"] else "public", exist_ok=True
    )
    for place, left_out in parts:
        other.upload_folder(
            repo,
            folder,
            path_in_repo=place,
            ignore_patterns=left_out,
            commit_message=message,
            token=token,
            use_cache=False,  # it would be a file in the checkpoint
        )
    return str(other.get_model_url(repo))


def main(argv: Sequence[str]) -> int:
    end_with_parent(signal.SIGTERM)
    token = os.environ.get(TOKEN_VARIABLE)
    # libraries print too
    output = sys.stdout
    sys.stdout = sys.stderr
    try:
        print(send(json.loads(argv[0]), token), file=output)
    except Exception as error:  # noqa: BLE001  whatever the libraries raise is the answer
        said = f"{type(error).__name__}: {one_line(error)}"
        print(said.replace(token, "***") if token else said, file=output)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
