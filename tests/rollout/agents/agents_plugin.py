"""Agents for tests: some play, others misbehave as the column `how` of their row says."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from openai import BadRequestError

from swift_r1 import ORM, Agent, agents, orms


def digits(text: str) -> float:
    """The share of digits."""
    return sum(one.isdigit() for one in text) / max(1, len(text))


class Counts(Agent):
    """Asks for digits, twice, in one conversation."""

    async def run(self, client: Any, row: dict[str, Any]) -> Any:
        messages, turns = list(row["messages"]), []
        for _ in range(2):
            answer = await client.chat.completions.create(model="any", messages=messages)
            said = answer.choices[0].message
            turns.append(digits(said.content or ""))
            messages += [said, {"role": "user", "content": "more"}]
            if "progress" in row:
                with open(row["progress"], "a") as file:
                    file.write(".")
        return {"reward": sum(turns), "turn_rewards": turns, "noted": row["episode_id"]}


class Branches(Agent):
    """Two sub-agents beside each other, and a last call that has lost the first one's history."""

    async def run(self, client: Any, row: dict[str, Any]) -> Any:
        async def ask(*texts: str) -> str:
            messages = [{"role": "user", "content": text} for text in texts]
            answer = await client.chat.completions.create(
                model="any", messages=messages, max_tokens=5
            )
            return answer.choices[0].message.content or ""

        found = await asyncio.gather(ask("left"), ask("right"))
        return digits(await ask("both", *found))


class Forks(Agent):
    """Goes on from its first answer in two ways, one after the other."""

    async def run(self, client: Any, row: dict[str, Any]) -> Any:
        messages = list(row["messages"])
        first = await client.chat.completions.create(model="any", messages=messages)
        messages.append(first.choices[0].message)
        for text in ("more", "something else"):
            further = [*messages, {"role": "user", "content": text}]
            answer = await client.chat.completions.create(model="any", messages=further)
        return digits(answer.choices[0].message.content or "")


class Repeats(Agent):
    """Makes equal calls, beside each other or one after another."""

    async def run(self, client: Any, row: dict[str, Any]) -> Any:
        async def ask() -> str:
            answer = await client.chat.completions.create(model="any", messages=row["messages"])
            return answer.choices[0].message.content or ""

        if row["how"] == "together":
            said = await asyncio.gather(*[ask() for _ in range(12)])
        else:
            said = [await ask() for _ in range(12)]
        return {"reward": 1.0, "said": list(said)}


class GivesUp(Agent):
    """Asks, gives that up as its row says, asks the same again and goes on from there. Files in `folder` say how far
    the first call has come."""

    async def run(self, client: Any, row: dict[str, Any]) -> Any:
        how, messages, folder = row["how"], list(row["messages"]), Path(row["folder"])
        ask = partial(client.chat.completions.create, model="any")
        call = asyncio.create_task(ask(messages=messages, stream=how == "streamed"))
        while not (folder / "asked").exists():
            await asyncio.sleep(0.01)
        (folder / "ready").touch()
        if how == "left":  # what is answered now is never awaited
            return 1.0
        while how != "waiting" and not (folder / "answered").exists():
            time.sleep(0.01)  # nothing is read meanwhile
        call.cancel()
        await asyncio.wait([call])
        said = (await ask(messages=messages)).choices[0].message
        await ask(messages=[*messages, said, {"role": "user", "content": "more"}])
        return {"reward": 1.0, "turn_rewards": [0.5, 0.5]}


class Misbehaves(Agent):
    """As its row says."""

    async def run(self, client: Any, row: dict[str, Any]) -> Any:
        how = row.get("how", "plays")
        if how == "mixed":
            how = ["crashes", "silent", "plays", "plays"][int(row["episode_id"].rpartition("/")[2])]
        if how == "silent":
            return 1.0
        if how == "has a child":
            own = [
                sys.executable,
                "-c",
                "import os, time; os.setsid(); time.sleep(1000)",
                "child of " + row["episode_id"],
            ]
            subprocess.run(own, check=False)
        if how == "hangs at once":
            time.sleep(1000)
        await client.chat.completions.create(model="any", messages=row["messages"])
        if how == "hangs":
            print("I begin to hang", file=sys.stderr)
            time.sleep(1000)
        if how == "crashes":
            raise ConnectionError("the shop is closed")
        if how == "leaves":
            sys.exit(3)
        if how == "ends its process":
            os._exit(0)
        if how == "returns nothing":
            return None
        if how == "dies":
            os.kill(os.getpid(), 9)
        if how == "eats":
            return len(bytearray(8 << 30))
        if how == "gives a list":
            return [1.0]
        if how == "raises half a character":
            raise ValueError("\ud800")
        if how == "says much":
            return {"reward": 1.0, "said": "x" * (17 << 20)}
        if how == "gives nan":
            return float("nan")
        if how == "calls forever":
            while True:
                await client.chat.completions.create(
                    model="any", messages=row["messages"], max_tokens=1
                )
        return 0.5


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        },
    },
}


class Adds(Agent):
    """Has a tool, and asks for what cannot be had before."""

    async def run(self, client: Any, row: dict[str, Any]) -> Any:
        messages: list[Any] = list(row["messages"])
        refused = []
        for more in (
            {"tools": [ADD], "tool_choice": "required"},
            {"logprobs": True, "top_logprobs": 2},
            {"extra_body": {"stop_token_ids": [100_000]}},
            {"frequency_penalty": 1.0},
        ):
            try:
                await client.chat.completions.create(model="any", messages=messages, **more)
            except BadRequestError as error:
                refused.append(error.message)
        # More tokens than there is room for are cut down.
        asked = {"model": "any", "tools": [ADD], "max_tokens": 100_000, "temperature": 0.5}
        while True:
            said = (
                (await client.chat.completions.create(messages=messages, **asked))
                .choices[0]
                .message
            )
            messages.append(said)
            if not said.tool_calls:
                return {"reward": float(said.content == "It is 3."), "refused": refused}
            for call in said.tool_calls:
                given = json.loads(call.function.arguments)
                answer = {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "content": str(given["a"] + given["b"]),
                }
                messages.append(answer)


agents |= {
    "adds": Adds,
    "counts": Counts,
    "branches": Branches,
    "forks": Forks,
    "repeats": Repeats,
    "misbehaves": Misbehaves,
}
agents["gives up"] = GivesUp


class Seen(ORM):
    """A bit for each turn; what it is given must fit."""

    def __call__(
        self,
        completions: list[str],
        messages: list[Any],
        rollout_infos: list[Any],
        num_turns: list[int],
        tool_calls: list[Any],
        **kwargs: Any,
    ) -> list[float]:
        return [turns / 100 for turns in num_turns]


class Slow(ORM):
    """The share of digits, some time later."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        time.sleep(0.5)
        return [digits(text) for text in completions]


class Digits(ORM):
    """The share of digits."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [digits(text) for text in completions]


orms |= {"seen": Seen, "slow": Slow, "digits": Digits}
