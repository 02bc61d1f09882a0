"""ms-swift's own schedulers and environment for problems of mathematics, registered under its names.

Each gives the model one more chance after a wrong answer; `accuracy` says what is wrong, from the column `solution`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from swift_r1.plugins.protocol import ChatCompletionResponseChoice, Messages, RolloutInferRequest
from swift_r1.plugins.rollouts import Env, MultiTurnScheduler, envs, multi_turns
from swift_r1.rewards.builtin import MathAccuracy

_AGAIN = "That answer is wrong. Go through your steps once more, find the mistake and answer again."


class _SecondChance(MultiTurnScheduler):
    """`tips_prompt` is what the model gets to read once; `acc_function` judges, as a reward."""

    tips_prompt = _AGAIN

    def __init__(
        self, *args: Any, acc_function: Callable[..., Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = acc_function or MathAccuracy()

    def check_finished(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> bool:
        talk = infer_request.messages
        if any(self.tips_prompt in message["content"] for message in talk[-2:]):
            return True
        [correct] = self.acc_func([talk[-1]["content"]], [infer_request.data_dict["solution"]])
        return correct == 1 or super().check_finished(infer_request, response_choice, current_turn)


class ThinkingModelTipsScheduler(_SecondChance):
    """Asks once more, by a further message, where the answer is wrong. ms-swift makes each turn a sample of its own,
    without the thoughts of those before; here the conversation stays whole."""

    def step(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}


class MathTipsScheduler(_SecondChance):
    """Cuts the turn before its answer and continues after an inserted doubt, which is not trained on."""

    tips_prompt = "Wait, something in this is wrong."

    def step(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> dict[str, Any]:
        text = infer_request.messages[-1]["content"]
        ids = list(response_choice.token_ids or [])

        def length(count: int) -> int:
            """Returns the length of the text up to `count` tokens of this turn."""
            return before + len(self.tokenizer.decode(ids[:count], skip_special_tokens=True))

        before = 0
        before = len(text) - length(len(ids))

        cuts = [place for tag in ("<answer>", "</think>") if (place := text.find(tag)) >= 0]
        kept = ids[
            : bisect_right(range(len(ids) + 1), min(cuts, default=len(text)), key=length) - 1
        ]
        tip = self.tokenizer.encode(self.tips_prompt, add_special_tokens=False)
        infer_request.messages[-1]["content"] = text[: length(len(kept))] + self.tips_prompt
        return {
            "infer_request": infer_request,
            "response_token_ids": [*kept, *tip],
            "response_loss_mask": [1] * len(kept) + [0] * len(tip),
        }


class MathEnv(Env):
    """The column `problem` (or the row's last message), and further tries; a right one, in whatever turn, earns 1."""

    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        self.solution = config.data_dict["solution"]
        self.acc_func = MathAccuracy()
        system = "Think inside <think> </think>, then answer inside <answer> </answer>."
        return config.data_dict.get("problem") or config.messages[-1]["content"], {}, system

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        [correct] = self.acc_func([action[-1]["content"]], [self.solution])
        return _AGAIN, float(correct == 1), correct == 1, {}

    async def close(self) -> None: ...


multi_turns |= {
    "math_tip_trick": MathTipsScheduler,
    "thinking_tips_scheduler": ThinkingModelTipsScheduler,
}
envs["math_env"] = MathEnv
