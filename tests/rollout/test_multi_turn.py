"""Trajectories of several turns from a real engine to the trainer's log-probs."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch

from swift_r1.data.prompts import PromptEncoder, Wording
from swift_r1.errors import RunFailed
from swift_r1.models.loading import load_model
from swift_r1.plugins import load_plugins
from swift_r1.plugins.protocol import RequestConfig, RolloutOutput
from swift_r1.plugins.rollouts import (
    GymScheduler,
    MultiTurnScheduler,
    RolloutScheduler,
    multi_turns,
)
from swift_r1.plugins.schedulers import MathTipsScheduler, ThinkingModelTipsScheduler
from swift_r1.rollout.base import EmbeddedRollouts
from swift_r1.rollout.multi_turn import BatchedTurns
from swift_r1.rollout.schedulers import Limits, SchedulerRunner
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, collate, round_batch, split_step
from swift_r1.training.micro_batches import Form
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.protocol import RolloutRequest, SamplingParams

FILES = Path(__file__).parent.parent / "plugins" / "files"
RANKS = Ranks(0, 1, torch.device("cpu"), None)


class HalfOfATurn(MultiTurnScheduler):
    """Three turns; of the first, only the second half is trained, the second gets two words more."""

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn == 3

    def step(self, infer_request, response_choice, current_turn):
        ids = response_choice.token_ids
        if current_turn == 1:
            said = [
                {"type": "text", "text": "more of "},
                {"type": "text", "text": infer_request.data_dict["what"]},
            ]
            infer_request.messages.append({"role": "user", "content": said})
            return {
                "infer_request": infer_request,
                "response_loss_mask": [int(i >= len(ids) // 2) for i in range(len(ids))],
            }
        tip = self.tokenizer(" a tip", add_special_tokens=False)["input_ids"]
        infer_request.messages[-1]["content"] += " a tip"
        return {"infer_request": infer_request, "response_token_ids": [*ids[:2], *tip]}


def row(conversation):
    """Its only one."""
    [found] = conversation.sequences
    return found


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def rollouts(tiny_model, tokenizer):
    backend = LocalBackend(
        load_model(tiny_model, "float32", False), OptimizerConfig(0, 0, 0.9, 0.999, 1e-8, 1)
    )
    engine = TransformersEngine(
        backend.model, tokenizer, [tokenizer.eos_token_id], tokenizer.pad_token_id
    )
    return EmbeddedRollouts(engine, backend, RANKS)


@pytest.fixture
def play(rollouts, tokenizer):
    """`play(scheduler class, n=4, max_tokens=8, timeout=20, **limits) -> trajectories` of two prompts."""
    runners = []

    def run(
        kind,
        n=4,
        max_tokens=8,
        timeout=20.0,
        model_length=1024,
        total=False,
        turns=None,
        prefix="",
        last=False,
        **more,
    ):
        encoder = PromptEncoder(tokenizer, wording=Wording(response_prefix=prefix))
        limits = Limits(model_length, total, turns, 1.0, **more)

        def make_scheduler(engine):
            return kind(infer_engine=engine, max_turns=turns, tokenizer=tokenizer)

        runner = SchedulerRunner(
            "test", timeout, make_scheduler, encoder, (tokenizer.eos_token_id,), limits, last
        )
        runners.append(runner)
        rows = [
            {
                "messages": [{"role": "user", "content": f"say {what}"}],
                "what": what,
                "number": 7,
                "solution": "1",
                "prompt_id": what,
                "dataset": "d",
            }
            for what in ("one", "fourteen")
        ]
        prompts = [encoder.encode(row) for row in rows]
        requests = [
            RolloutRequest(
                request_id=prompt.prompt_id,
                prompt_token_ids=prompt.token_ids,
                n=n,
                seeds=tuple(range(n)),
                sampling=SamplingParams(max_tokens=max_tokens),
            )
            for prompt in prompts
        ]
        done = []
        given = []
        BatchedTurns(rollouts, RANKS, {"": runner}, str).generate(
            list(zip(prompts, requests, strict=True)), done.append, given.append
        )
        assert sum(done) == 2 * n
        given.sort(key=lambda group: group[0].request_id, reverse=True)
        assert [[talk.request_id for talk in group] for group in given] == [
            ["one"] * n,
            ["fourteen"] * n,
        ]
        return [talk for group in given for talk in group]

    yield run
    for runner in runners:
        runner.close()
        assert runner.loop.is_closed()


def batch_of(played):
    return round_batch([row(one) for one in played], [0.0] * len(played))


@pytest.mark.parametrize("form", [Form(), Form(packed=True), Form(packed=True, shared=True)])
def test_the_trainer_computes_the_engines_logprobs_of_the_trained_tokens(
    play, rollouts, tokenizer, form
):
    played = play(HalfOfATurn)
    micro = collate(batch_of(played), [tuple(range(4)), tuple(range(4, 8))], form, RANKS.device)
    logps = micro.unflatten(rollouts.backend.logprobs(micro.inputs, 1.0).logps)
    assert micro.mask.sum(1).tolist() == [sum(row(one).loss_mask) for one in played]
    torch.testing.assert_close(logps, micro.rollout_logps, rtol=0, atol=1e-4)
    for one in played:
        text = tokenizer.decode(row(one).token_ids)
        assert (
            f"<|im_start|>user\nmore of {one.prompt.columns['what']}<|im_end|>\n<|im_start|>assistant\n"
            in text
        )
        assert " a tip" in text and " a tip" not in tokenizer.decode(
            [
                token
                for token, trained in zip(row(one).token_ids, row(one).loss_mask, strict=True)
                if trained
            ]
        )
        assert len(one.turns) == 3 and one.infos == {"num_turns": 3}
        assert [message["role"] for message in one.messages] == [
            "user",
            "assistant",
            "user",
            "assistant",
        ]


@pytest.mark.parametrize("prefix", ["", "<think>"])
@pytest.mark.parametrize("kind", [MathTipsScheduler, ThinkingModelTipsScheduler])
def test_a_wrong_answer_gets_one_more_chance(play, tokenizer, kind, prefix):
    def judge(completions, solution):
        assert solution == ["1"]
        return [float("9" in completions[0])]

    # some end by themselves
    played = play(partial(kind, acc_function=judge), n=8, max_tokens=100, prefix=prefix)
    chances = [len(one.turns) == 2 for one in played]
    assert True in chances and False in chances
    for one, chance in zip(played, chances, strict=True):
        said = [message["content"] for message in one.messages if message["role"] == "assistant"]
        assert all(text.startswith(prefix) for text in said)
        trained = [t for t, own in zip(row(one).token_ids, row(one).loss_mask, strict=True) if own]
        assert chance or "9" in said[0] or one.finish_reason == "length"
        if chance and kind is MathTipsScheduler:
            [text] = said
            before, after = text.split(kind.tips_prompt)
            assert "</think>" not in before and "<answer>" not in before
            assert prefix + tokenizer.decode(trained, skip_special_tokens=True) == before + after
        elif chance:
            assert [message["role"] for message in one.messages] == [
                "user",
                "assistant",
                "user",
                "assistant",
            ]
            assert one.messages[2]["content"] == kind.tips_prompt


def test_last_round_trains_the_last_message_alone(play, tokenizer):
    for all_of_it, one in zip(play(HalfOfATurn), play(HalfOfATurn, last=True), strict=True):
        assert row(one).token_ids == row(all_of_it).token_ids
        # two turns make the last message
        start = len(row(one).loss_mask) - sum(map(len, one.turns[1:]))
        assert any(row(all_of_it).loss_mask[:start]) and not any(row(one).loss_mask[:start])
        assert row(one).loss_mask[start:] == row(all_of_it).loss_mask[start:] and any(
            row(one).loss_mask
        )


def test_the_same_seeds_give_the_same_trajectories(play):
    first, again = play(HalfOfATurn), play(HalfOfATurn)
    assert [row(one).token_ids for one in first] == [row(one).token_ids for one in again]
    assert len({row(one).token_ids for one in first}) == len(first)


def test_a_response_prefix_begins_every_turn_and_is_not_trained(play, tokenizer):
    for one in play(HalfOfATurn, prefix="<think>"):
        assert one.prompt.text.endswith("assistant\n<think>")
        said = [message["content"] for message in one.messages if message["role"] == "assistant"]
        assert len(said) == 2 and all(text.startswith("<think>") for text in said)
        written = "".join(tokenizer.decode(ids) for ids in one.turns[1:])
        assert said[1].count("<think>") == 1 + written.count("<think>")
        assert one.text == said[1]
        begins = tokenizer("<|im_start|>assistant\n<think>", add_special_tokens=False)["input_ids"]
        windows = [slice(place, place + len(begins)) for place in range(len(row(one).token_ids))]
        places = [
            at
            for at in windows
            if list(row(one).token_ids[at]) == begins and not any(row(one).loss_mask[at])
        ]
        assert len(places) == 1  # of the second turn; the third goes on with it


class OwnPrompt(RolloutScheduler):
    """Begins with a prompt of its own, another for every second trajectory."""

    async def run(self, infer_request, request_config, **kwargs):
        odd = int(infer_request.uuid.rpartition("/")[2]) % 2
        infer_request.messages = [{"role": "user", "content": f"odd {odd}"}]
        response = await self.infer_engine.infer_async(infer_request, RequestConfig(max_tokens=3))
        said = response.choices[0]
        assert response.usage.completion_tokens == len(said.token_ids) <= 3
        assert len(said.logprobs["content"]) == len(said.token_ids)
        infer_request.messages.append({"role": "assistant", "content": said.message.content})
        masks = [[0] * (len(said.token_ids) - 1) + [1]]
        return RolloutOutput(
            response, infer_request.messages, [said.token_ids], masks, {"odd": odd}
        )


def test_prompts_are_shared_only_where_they_are_the_same(play, rollouts):
    played = play(OwnPrompt)
    assert all(one.prompt.text.count(f"odd {one.infos['odd']}") == 1 for one in played)
    assert [sum(row(one).loss_mask) for one in played] == [1] * 8
    batch = batch_of(played)
    cut = Batching(Form(), completions=8, group_size=4, share_from=0.0)
    for micro in split_step(batch, range(8), cut, RANKS):
        logps = micro.unflatten(rollouts.backend.logprobs(micro.inputs, 1.0).logps)
        torch.testing.assert_close(logps, micro.rollout_logps, rtol=0, atol=1e-4)


class Borrowed(HalfOfATurn):
    """What ms-swift's schedulers reach for: the engine's tokenizer, flat ids, a dummy turn, an edited last message."""

    def step(self, infer_request, response_choice, current_turn):
        assert len(self._extract_logprobs_from_choice(response_choice)) == len(
            response_choice.token_ids
        )
        assert self.engine.default_template.tokenizer is self.engine.tokenizer is self.tokenizer
        if current_turn == 1:
            infer_request.messages.append({"role": "assistant", "content": None})
        else:
            infer_request.messages.append({"role": "user", "content": "on"})
        return {"infer_request": infer_request}

    async def run(self, infer_request, request_config, **kwargs):
        output = await super().run(infer_request, request_config, **kwargs)
        output.messages[-1]["content"] = "edited"
        return output


def test_what_schedulers_of_ms_swift_reach_for(play):
    for one in play(Borrowed):
        assert [message["role"] for message in one.messages] == [
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert one.text == "edited" and len(one.turns) == 3
    assert RolloutOutput(None, response_token_ids=[1, 2]).response_token_ids == [[1, 2]]


class Hooks(HalfOfATurn):
    """Version 4.6's hooks: another question at the start, and the end after the second turn."""

    async def on_trajectory_start(self, requests):
        (request,) = requests
        request.messages[-1]["content"] = "another question"

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        assert infer_request.messages[-1]["content"] == response_choice.message.content
        return {
            "done": current_turn == 2,
            "rollout_infos": {f"seen {current_turn}": len(infer_request.messages)},
        }

    def check_finished(self, infer_request, response_choice, current_turn):
        raise AssertionError("done decides")


