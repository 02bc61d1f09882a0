"""The agent for `--agent calculator`, beside plugin.py: `agent.py` with the client that an episode is given."""

import os

import agent  # the file beside this one

from swift_r1 import Agent, agents

BRANCHES = int(os.environ.get("BRANCHES", "1"))


class Calculator(Agent):
    """1 for the right number as the model's last word, else 0. With BRANCHES=2 it goes on twice from each answer of the
    calculator."""

    async def run(self, client, row):
        return float(await agent.solve(client, row["problem"], BRANCHES) == row["total"])


agents["calculator"] = Calculator
