"""What `swift view` asks a rollout server (`lab/view/answer_sources.py`), on real vLLM."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from swift_r1.errors import RunFailed, ServerUnreachable
from swift_r1.lab.view.answer_sources import PageQuestion, ServerSource
from swift_r1.wire.client import RolloutClient
from tests.conftest import free_port, until
from tests.live_servers import push_weights


def test_answers_and_alternatives_are_the_models(
    server_url: str, client: RolloutClient, tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    version = client.info().weight_version + 1
    push_weights(client, version, [list(model.named_parameters())])
    source = ServerSource(server_url, None)
    for chat in (True, False):
        answers = asyncio.run(
            source.ask(PageQuestion("count from 7", chat=chat, n=2, max_tokens=9))
        )
        assert source.name == f"the server at {server_url}, weight version {version}"
        assert len(answers) == 2
        for one in answers:
            assert 1 <= len(one.pieces) == len(one.logps) <= 9 and max(one.logps) <= 0
    prefix = [5, 9, 30, 41]
    found = asyncio.run(source.alternatives(prefix, temperature=0.7))
    with torch.no_grad():
        logps = (model(torch.tensor([prefix])).logits[0, -1] / 0.7).log_softmax(-1)
    best = logps.topk(5).values.tolist()
    assert [value for _, value in found][:5] == pytest.approx(best, abs=2e-3)


def test_what_cannot_be_answered_is_one_line(server_url: str) -> None:
    source = ServerSource(server_url, None)
    with pytest.raises(
        RunFailed, match=r"refuses: .*too long: .*new tokens, max_model_len"
    ) as long:
        asyncio.run(source.ask(PageQuestion("x", max_tokens=100_000)))
    assert "\n" not in str(long.value)
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServerUnreachable, match="gave no answer within"):
        asyncio.run(ServerSource(nobody, None).ask(PageQuestion("x")))


def test_a_question_that_is_taken_back_ends_the_work(server_url: str) -> None:
    def running() -> bool:
        text = httpx.get(f"{server_url}/metrics", trust_env=False).text
        return not re.search(r"^swift_running_requests 0", text, re.M)

    async def ask_and_stop() -> None:
        while True:  # a random model may have ended its answers before anybody looks
            work = asyncio.ensure_future(
                ServerSource(server_url, None).ask(PageQuestion("x", n=16, max_tokens=900))
            )
            await asyncio.to_thread(until, lambda task=work: task.done() or running())
            if work.cancel():
                break
            work.result()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(ask_and_stop())
    until(lambda: not running())
