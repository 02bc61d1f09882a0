"""The process that episodes are forked from: what a client needs is in it before the first of them begins."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from swift_r1.episodes.parent import Order
from swift_r1.episodes.processes import AgentProcesses

PLUGIN = """
import sys
from swift_r1 import Agent, agents

class Known(Agent):
    async def run(self, client, row):
        before = set(sys.modules)
        client.chat.completions
        client._client._transport._pool
        return {"imported": sorted(set(sys.modules) - before), "backend": "anyio._backends._asyncio" in before}

agents["known"] = Known
"""


def test_an_episode_imports_nothing_of_the_client_again(tmp_path: Path) -> None:
    plugin = tmp_path / "known.py"
    plugin.write_text(PLUGIN)

    async def play() -> str | None:
        processes = AgentProcesses(Order([str(plugin)], "known", None, 2.0, []))
        try:
            await processes.start()
            environ = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "-"}
            _, ended = await processes.begin(environ, {})
            return (await asyncio.wait_for(ended, 60)).result
        finally:
            await processes.close()

    result = asyncio.run(play())
    assert result is not None and json.loads(result) == {"imported": [], "backend": True}
