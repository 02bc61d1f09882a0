"""Schedulers and an environment as a user would write them, for a model that says anything."""

from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.plugin.context_manager import ContextManager, context_managers
from swift.rewards import ORM, orms
from swift.rollout import MultiTurnScheduler, multi_turns
from swift.rollout.gym_env import Env, envs


class Again(MultiTurnScheduler):
    """As many turns as there may be, and a word of its own at the end of each other turn."""

    def check_finished(self, infer_request, response_choice, current_turn):
        return False

    def step(self, infer_request, response_choice, current_turn):
        if current_turn % 2:
            infer_request.messages.append({"role": "user", "content": f"again {current_turn}"})
            return {"infer_request": infer_request, "rollout_infos": {"asked": current_turn}}
        infer_request.messages[-1]["content"] += " Wait,"
        return {"infer_request": infer_request}


multi_turns["again"] = Again


class CountDigits(Env):
    """Rewards each turn's digits; ends after `length` turns."""

    async def reset(self, config):
        self.turns = 0
        return f"digits for {config.data_dict['start']}", {}, "You say digits."

    async def step(self, action):
        self.turns += 1
        text = action[-1]["content"]
        over = self.turns == self.env_config.get("length", 2)
        return (
            f"turn {self.turns}",
            sum(c.isdigit() for c in text) / max(1, len(text)),
            over,
            {"said": text},
        )

    async def close(self):
        self.turns = None


class Adds(ContextManager):
    def manage_context(self, history, trajectory_id):
        history[-1]["content"] += " (go)"
        return history


envs["count_digits"] = CountDigits
context_managers["adds"] = Adds


class Seen(ORM):
    """1 where the reward sees the last turn, the whole conversation and the infos."""

    def __call__(self, completions, messages, rollout_infos, **kwargs):
        return [
            float(said == talk[-1]["content"] or talk[-1]["content"].endswith(said))
            + infos["num_turns"] / 100
            + infos["asked"] / 10
            for said, talk, infos in zip(completions, messages, rollout_infos, strict=True)
        ]


orms["seen"] = Seen


class Preprocess(ResponsePreprocessor):
    def preprocess(self, row):
        row["query"] = f"count from {row['start']}"
        return super().preprocess(row)


register_dataset(
    DatasetMeta(
        dataset_name="starts",
        preprocess_func=Preprocess(),
        loader=lambda split, **kwargs: [{"start": number, "response": ""} for number in range(100)],
    )
)
