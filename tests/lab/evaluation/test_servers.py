"""`swift eval --model http://...`: our own server, any endpoint of OpenAI's protocol, and what becomes of failures."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from swift_r1.errors import RunFailed, ServerUnreachable, UsageError
from tests.conftest import KillableServer, ServerProcess, start_tiny_server, wait_until_serving
from tests.lab.evaluation.conftest import rows_of
from tests.vision import picture

Evaluate = Callable[..., Path]


class Endpoint(BaseHTTPRequestHandler):
    """A small endpoint that answers each question with its number plus one; `faults` come before an answer."""

    protocol_version = "HTTP/1.1"
    faults: ClassVar[Callable[[str, int], tuple[int, dict[str, str]] | None]]
    seen: ClassVar[Counter[tuple[str, int]]]
    bodies: ClassVar[list[dict[str, Any]]]
    lock: ClassVar[threading.Lock]

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": "adder", "object": "model"}]})
        else:
            self._answer(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        with self.lock:
            self.seen[text, body["seed"]] += 1
            times = self.seen[text, body["seed"]]
            self.bodies.append(body)
        fault = type(self).faults(text, times)
        if fault is None:
            answer = f"It is {int(text.split()[2]) + 1}."
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": answer},
                "finish_reason": "stop",
            }
            self._answer(
                200,
                {
                    "object": "chat.completion",
                    "choices": [choice],
                    "usage": {"completion_tokens": 4},
                },
            )
        elif fault[0] == 1:
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": "I"},
                "finish_reason": "abort",
            }
            self._answer(200, {"object": "chat.completion", "choices": [choice]})
        elif fault[0] == 0:
            self.close_connection = True  # hangs up
        else:
            self._answer(fault[0], {"error": {"message": "not like this"}}, fault[1])

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[tuple[str, type[Endpoint]]]:
    """URL and handler of an endpoint without faults."""

    class Own(Endpoint):
        faults = staticmethod(lambda text, times: None)
        seen, bodies, lock = Counter(), [], threading.Lock()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Own
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_transient_failures_leave_nothing_out(
    swift_eval: Evaluate, endpoint: tuple[str, type[Endpoint]], gsm8k_file: Path
) -> None:
    """Every request fails at first, each kind in its turn; every question is answered n times in the end."""
    url, handler = endpoint
    kinds = [(429, {"Retry-After": "0"}), (500, {}), (503, {}), (0, {}), (1, {})]
    handler.faults = staticmethod(
        lambda text, times: kinds[int(text.split()[2]) % 5] if times == 1 else None
    )
    asked = {"benchmarks": [f"gsm8k={gsm8k_file}"], "n": 3, "enable_thinking": False}
    folder = swift_eval(f"{url}/v1", **asked, vllm_server_timeout=60)
    rows = rows_of(folder)
    assert len(rows) == 36 and all(row["right"] and row["tokens"] == 4 for row in rows)
    assert len(handler.seen) == 36 and set(handler.seen.values()) == {2}
    report = json.loads((folder / "report.json").read_text())
    assert report["benchmarks"]["gsm8k"]["metrics"]["avg@3"]["value"] == 1.0
    assert report["settings"]["engine"]["served_model"] == "adder"
    body = handler.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == (
        "adder",
        8,
        1.0,
        1.0,
    )
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_images_are_asked_about_in_chats(
    swift_eval: Evaluate, endpoint: tuple[str, type[Endpoint]], tmp_path: Path
) -> None:
    url, handler = endpoint
    (tmp_path / "a.png").write_bytes(picture())
    rows = [
        {"query": "<image>and <image>what is 1", "images": ["a.png", "a.png"], "solution": "2"},
        {"query": "what is 2", "solution": "3"},
    ]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags: dict[str, Any] = {"reward_func": "accuracy", "n": 1}
    folder = swift_eval(f"{url}/v1", benchmarks=[file], **flags)
    assert len(rows_of(folder)) == 2
    contents = [body["messages"][-1]["content"] for body in handler.bodies]
    (asked,) = (content for content in contents if not isinstance(content, str))
    sent = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    image = {"type": "image_url", "image_url": {"url": sent}}
    texts = [{"type": "text", "text": text} for text in ("and ", "what is 1")]
    assert asked == [image, texts[0], image, texts[1]]


def test_a_persistent_failure_ends_it_in_time_and_it_goes_on_later(
    swift_eval: Evaluate, endpoint: tuple[str, type[Endpoint]], gsm8k_file: Path
) -> None:
    url, handler = endpoint
    flags: dict[str, Any] = {"benchmarks": [f"gsm8k={gsm8k_file}"], "vllm_server_timeout": 1.5}
    handler.faults = staticmethod(lambda text, times: (502, {}) if " 7 " in text else None)
    started = time.monotonic()
    with pytest.raises(
        ServerUnreachable, match=r"gsm8k:7: 502 not like this \(nothing was answered for 1.5 s\)"
    ):
        swift_eval(url, **flags)
    assert time.monotonic() - started < 60
    assert not (gsm8k_file.parent / "eval" / "report.json").exists()
    handler.faults = staticmethod(lambda text, times: (400, {}) if " 7 " in text else None)
    with pytest.raises(RunFailed, match="refuses gsm8k:7: 400 not like this"):
        swift_eval(url, **flags)
    answered = len(rows_of(gsm8k_file.parent / "eval"))
    assert answered == 22
    handler.faults = staticmethod(lambda text, times: None)
    handler.seen.clear()
    assert len(rows_of(swift_eval(url, **flags))) == 24
    assert {text for text, _ in handler.seen} == {"What is 7 + 1?"}


def test_nobody_there_is_waited_for_no_longer_than_said(
    swift_eval: Evaluate, gsm8k_file: Path
) -> None:
    with pytest.raises(
        ServerUnreachable, match=r"nothing answers at http://127\.0\.0\.1:9 within 1 s"
    ):
        swift_eval("http://127.0.0.1:9", benchmarks=[f"gsm8k={gsm8k_file}"], vllm_server_timeout=1)


def test_the_model_must_be_one_that_is_there(
    swift_eval: Evaluate, endpoint: tuple[str, type[Endpoint]], gsm8k_file: Path
) -> None:
    with pytest.raises(UsageError, match=r"--served_model_name other: .* has adder"):
        swift_eval(endpoint[0], benchmarks=[f"gsm8k={gsm8k_file}"], served_model_name="other")
    with pytest.raises(UsageError, match="--endpoint completions sends rendered prompts"):
        swift_eval(endpoint[0], benchmarks=[f"gsm8k={gsm8k_file}"], endpoint="completions")
    with pytest.raises(UsageError, match="there is no `swift rollout` server at"):
        swift_eval(endpoint[0], benchmarks=[f"gsm8k={gsm8k_file}"], endpoint="rollouts")


def test_our_server_and_the_folder_agree_greedily(
    swift_eval: Evaluate,
    start_tiny: Callable[..., Any],
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
) -> None:
    """By token ids through `/v1/rollouts`; a server that is killed on the way is waited for."""
    flags: dict[str, Any] = {"benchmarks": [f"gsm8k={gsm8k_file}"], "temperature": 0, "n": 1}
    flags["max_completion_length"] = 40
    local = rows_of(
        swift_eval(tiny_model, **flags, output_dir=tmp_path / "local", per_device_eval_batch_size=1)
    )
    server = start_tiny(tiny_model)
    wait_until_serving(server)
    folder = swift_eval(server.url, **flags, output_dir=tmp_path / "served")
    served = rows_of(folder)
    assert [row["completion"] for row in served] == [row["completion"] for row in local]
    assert [row["tokens"] for row in served] == [row["tokens"] for row in local]
    assert {row["weight_version"] for row in served} == {0}
    assert json.loads((folder / "settings.json").read_text())["engine"]["served_model"] == str(
        tiny_model
    )


@pytest.mark.long
def test_our_server_may_die_on_the_way(
    swift_eval: Evaluate, tiny_model: Path, gsm8k_file: Path, tmp_path: Path
) -> None:
    """It is waited for, and asked again for what it had not answered."""

    def start(model: Path, port: int | None) -> ServerProcess:
        return start_tiny_server(tmp_path / "server", model, port)

    server = KillableServer(start, tiny_model)
    server.wait()
    path = tmp_path / "eval" / "completions.jsonl"
    written: list[int] = []

    def kill() -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and not (path.is_file() and path.stat().st_size):
            time.sleep(0.01)
        server.kill()
        written.append(len(path.read_text().splitlines()))
        server.start()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        folder = swift_eval(
            server.url,
            benchmarks=[f"gsm8k={gsm8k_file}"],
            n=4,
            max_completion_length=300,
            vllm_server_timeout=90,
        )
    finally:
        killer.join(130)
        server.server.stop()
    assert 0 < written[0] < 48
    assert [(row["prompt_id"], row["index"]) for row in rows_of(folder)] == [
        (f"gsm8k:{question}", index) for question in range(12) for index in range(4)
    ]


@pytest.mark.long
def test_the_templates_end_of_a_turn_in_all_ways(
    swift_eval: Evaluate,
    rollout_server: Callable[..., str],
    thinking_base: Path,
    gsm8k_file: Path,
    tmp_path: Path,
) -> None:
    """A base model's own end token is another: our server by token ids, its two OpenAI routes, and transformers."""
    flags: dict[str, Any] = {
        "benchmarks": [f"gsm8k={gsm8k_file}"],
        "temperature": 0,
        "n": 1,
        "seed": 5,
    }
    flags["max_completion_length"] = 200
    url = rollout_server(thinking_base, torch_dtype="float32")
    tokenizer = {"tokenizer": thinking_base}
    ours = rows_of(swift_eval(url, **flags, **tokenizer, output_dir=tmp_path / "a"))
    plain = rows_of(
        swift_eval(url, **flags, **tokenizer, endpoint="completions", output_dir=tmp_path / "b")
    )
    chat = rows_of(swift_eval(url, **flags, endpoint="chat", output_dir=tmp_path / "c"))
    local = rows_of(swift_eval(thinking_base, **flags, output_dir=tmp_path / "d"))
    assert "stop" in {row["finish_reason"] for row in ours}
    for rows in (plain, local):
        assert [row["completion"] for row in rows] == [row["completion"] for row in ours]
    # An endpoint that renders by itself does not say what its template opens.
    assert ["<think>\n" + row["completion"] for row in chat] == [row["completion"] for row in ours]
    for rows in (plain, chat, local):
        assert [row["finish_reason"] for row in rows] == [row["finish_reason"] for row in ours]


