"""A script for TRL, as its users write them: it never comes to its last line here."""

import argparse
import random

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RichProgressCallback


class CounterEnv:
    def __init__(self):
        self.value, self.wanted, self.drawn = 0, 0, random.random()

    def reset(self, wanted, **kwargs) -> str:
        self.value, self.wanted = 0, wanted
        return f" It shows {self.value}."

    def add(self, amount: int) -> int:
        """Adds to the counter.

        Args:
            amount: what to add, above 0

        Returns:
            What the counter shows then.
        """
        if amount <= 0:
            raise ValueError("only forwards")
        self.value += amount
        return self.value

    async def look(self) -> str:
        """Looks at the counter."""
        return f"It shows {self.value}."

    def get_reward(self) -> float:
        return float(self.value == self.wanted)


def brief(completions, environments, wanted, **kwargs):
    assert environments[0].wanted == wanted[0]
    return [1.0 / len(messages) for messages in completions]


def no_opinion(completions, **kwargs):
    return [None] * len(completions)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=3)
    most = parser.parse_args().most
    prompts = [[{"role": "user", "content": f"Make it show {n}."}] for n in range(1, most + 1)]
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        args=GRPOConfig(
            bf16=True, reward_weights=[0.5, 1.0], max_tool_calling_iterations=2, use_vllm=True
        ),
        reward_funcs=[brief, no_opinion],
        train_dataset=Dataset.from_dict({"prompt": prompts, "wanted": list(range(1, most + 1))}),
        environment_factory=CounterEnv,
        callbacks=[RichProgressCallback()],
    )
    trainer.train()
    raise AssertionError("the trainer is ours, and never made")


if __name__ == "__main__":
    main()
