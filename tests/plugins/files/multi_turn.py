"""A scheduler of several turns: it asks again until the answer is there."""

from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
from swift.rollout import MultiTurnScheduler, RolloutScheduler, multi_turns


class AskAgain(MultiTurnScheduler):
    """Says "again" until the model writes an answer tag."""

    def check_finished(self, infer_request, response_choice, current_turn):
        if "<answer>" in infer_request.messages[-1]["content"]:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "again"})
        return {"infer_request": infer_request}


multi_turns["ask_again"] = AskAgain