def test_hooks_around_turns(play):
    for one in play(Hooks):
        assert (
            one.messages[0]["content"] == "another question"
            and "another question" in one.prompt.text
        )
        assert one.infos == {"num_turns": 2, "seen 1": 2, "seen 2": 4}


class Endless(HalfOfATurn):
    def check_finished(self, infer_request, response_choice, current_turn):
        return not response_choice.token_ids  # no room

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "on"})
        return {"infer_request": infer_request}


@pytest.mark.parametrize(
    ("limits", "longest", "with_prompt", "limit"),
    [
        ({"total": True, "max_tokens": 90}, 90, False, "tokens"),
        ({"model_length": 150, "max_tokens": 40}, 150, True, "length"),
    ],
    ids=["all turns together", "the engine's context"],
)
def test_a_trajectory_ends_where_no_more_tokens_fit(play, limits, longest, with_prompt, limit):
    played = play(Endless, **limits)
    assert {one.limit for one in played} == {limit}
    lengths = [len(row(one).token_ids) + with_prompt * len(one.prompt.token_ids) for one in played]
    assert max(lengths) <= longest
    assert all(one.finish_reason == "length" and row(one).loss_mask[-1] for one in played)
    assert any(len(one.turns) > 1 for one in played)
    for one in played:
        assert one.messages[-1]["role"] == "assistant" and one.messages[-1]["content"] == one.text
        assert one.infos["num_turns"] == len(one.turns)


