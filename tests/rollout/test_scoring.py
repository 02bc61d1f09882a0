"""Rewards are computed while other prompts are still generated, and are the same as if all had been there at once."""

from __future__ import annotations

import math
import random
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_r1.algorithms.rewards import Composition
from swift_r1.data.prompts import Prompt
from swift_r1.plugins import load_plugins
from swift_r1.rewards.pool import rewards_for
from swift_r1.rollout.base import GroupRequest
from swift_r1.rollout.multi_turn import SingleTurn
from swift_r1.rollout.scoring import Grading, Scoring, reward_metrics
from swift_r1.wire.protocol import Completion, RolloutOutput, RolloutRequest, SamplingParams

DEADLINE = 120.0  # seconds; only a failure takes them

PLUGIN = """
from pathlib import Path
from swift.rewards import orms


def leaves_a_note(completions, note, **kwargs):
    for path in note:
        Path(path).touch()
    return [float(len(text)) for text in completions]


def moody(completions, **kwargs):
    if any(text == "[7]" for text in completions):
        raise ValueError("seven")
    return [float("nan") if text == "[3]" else len(set(completions)) + float(text[1:-1]) for text in completions]


orms["leaves_a_note"] = leaves_a_note
orms["moody"] = moody
"""


def loading(plugin: Path) -> partial:
    """What loads the plugin in a worker."""
    return partial(load_plugins, [str(plugin)])


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plugins") / "rewards.py"
    path.write_text(PLUGIN)
    return path


def args(**others: object) -> SimpleNamespace:
    limits = {
        "reward_timeout": 10.0,
        "reward_num_workers": 1,
        "reward_memory_limit": 2.0,
        "reward_env": [],
    }
    return SimpleNamespace(**limits | {"reward_isolation": "process"} | others)


def prompts(count: int, **columns: str) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=f"p{i}", dataset="d", token_ids=(i,), messages=(), text="", columns=columns
        )
        for i in range(count)
    ]


def scoring(asked: list[Prompt], rewards, names: int = 1) -> Scoring:
    ids = [f"r{i}" for i in range(len(asked))]
    grading = Grading(rewards.open, Composition((1.0,) * names))
    return Scoring(asked, ids, {"": grading}, {"s": 1})


class Answered:
    """A `Generator` that answers with outputs there are already, or hands on what `generate` is given."""

    def __init__(self, *outputs: RolloutOutput, generate: Any = None) -> None:
        self.outputs, self._generate = outputs, generate

    def generate(self, requests: Any, on_done: Any, on_output: Any, images: Any) -> None:
        if self._generate is not None:
            self._generate(requests, on_output)
        for one in self.outputs:
            on_output(one)


def play(asked: list[Prompt], running: Scoring, generator: Answered, requests: Any = None) -> None:
    """Has the prompts answered in one turn and scored."""
    requests = requests or [
        SimpleNamespace(request_id=f"r{i}", routes=None) for i in range(len(asked))
    ]
    turns = SingleTurn(generator, lambda tokens: str(list(tokens)))
    groups = [GroupRequest(*pair) for pair in zip(asked, requests, strict=True)]
    turns.generate(groups, lambda _count: None, running.add)


def output(number: int, *tokens: int) -> RolloutOutput:
    completions = tuple(
        Completion(
            token_ids=(token,),
            logprobs=(-1.0,),
            finish_reason="length" if token == 5 else "stop",
            weight_version=1,
        )
        for token in tokens
    )
    return RolloutOutput(request_id=f"r{number}", completions=completions)


def wait_for(path: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not path.exists():
        assert time.monotonic() < end, "no reward was called while the second prompt was generated"
        time.sleep(0.01)


def test_the_embedded_engine_goes_on_while_rewards_are_computed(
    tiny_model: Path, plugin: Path, tmp_path: Path
) -> None:
    """The model does not start on the second prompt before a reward was called with the first one's completions."""
    from transformers import AutoModelForCausalLM

    from swift_r1.serving.engines.transformers import TransformersEngine

    note = tmp_path / "called"
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    engine = TransformersEngine(model, None, [2], 0)  # type: ignore[arg-type]
    # Different sampling: the two are not decoded together.
    asked = [
        RolloutRequest(
            request_id=f"r{number}",
            prompt_token_ids=(1, 20, 31),
            n=2,
            seeds=(1, 2),
            sampling=SamplingParams(max_tokens=8, temperature=1.0 + number),
        )
        for number in range(2)
    ]
    ended: list[int] = []

    def before_forward(_module: object, _arguments: object) -> None:
        if ended:
            wait_for(note)

    model.base_model.register_forward_pre_hook(before_forward)
    with rewards_for(args(), ["leaves_a_note"], loading(plugin)) as rewards:
        rewards.wait_ready()
        rows = prompts(2, note=str(note))
        running = scoring(rows, rewards)

        def generate(asked: list[RolloutRequest], on_output: Any) -> None:
            def take(number: int, finished: RolloutOutput) -> None:
                ended.append(number)
                on_output(finished)

            engine.generate(asked, 0, on_output=take)

        play(rows, running, Answered(generate=generate), asked)
        scores = running.result()
    assert ended == [0, 1]
    assert [item.reward for item in scores.trained] == [
        float(len(item.text)) for item in scores.trained
    ]


@pytest.mark.parametrize("isolation", ["process", "inline"])
def test_the_order_in_which_completions_come_does_not_matter(plugin: Path, isolation: str) -> None:
    """Values, causes, metrics and rows of whole rounds: those of one call with everything."""
    chance = random.Random(1)
    outputs = [output(number, *(chance.randrange(9) for _ in range(4))) for number in range(12)]
    assert {
        token for one in outputs for completion in one.completions for token in completion.token_ids
    } >= {3, 5, 7}
    asked = prompts(12, note="/dev/null")
    with rewards_for(
        args(reward_isolation=isolation), ["moody", "leaves_a_note"], loading(plugin)
    ) as rewards:
        rewards.wait_ready()
        whole = scoring(asked, rewards, 2)
        play(asked, whole, Answered(*outputs))
        expected = whole.result()
        [(_, batch, _)] = expected.calls
        at_once = rewards.score(batch)
        mixed = scoring(asked, rewards, 2)
        play(asked, mixed, Answered(*chance.sample(outputs, 12)))
        found = mixed.result()
    assert found.calls[0].batch == batch and batch.trainer_state == {"s": 1}
    for one, other, third in zip(found.columns(), expected.columns(), at_once, strict=True):
        assert one.seconds > 0 and repr(one.values) == repr(other.values) == repr(third.values)
        assert one.invalid == other.invalid == third.invalid
    assert {bad.kind for bad in found.columns()[0].invalid} == {"value", "exception"}
    assert [repr(item) for item in found.trained] == [repr(item) for item in expected.trained]
    metrics = [reward_metrics(scores.trained, []) for scores in (found, expected)]
    assert repr(metrics[0]) == repr(metrics[1]) and not math.isnan(metrics[0]["reward"])
