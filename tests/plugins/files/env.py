"""A gym-style environment and a context manager, v3's names and v4's."""

from swift.infer_engine.protocol import RolloutInferRequest
from swift.plugin.context_manager import ContextManager, context_managers
from swift.plugin.env import Env, envs
from swift.rollout.gym_env import Env as Env4

assert Env is Env4


class Guess(Env):
    """Guess the row's number."""

    async def reset(self, config: RolloutInferRequest):
        self.number = config.data_dict["number"]
        return "Guess a number.", {}, "You guess."

    async def step(self, action):
        right = action[-1]["content"] == str(self.number)
        return ("Right." if right else "Wrong."), float(right), right, {}

    async def close(self):
        self.number = None


class LastTurns(ContextManager):
    def manage_context(self, history, trajectory_id):
        return history[-2:]


envs["guess"] = Guess
context_managers["last_turns"] = LastTurns