@pytest.mark.parametrize(
    ("limits", "turns", "limit"),
    [({"seconds": 1e-9}, 1, "seconds"), ({"turns": 3}, 3, "calls")],
)
def test_a_trajectory_ends_at_its_limit_and_says_so(play, limits, turns, limit):
    for one in play(Endless, **limits):
        assert (len(one.turns), one.limit) == (turns, limit)
        assert one.messages[-1] == {"role": "assistant", "content": one.text}
        assert (one.finish_reason == "length") >= (limit != "calls")


def test_a_plugin_files_scheduler_plays(play):
    load_plugins([str(FILES / "multi_turn.py")])
    played = play(multi_turns["ask_again"], n=8, max_tokens=150, turns=3)
    assert {len(one.turns) for one in played} <= {1, 2, 3} and any(
        len(one.turns) > 1 for one in played
    )
    for one in played:
        asked = [message["content"] for message in one.messages[2::2]]
        assert asked == ["again"] * (len(one.turns) - 1)


def test_a_plugin_files_environment_plays(play):
    load_plugins([str(FILES / "env.py")])
    played = play(partial(GymScheduler, gym_env="guess"), turns=2)
    for one in played:
        assert [message["content"] for message in one.messages[:2]] == [
            "You guess.",
            "Guess a number.",
        ]
        assert one.prompt.text.startswith("<|im_start|>system\nYou guess.<|im_end|>")
        assert len(one.turns) == 2 and one.messages[3] == {"role": "user", "content": "Wrong."}
        assert one.infos == {
            "num_turns": 2,
            "gym_done": False,
            "total_reward": 0.0,
            "step_rewards": [0.0, 0.0],
            "trajectory_info": [{}, {}, {}],
            "limit": "calls",
        }
        assert one.limit == "calls" and one.turn_rewards == [0.0, 0.0]
    with pytest.raises(RunFailed, match="3 messages were there, now 2: the past cannot change"):
        play(partial(GymScheduler, gym_env="guess", context_manager="last_turns"), turns=3)
    with pytest.raises(
        RunFailed, match=r"there is no environment 'gess' .*registered are: .*guess"
    ):
        play(partial(GymScheduler, gym_env="gess"))


