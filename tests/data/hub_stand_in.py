"""A small server of the files of a hub, answering what the clients of Hugging Face and ModelScope ask for.

`python hub_stand_in.py FOLDER` serves `FOLDER/owner/name/...` as datasets and prints its address.
"""

from __future__ import annotations

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves a folder; `requests` are the paths that were asked for."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder = folder
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self, repo: str) -> dict[str, bytes]:
        folder = self.folder / repo
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if parts[:2] == ["api", "datasets"]:
            self._hugging_face_api("/".join(parts[2:4]), parts[4:], body)
        elif parts[:1] == ["datasets"] and "resolve" in parts:
            self._hugging_face_file("/".join(parts[1:3]), "/".join(parts[5:]))
        elif parts[:3] == ["api", "v1", "datasets"]:
            self._modelscope("/".join(parts[3:5]), parts[5:], query)
        else:
            self._send(404, b"")

    # Hugging Face

    def _hugging_face_api(self, repo: str, rest: list[str], body: bytes) -> None:
        files = self.server.files(repo)
        if not files:
            self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif rest[:1] == ["tree"]:
            folder = "/".join(rest[2:])
            self._json(200, [_entry(path, files) for path in files if path.startswith(folder)])
        elif rest[:1] == ["paths-info"]:
            given = body.decode()
            asked = (
                json.loads(given)["paths"]
                if given.startswith("{")
                else parse_qs(given).get("paths", [])
            )
            self._json(200, [_entry(path, files) for path in asked if path in files])
        else:
            siblings = [{"rfilename": path} for path in files]
            self._json(
                200, {"id": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            )

    def _hugging_face_file(self, repo: str, path: str) -> None:
        files = self.server.files(repo)
        if path not in files:
            code = "EntryNotFound" if files else "RepoNotFound"
            self._send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": COMMIT})
        else:
            self._send(
                200, files[path], {"X-Repo-Commit": COMMIT, "ETag": f'"{_sha1(files[path])}"'}
            )

    # ModelScope

    def _modelscope(self, repo: str, rest: list[str], query: dict[str, str]) -> None:
        files = self.server.files(repo)
        if not files:
            self._json(404, {"Code": 10010205001, "Message": "not found", "Success": False})
        elif rest == ["repo", "tree"]:
            listed = [
                {
                    "Path": path,
                    "Name": Path(path).name,
                    "Type": "blob",
                    "Size": len(content),
                    "Sha256": hashlib.sha256(content).hexdigest(),
                    "Revision": COMMIT,
                }
                for path, content in files.items()
            ]
            self._json(200, {"Code": 200, "Data": {"Files": listed}, "Success": True})
        elif rest == ["repo"]:
            self._send(200, files[query["FilePath"]])
        else:
            self._json(200, {"Code": 200, "Data": {}, "Success": True})

    def _json(self, code: int, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(
            code,
            json.dumps(content).encode(),
            {"Content-Type": "application/json"} | (headers or {}),
        )

    def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        total = len(content)
        asked = self.headers.get("Range")
        if code == 200 and asked and asked.startswith("bytes="):
            first, _, last = asked[6:].partition("-")
            end = min(int(last) if last else total - 1, total - 1)
            content, code = content[int(first) : end + 1], 206
            headers = {**(headers or {}), "Content-Range": f"bytes {first}-{end}/{total}"}
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(path: str, files: dict[str, bytes]) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(files[path]), "oid": _sha1(files[path])}


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


if __name__ == "__main__":
    hub = Hub(Path(sys.argv[1]))
    print(hub.url, flush=True)
    hub.serve_forever()
