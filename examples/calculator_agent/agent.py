"""An agent that knows OpenAI's client and nothing else: it asks a model, works out its calls, and asks again.

It runs with whatever model is behind an OpenAI address:

    echo '{"problem": "37*58+71"}' | OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/calculator_agent/agent.py
"""

import asyncio
import json
import os
import re
import sys
from collections import Counter

from openai import AsyncOpenAI

MOST_TURNS = 4
CALCULATE = {
    "name": "calculate",
    "description": "Calculates with two whole numbers and one operator, + - or *.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "such as 12*34"}},
        "required": ["expression"],
    },
}


def worked_out(arguments: str) -> str:
    """The answer to a call, or that there is none."""
    try:
        left, way, right = re.fullmatch(
            r"(-?\d+)([-+*])(\d+)", json.loads(arguments)["expression"]
        ).groups()
    except (ValueError, KeyError, TypeError, AttributeError):
        return "Error"
    return str({"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[way](int(left), int(right)))


async def solve(client: AsyncOpenAI, problem: str, branches: int = 1) -> str:
    """What the model says in the end; where it goes on several times from each answer of the calculator, what it says
    most often."""
    ends = await ends_of(client, [{"role": "user", "content": problem}], MOST_TURNS, branches)
    return Counter(ends).most_common(1)[0][0]


async def ends_of(
    client: AsyncOpenAI, messages: list[dict], turns: int, branches: int
) -> list[str]:
    """What the model says at the end of each branch of a conversation."""
    answer = await client.chat.completions.create(
        model=os.environ.get("OPENAI_MODEL", "any"),
        messages=messages,
        tools=[{"type": "function", "function": CALCULATE}],
    )
    said = answer.choices[0].message
    if not said.tool_calls:
        return [said.content or ""]
    if turns == 1:
        return [""]
    messages = [*messages, said.model_dump(exclude_none=True)]
    for call in said.tool_calls:
        found = worked_out(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    ways = (ends_of(client, messages, turns - 1, branches) for _ in range(branches))
    return [end for ends in await asyncio.gather(*ways) for end in ends]


async def main() -> None:
    row = json.load(sys.stdin)
    said = await solve(AsyncOpenAI(), row["problem"])
    print(json.dumps({"said": said, "reward": float(said == row.get("total"))}))


if __name__ == "__main__":
    asyncio.run(main())
