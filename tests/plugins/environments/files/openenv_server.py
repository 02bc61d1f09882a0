"""Two environments as OpenEnv servers, run in OpenEnv's own Python: `openenv_server.py guess|mortal|shop PORT`."""

import os
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """Guesses the number."""

    number: int


class Told(Observation):
    hint: str = ""


class Guessing(Environment):
    """A number from 0 to 9, which is the last digit of the seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, offset=0, **kwargs):
        self.number, self.tries = (seed + offset) % 10, 0
        return Told(hint="Guess a number from 0 to 9.")

    def step(self, action, timeout_s=None, **kwargs):
        if action.number > 9:
            raise ValueError("the highest is 9")
        self.tries += 1
        if action.number == self.number:
            return Told(hint="right", done=True, reward=1.0)
        return Told(hint="higher" if action.number < self.number else "lower", reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.tries)


class Mortal(Guessing):
    """Its server ends with the first guess."""

    def step(self, action, timeout_s=None, **kwargs):
        os._exit(1)


class Shop(MCPEnvironment):
    """Tools by MCP."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        from fastmcp import FastMCP

        server = FastMCP("shop")

        @server.tool
        def price(item: str) -> float:
            """What an item costs."""
            if item != "tea":
                raise ValueError(f"there is no {item}")
            return 2.5

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(reward=0.0, metadata={"message": "You are in a shop."})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    made = {
        "guess": (Guessing, Guess, Told),
        "mortal": (Mortal, Guess, Told),
        "shop": (Shop, CallToolAction, CallToolObservation),
    }[sys.argv[1]]
    app = create_app(*made, env_name=sys.argv[1], max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
