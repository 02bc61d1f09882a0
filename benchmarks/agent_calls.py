"""What a call of an agent costs the trainer: episodes of ten turns over the gateway of `swift rlhf --agent`, with an
engine that answers at once. `python benchmarks/agent_calls.py --model FOLDER` (for its tokenizer)."""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

TURNS = 10
AT_ONCE = 16


async def episodes(urls: list[list[str]]) -> None:
    """In a process of its own: every agent's turns, as OpenAI's protocol has them, over connections that are kept."""
    import httpx

    queue = list(reversed(urls))

    async def agent(client: httpx.AsyncClient) -> None:
        while queue:
            url, key = queue.pop()
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": "Guess my number from 1 to 9. " * 10}
            ]
            for _ in range(TURNS):
                body = {"model": "any", "messages": messages}
                answer = await client.post(
                    f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
                )
                answer.raise_for_status()
                messages += [
                    answer.json()["choices"][0]["message"],
                    {"role": "user", "content": "Higher. " * 10},
                ]

    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*[agent(client) for _ in range(AT_ONCE)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=30, help="of an answer")
    parser.add_argument("--profile", help="file of cProfile for the gateway's thread")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        asyncio.run(episodes(json.load(sys.stdin)))
        return
    from transformers import AutoTokenizer

    from swift_r1.rollout.agents.gateway import AgentGateway, AgentModel
    from swift_r1.serving.engines.base import PromptTokenizer
    from swift_r1.serving.openai_messages import ToolCalls
    from swift_r1.wire.protocol import Completion, RolloutRequest
    from swift_r1.wire.sessions import SessionLimits, SessionRequest, SessionSampling

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts, ends = PromptTokenizer(tokenizer), (tokenizer.eos_token_id,)
    model = AgentModel(prompts, ToolCalls(None, tokenizer), 1 << 20, len(tokenizer), ends)
    gateway = AgentGateway(model)
    text = tokenizer("I say 7, and I have reasons for it. " * 20, add_special_tokens=False)[
        "input_ids"
    ]
    done = Completion(
        token_ids=(*text[: args.tokens - 1], tokenizer.eos_token_id),
        logprobs=(-0.5,) * args.tokens,
        finish_reason="stop",
        weight_version=1,
    )

    def ask(_request: RolloutRequest) -> asyncio.Future[Completion]:
        future = gateway.loop.create_future()
        future.set_result(done)
        return future

    store, urls = gateway.sessions.store, []
    sampling = SessionSampling(temperature=1.0, top_p=1.0, max_tokens=256)
    for number in range(args.episodes):
        name = f"run.{number}"
        state = store.open(
            SessionRequest(
                id=name, seed=number, sampling=sampling, limits=SessionLimits(calls=1000)
            )
        )
        model.conversations[name] = cast(Any, SimpleNamespace(ask=ask))
        urls.append([f"{gateway.url}/v1/sessions/{name}/v1", state.key])
    profile = cProfile.Profile(time.thread_time)  # not what other processes take

    async def spent(switch: Callable[[], None]) -> float:
        """Seconds of the gateway's thread so far, in which profiling is switched on or off."""
        if args.profile:
            switch()
        return time.thread_time()

    command = [sys.executable, __file__, "--client"]
    before, began = gateway.call(spent(profile.enable)).result(), time.perf_counter()
    subprocess.run(command, input=json.dumps(urls).encode(), check=True)
    seconds, cpu = (
        time.perf_counter() - began,
        gateway.call(spent(profile.disable)).result() - before,
    )
    calls = args.episodes * TURNS
    print(
        f"{calls} calls: {1000 * cpu / calls:.2f} ms of the gateway's thread each, {calls / seconds:.0f} per second"
    )
    if args.profile:
        profile.dump_stats(args.profile)
    gateway.close()


if __name__ == "__main__":
    main()