class Twice(HalfOfATurn):
    async def run(self, infer_request, request_config, **kwargs):
        await asyncio.gather(
            *(self.infer_engine.infer_async(infer_request, request_config) for _ in range(2))
        )


class Hotter(HalfOfATurn):
    async def run(self, infer_request, request_config, **kwargs):
        await self.infer_engine.infer_async(infer_request, RequestConfig(temperature=2.0))


class Silent(RolloutScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        return RolloutOutput(None)


class Shows(HalfOfATurn):
    async def run(self, infer_request, request_config, **kwargs):
        infer_request.messages = [{"role": "user", "content": [{"type": "image_url"}]}]
        return await super().run(infer_request, request_config)


class Leaves(RolloutScheduler):
    async def run(self, infer_request, request_config, **kwargs):
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Twice, "two turns of one trajectory were asked for at once"),
        (Hotter, "a scheduler cannot change temperature to 2.0"),
        (Silent, "the trajectory ended without a turn of the model"),
        (Shows, "the content of a user message has parts of image_url, and only text is read here"),
        (Leaves, r"it left with SystemExit\(3\)"),
    ],
)
def test_what_a_scheduler_must_not_do_is_said(play, kind, why):
    with pytest.raises(RunFailed, match=why):
        play(kind)


def test_a_scheduler_that_goes_beyond_max_turns_is_told(play):
    class Goes(Endless):
        async def run(self, infer_request, request_config, **kwargs):
            self.max_turns = None
            return await super().run(infer_request, request_config)

        def check_finished(self, *args):
            return False

    with pytest.raises(RunFailed, match="turn 3 was asked for, --max_turns is 2"):
        play(Goes, turns=2)