@pytest.mark.long
def test_vllm_in_all_its_ways(
    swift_eval: Evaluate,
    rollout_server: Callable[..., str],
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
) -> None:
    """Our own vLLM server by token ids, the same server as an OpenAI endpoint, and one that `swift eval` starts and
    ends: the same greedy completions."""
    flags: dict[str, Any] = {"benchmarks": [f"gsm8k={gsm8k_file}"], "temperature": 0, "n": 1}
    flags["max_completion_length"] = 40
    url = rollout_server(tiny_model, torch_dtype="float32")
    ours = rows_of(swift_eval(url, **flags, tokenizer=tiny_model, output_dir=tmp_path / "a"))
    chat = rows_of(swift_eval(f"{url}/v1", **flags, endpoint="chat", output_dir=tmp_path / "b"))
    words = {"endpoint": "completions", "tokenizer": tiny_model}
    plain = rows_of(swift_eval(url, **flags, **words, output_dir=tmp_path / "c"))
    cache = json.dumps({"kv_cache_memory_bytes": 64 << 20})
    own = rows_of(
        swift_eval(
            tiny_model,
            **flags,
            infer_backend="vllm",
            torch_dtype="float32",
            vllm_engine_kwargs=cache,
            output_dir=tmp_path / "d",
        )
    )
    assert len(ours) == 12
    for rows in (chat, plain):
        assert [row["completion"] for row in rows] == [row["completion"] for row in ours]
        assert [row["tokens"] for row in rows] == [row["tokens"] for row in ours]
    local = rows_of(swift_eval(tiny_model, **flags, output_dir=tmp_path / "e"))
    assert [row["completion"] for row in own] == [row["completion"] for row in local]
