"""`--push_to_hub`: what reaches a hub, the model card, and what becomes of a run whose uploads fail."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from swift_r1.training.checkpoint.upload import TOKEN_VARIABLE, HubFlags, Uploader


class Hub(ThreadingHTTPServer):
    """Takes commits as Hugging Face and ModelScope do; `answers` is how: well, with an error, or never."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}  # ModelScope's large files, by their hash
        self.created: list[dict[str, Any]] = []
        self.answers, self.closing = "well", threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._json(200, {"id": "me/model", "sha": "0" * 40, "siblings": [], "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.server.answers == "never":
            self.server.closing.wait()
        elif self.server.answers == "error" or self.headers.get("Authorization") != "Bearer s3cret":
            self._json(401, {"error": f"no access with {self.headers.get('Authorization')}"})
        elif self.path.startswith("/api/v1/"):
            self._json(
                200, {"Code": 200, "Success": True, "Data": self._modelscope(json.loads(body))}
            )
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._json(200, {"url": f"{self.server.url}/me/model"})
        elif "/preupload/" in self.path:
            paths = [one["path"] for one in json.loads(body)["files"]]
            modes = [
                {"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths
            ]
            self._json(200, {"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
            self._json(
                200,
                {
                    "commitUrl": f"{self.server.url}/me/model/commit/0",
                    "commitOid": "0" * 40,
                    "success": True,
                },
            )
        else:
            self._json(200, {"errors": [], "warnings": []})  # of a card's YAML

    def do_PUT(self) -> None:
        digest = self.path.rpartition("/")[2]
        self.server.blobs[digest] = self.rfile.read(int(self.headers["Content-Length"]))
        self._json(200, {})

    def _modelscope(self, body: Any) -> Any:
        if self.path.endswith("/models"):
            self.server.created.append(body)
        elif self.path.endswith("/batch"):
            found = [
                (one, {"upload": {"href": f"{self.server.url}/blob/{one['oid']}"}})
                for one in body["objects"]
            ]
            return {"objects": [one | {"actions": actions} for one, actions in found]}
        for one in body.get("actions", ()):
            sent = (
                base64.b64decode(one["content"])
                if one["type"] == "normal"
                else self.server.blobs[one["sha256"]]
            )
            self.server.files[one["path"]] = sent
        return {}

    def _json(self, code: int, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"):
        monkeypatch.setenv(name, server.url)
    # which it has read, where another test has imported it
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


def checkpoint(folder: Path) -> Path:
    for name in ("model.safetensors", "README.md", "manifest.json", "state/run.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}")
    return folder


MODEL = {"model.safetensors", "README.md"}
WHOLE = MODEL | {"manifest.json", "state/run.json"}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("end", MODEL),
        ("checkpoint", MODEL | {f"last-checkpoint/{name}" for name in WHOLE}),
        ("all_checkpoints", MODEL | {f"checkpoint-5/{name}" for name in WHOLE}),
    ],
)
def test_what_is_sent(
    hub: Hub, tmp_path: Path, strategy: str, expected: set[str], caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    uploader = Uploader(HubFlags("hf", "me/model", True, strategy, 60))
    folder = checkpoint(tmp_path / "checkpoint-5")
    if strategy == "end":
        uploader.saved(checkpoint(tmp_path / "checkpoint-4"), last=False)
        assert not hub.created
    uploader.saved(folder, last=True)
    assert set(hub.files) == expected and hub.files["README.md"] == b"# README.md"
    assert (hub.created[0]["organization"], hub.created[0]["name"]) == ("me", "model")
    assert (
        f"checkpoint-5 is on the hub: {hub.url}/me/model" in caplog.text
        and "s3cret" not in caplog.text
    )


def test_what_is_sent_to_modelscope(hub: Hub, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    folder = checkpoint(tmp_path / "checkpoint-5")
    Uploader(HubFlags("ms", "me/model", True, "checkpoint", 60)).saved(folder, last=True)
    assert set(hub.files) == MODEL | {f"last-checkpoint/{name}" for name in WHOLE}
    assert hub.files["model.safetensors"] == b"# model.safetensors"
    assert hub.created[0]["Path"] == "me" and hub.created[0]["Visibility"] == 1
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == WHOLE
    assert f"checkpoint-5 is on the hub: {hub.url}/me/model" in caplog.text


@pytest.mark.parametrize(
    ("answers", "timeout", "cause"),
    [("error", 60, "401"), ("never", 3, "it took longer than --hub_timeout 3 s")],
)
def test_a_failed_upload_is_an_error_in_the_log(
    hub: Hub, tmp_path: Path, caplog: Any, answers: str, timeout: float, cause: str
) -> None:
    hub.answers = answers
    folder = checkpoint(tmp_path / "checkpoint-5")
    Uploader(HubFlags("hf", "me/model", False, "every_save", timeout)).saved(folder, last=True)
    (record,) = [
        one
        for one in caplog.records
        if (one.name, one.levelno) == ("swift_r1.training", logging.ERROR)
    ]
    said = record.getMessage()
    assert (
        cause in said
        and said.endswith(f"by hand: hf upload me/model {folder} .")
        and "s3cret" not in said
    )
