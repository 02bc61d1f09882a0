"""Seconds of one round of several turns over a rollout server, with completions of very different lengths: where each
turn waits for the slowest conversation, and where each conversation goes on by itself.

    python benchmarks/turns.py --model models/smollm2-135m --conversations 64 --turns 4

The server is the real one on HTTP. Its engine has no model: 1 in 16 completions takes `--seconds`, the others a tenth,
whatever else is generated, as on an engine with room for all. Both rounds have the same seeds, so the same lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import AutoTokenizer

from swift_r1.data.prompts import PromptEncoder
from swift_r1.flags.server import RolloutArguments
from swift_r1.plugins.rollouts import MultiTurnScheduler
from swift_r1.rollout.base import GroupRequest
from swift_r1.rollout.multi_turn import BatchedTurns, ServedTurns, Turns
from swift_r1.rollout.pool.pool import ServerPool
from swift_r1.rollout.pool.session import Expected, ServerSession
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.rollout.schedulers import Limits, SchedulerRunner
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.base import EngineInfo, Generated, PromptTokenizer
from swift_r1.serving.routes import create_app
from swift_r1.serving.service import Lifecycle
from swift_r1.sync.writer import WeightWriter
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import SamplingParams

LENGTH = 1 << 20
WAIT_S = 60.0


class SlowEngine:
    """Says the same in each completion, after a time that follows from its seed."""

    dead = scores_alone = False

    def __init__(self, tokenizer: Any, seconds: float) -> None:
        self.prompts = PromptTokenizer(tokenizer)
        self.info = EngineInfo("slow", "0", len(tokenizer), "", LENGTH, "float32")
        self.seconds = seconds
        self.token_ids = (
            *tokenizer("so", add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        )

    async def generate(
        self, prompt: Sequence[int], sampling: SamplingParams, seed: int | None
    ) -> Generated:
        assert seed is not None
        await asyncio.sleep(self.seconds if seed % 16 == 0 else self.seconds / 10)
        return Generated(self.token_ids, (-0.5,) * len(self.token_ids), "stop")

    def shutdown(self) -> None: ...


class Again(MultiTurnScheduler):
    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        return current_turn == self.max_turns

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "again"})
        return {"infer_request": infer_request}


def serve(engine: SlowEngine) -> str:
    """Returns the address of a server in a thread that ends with the process."""
    lifecycle = Lifecycle(RolloutArguments(model="none"), lambda: (engine, {}))
    config = uvicorn.Config(
        create_app(lifecycle, None), port=0, log_level="error", timeout_keep_alive=120
    )
    server = uvicorn.Server(config)
    listening = threading.Event()

    async def run() -> None:
        life = asyncio.create_task(lifecycle.run())
        http = asyncio.create_task(server.serve())
        while not server.started or lifecycle.service is None:
            await asyncio.sleep(0.01)
        listening.set()
        await asyncio.gather(life, http)

    threading.Thread(target=asyncio.run, args=(run(),), daemon=True).start()
    assert listening.wait(WAIT_S)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return f"http://{host}:{port}"


def seconds_of(driver: Turns, asked: Sequence[GroupRequest], turns: int) -> float:
    groups: list[Sequence[Trajectory]] = []
    began = time.perf_counter()
    driver.generate(asked, lambda _count: None, groups.append)
    seconds = time.perf_counter() - began
    assert len(groups) == len(asked) and all(
        len(one.turns) == turns for group in groups for one in group
    )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder, for its tokenizer")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a long completion")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encoder = PromptEncoder(tokenizer)
    engine = SlowEngine(tokenizer, args.seconds)
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    sampling = SamplingParams(max_tokens=64)
    asked = []
    for number in range(args.conversations):
        row = {
            "messages": [{"role": "user", "content": "Go on."}],
            "prompt_id": str(number),
            "dataset": "d",
        }
        prompt = encoder.encode(row)
        assert prompt is not None
        asked.append(GroupRequest.of(prompt, f"run/{number}", (number,), sampling))
    runner = SchedulerRunner(
        "again",
        WAIT_S,
        lambda turn_engine: Again(turn_engine, args.turns, tokenizer=tokenizer),
        encoder,
        (tokenizer.eos_token_id,),
        Limits(LENGTH, False, args.turns, 1.0),
    )
    with RolloutClient(serve(engine)) as client:
        client.wait_until_ready(WAIT_S)
        writer = WeightWriter(client)
        writer.hold(WAIT_S)
        session = ServerSession(writer, Expected("none", "", len(tokenizer), None), WAIT_S, "http")
        pool = ServerPool([session], WAIT_S, "http")
        rollouts = ServerRollouts(pool, None, ranks)  # type: ignore[arg-type]  # no weights are sent
        together = seconds_of(BatchedTurns(rollouts, ranks, runner), asked, args.turns)
        for place, (prompt, request) in enumerate(asked):  # a server remembers what it has answered
            asked[place] = GroupRequest.of(prompt, f"again/{place}", request.seeds or (), sampling)
        alone = seconds_of(ServedTurns(rollouts, runner), asked, args.turns)
        pool.close()
    runner.close()
    print(f"each turn waits for the slowest {together:6.2f} s")
    print(f"each goes on by itself          {alone:6.2f} s")
    print(f"ratio                           {together / alone:6.2f}")


if __name__ == "__main__":
    main()
