"""The agent for `--agent calculator`, beside plugin.py: `agent.py` with the client that an episode is given."""

import agent  # the file beside this one

from swift_r1 import Agent, agents


class Calculator(Agent):
    """1 for the right number as the model's last word, else 0."""

    async def run(self, client, row):
        return float(await agent.solve(client, row["problem"]) == row["total"])


agents["calculator"] = Calculator
