"""A checkpoint in a process of its own: what it answers, and that it ends."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swift_r1.errors import RunFailed
from swift_r1.lab.view import answer_sources
from swift_r1.lab.view.answer_sources import CheckpointSource, PageQuestion, ServerSource


@pytest.mark.long
def test_a_checkpoint_answers_until_it_is_idle(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_sources, "IDLE_S", 3.0)
    prefix = [5, 9, 30, 41]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        best = (
            (model(torch.tensor([prefix])).logits[0, -1] / 0.7)
            .log_softmax(-1)
            .topk(5)
            .values.tolist()
        )

    async def ask_all() -> None:
        source = CheckpointSource(tiny_model, "cpu")
        try:
            answers = await source.ask(PageQuestion("3 + 9", chat=False, n=3, max_tokens=8))
            assert len(answers) == 3 and {one.finish_reason for one in answers} <= {
                "stop",
                "length",
            }
            assert all(
                1 <= len(one.pieces) == len(one.logps) <= 8 and max(one.logps) <= 0
                for one in answers
            )
            found = await source.alternatives(prefix, temperature=0.7)
            assert [value for _, value in found] == pytest.approx(best, abs=1e-4)
            for question, said in (
                (PageQuestion("", chat=False), "no tokens"),
                (PageQuestion("x", max_tokens=9999), "takes"),
            ):
                with pytest.raises(RunFailed, match=said):
                    await source.ask(question)
            assert source._process is not None
            assert await asyncio.wait_for(source._process.wait(), 60) == 0  # nobody has asked
            assert len(await source.ask(PageQuestion("again", max_tokens=2))) == 1
            process, work = (
                source._process,
                asyncio.create_task(source.ask(PageQuestion("x", n=16, max_tokens=900))),
            )
            await asyncio.sleep(0)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            await asyncio.wait_for(process.wait(), 60)
        finally:
            left = source._process
            source.close()
            if left is not None:
                await left.wait()

    asyncio.run(ask_all())


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    async def ask() -> None:
        await CheckpointSource(tmp_path, "cpu").ask(PageQuestion("x"))

    with pytest.raises(RunFailed, match="cannot load the tokenizer") as failed:
        asyncio.run(ask())
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    "answer",
    [[], {}, {"data": []}, {"data": [{"id": "m"}]}, {"data": [{"id": "m"}], "choices": [{}]}],
)
def test_a_server_of_another_kind_is_one_line(answer: object) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        source = ServerSource(f"http://127.0.0.1:{server.server_port}", None)
        try:
            for work in (source.ask(PageQuestion("x")), source.alternatives([1], 1.0)):
                with pytest.raises(
                    RunFailed, match="does not answer as a `swift rollout` server does"
                ):
                    asyncio.run(work)
        finally:
            server.shutdown()
            thread.join(20)
