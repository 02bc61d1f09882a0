"""A round's completions: groups that others take the place of, and the prompts that those come from."""

import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import torch

from swift_r1.algorithms.rewards import Composition
from swift_r1.data.prompts import Prompt
from swift_r1.data.sampler import PromptSampler
from swift_r1.flags.agents import EnvironmentArguments
from swift_r1.record.episodes import EpisodeCall
from swift_r1.record.recorded import WholeCompletion, row_columns
from swift_r1.rewards.batch import join_batches
from swift_r1.rewards.types import InvalidReward, RewardColumn
from swift_r1.rollout.prompts import PromptStream
from swift_r1.rollout.rounds import silent_groups
from swift_r1.rollout.scoring import Grading, Scoring, completion_row, outcomes_of
from swift_r1.rollout.trajectory import TokenSequence, Trajectory
from swift_r1.rollout.turn_credit import turn_credit
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.grpo import batch_of_round
from swift_r1.training.recorded import _trajectory

ALONE = Ranks(0, 1, torch.device("cpu"), None)


def scores(values, first_group, name="a", by_turns=False):
    """Scores of two groups of two, with a reward that fails on the last completion."""
    prompts = [
        Prompt(f"p{first_group + i}", "d", (), "", (1,), {}, row=100 + first_group + i)
        for i in (0, 1)
    ]
    groups = [
        [
            Trajectory(
                f"r{first_group + i}",
                prompt,
                (TokenSequence(prompt.token_ids, (2,), (-1.0,), (True,), ((0, 1),)),),
                ((2,),),
                [],
                "2",
                "stop",
            )
        ]
        * 2
        for i, prompt in enumerate(prompts)
    ]

    class Batch:
        def __init__(self):
            self.parts = {}

        def add(self, first, part):
            self.parts[first] = part

        def result(self):
            return join_batches([self.parts[0], self.parts[1]], {}), [
                RewardColumn(name, tuple(values), (InvalidReward(3, "broke"),), 1.0)
            ]

    ids = [group[0].request_id for group in groups]
    grading = Grading(lambda _state: Batch(), Composition((1.0,)), by_turns)
    scoring = Scoring(prompts, ids, {"": grading}, {}, first_group)
    for group in reversed(groups):
        scoring.add(group)
    return scoring.result()


def test_fresh_groups_take_the_places_of_those_without_signal():
    first, fresh = scores([1.0, 1.0, 0.0, 1.0], 0), scores([0.0, 1.0, 5.0, 6.0], 2)
    scored = first.with_groups_replaced([0], fresh, 2)
    assert [item.group for item in scored.trained] == [2, 2, 1, 1]
    assert [item.reward for item in scored.trained] == [0.0, 1.0, 0.0, 1.0]
    assert [item.group for item in scored.dropped] == [0, 0]
    assert [completion_row(item, 1)["number"] for item in scored.generated] == [0, 1, 0, 1, 0, 1]
    dropped = scored.dropped[0]
    assert completion_row(dropped, 1)["tokens"] == len(dropped.sequences[0].token_ids)
    assert completion_row(dropped, 1, dropped=True)["dropped"] is True
    assert "dropped" not in completion_row(scored.trained[0], 1)
    (column,) = scored.columns()
    assert column.values == (1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 5.0, 6.0)
    assert [item.index for item in column.invalid] == [3, 7] and column.seconds == 2.0


def credits(**flags):
    """Flags of a run whose turns have advantages of their own."""
    own = {"credits_turns": True, "advantage_estimator": "grpo", "scale_rewards": "none"}
    gigpo = {"gigpo_step_advantage_weight": 2.0, "gigpo_gamma": 0.5}
    return SimpleNamespace(**own | gigpo | flags)


def test_rewards_of_turns_are_signal_too():
    def with_turns(per_episode):
        scored = scores([1.0, 1.0, 0.0, 0.0], 0)
        infos = [{"turn_rewards": turns} for turns in per_episode]
        trained = [
            replace(item, turns=[(2,)] * len(own or ()))
            for item, own in zip(scored.trained, per_episode, strict=True)
        ]
        scored = replace(scored, trained=trained)
        pairs = zip(scored.trained, infos, strict=True)
        return replace(
            scored,
            trained=[replace(item, infos=own) for item, own in pairs],
        )

    scored = with_turns([[0.0, 1.0], None, [2.0], [2.0]])
    credit = turn_credit(scored.trained, credits())
    assert credit is not None and [len(one) for one in credit] == [2, 0, 1, 1]
    assert silent_groups(scored, 2) == [0, 1] and silent_groups(scored, 2, credit) == [1]
    nothing = with_turns([None] * 4)
    assert silent_groups(nothing, 2, turn_credit(nothing.trained, credits())) == [0, 1]
    assert turn_credit(nothing.trained, credits(credits_turns=False)) is None


def test_turns_of_equal_states_are_compared_with_and_without_rewards_of_their_own():
    """GiGPO; an episode whose turns nobody rewarded has its reward in the last one."""

    def episode(item, *texts):
        messages = []
        for text in texts:
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "go"}]
        calls = [
            EpisodeCall("new", turn - 1 if turn else None, 0, 2 * turn + 1, 1, 1, "stop")
            for turn in range(len(texts))
        ]
        return replace(item, messages=messages, calls=calls, turns=[(2,)] * len(texts))

    trained = scores([1.0, 0.0, 1.0, math.nan], 0).trained  # the last one is invalid
    found = turn_credit(
        [
            episode(trained[0], "start", "door"),
            episode(trained[1], "start", "wall", "door"),
            episode(trained[2], "start"),
            episode(trained[3], "start"),
        ],
        credits(advantage_estimator="gigpo"),
    )
    # returns 0.5, 1 and 0, 0, 0; "start" and "door" have come twice, "wall" once; twice the difference from the mean
    assert found == [[0.5, 1.0], [-0.5, 0.0, -1.0], [0.0], []]
    given = replace(episode(trained[0], "start", "door"), infos={"turn_rewards": [3.0, 0.0]})
    found = turn_credit(
        [given, episode(trained[1], "start"), *trained[2:]], credits(advantage_estimator="gigpo")
    )
    assert found is not None and found[:2] == [[3.0, 0.0], [-3.0]]


def test_a_recorded_conversation_has_its_turns_again():
    """So a replay compares turns as the run did."""
    ids, prompt = [5, 6, 7, 8, 9], [1, 2, 3]
    whole = WholeCompletion("d:1", "r", 0, prompt, ids, [True] * 5, [0.0] * 5, [0.0] * 5)
    calls = [
        EpisodeCall("new", None, 0, 1, 3, 2, "stop"),
        EpisodeCall("extends", 0, 0, 3, 7, 1, "stop"),
    ]
    said = [{"role": role, "content": role} for role in ("user", "assistant")] * 2
    row = {
        "prompt": "p",
        "completion": "c",
        "finish_reason": "stop",
        "weight_version": 1,
        "turns": 2,
    }
    row |= {"messages": said, "calls": list(map(asdict, calls)), "turn_rewards": [0.5, 1.0]}
    found = _trajectory(whole, row)
    assert list(found.sequences[0].turns) == [0, 0, -1, -1, 1]
    assert found.calls == calls and found.turn_rewards == [0.5, 1.0]
    older = _trajectory(
        whole, {name: row[name] for name in row if name not in ("calls", "turn_rewards")}
    )
    assert older.sequences[0].turns == () and older.turn_rewards == ()


def test_a_reward_that_is_the_sum_of_its_turns_counts_once():
    """What it says of an episode is in the advantages of its turns already; another function's stays."""
    values = [3.0, 1.0, 0.0, math.nan]
    for name, outcomes in (("agent_reward", [0.0, 0.0, 0.0]), ("right", values[:3])):
        scored = scores(values, 0, name, by_turns=True)
        trained = scored.trained
        assert (
            [item.reward for item in trained[:3]]
            == [item.objective for item in trained[:3]]
            == values[:3]
        )
        assert [item.outcome for item in trained[:3]] == outcomes and math.isnan(trained[3].outcome)
        assert batch_of_round(scored, ALONE, credit=[[]] * 4).rewards[:3].tolist() == outcomes
    assert [item.outcome for item in scores(values, 0, "agent_reward").trained[:3]] == values[:3]
    flags = {"env": "gymnasium:FrozenLake-v1", "advantage_per": "turn"}
    assert EnvironmentArguments(**flags).counts_by_turns
    assert not EnvironmentArguments(**flags | {"advantage_per": "episode"}).counts_by_turns
    assert not EnvironmentArguments(**flags | {"env": "verifiers:reverse-text"}).counts_by_turns


def test_a_column_of_the_data_is_not_taken_for_a_field():
    """Nor for one that only other lines have."""
    columns = {
        "turns": 3,
        "entropy": "high",
        "messages": "m",
        "step": 1,
        "solution": "4",
        "rewards/a": 7,
    }
    item = scores([1.0, 1.0, 0.0, 1.0], 0).trained[0]
    prompt = replace(item.prompt, columns=columns)
    row = completion_row(replace(item, prompt=prompt), 5)
    assert row["step"] == 5 and not row.keys() & {"turns", "entropy", "messages"}
    assert row["solution"] == "4" and row_columns(row) == columns


def test_an_invalid_reward_is_not_taken_for_no_opinion():
    item = scores([1.0, 1.0, 0.0, 1.0], 0).trained[0]
    rewards = {"first": math.nan, "second": None, "third": 0.5}
    row = completion_row(replace(item, rewards=rewards), 1)
    assert row["invalid"] == ["first"]
    assert "invalid" not in completion_row(item, 1)


def test_what_a_sampler_is_told_of_a_round():
    first, fresh = scores([1.0, 1.0, 0.0, math.nan], 0), scores([0.0, 1.0, 5.0, math.nan], 2)
    scored = first.with_groups_replaced([0], fresh, 2).with_advantages(
        [-1.0, 1.0, 0.0, 0.0], None, None
    )
    told = outcomes_of(scored, 7)
    assert [one.row for one in told] == [102, 101, 100]
    assert [
        (one.reward, one.pass_rate, one.has_signal, one.gradient_share, one.step) for one in told
    ] == [
        (0.5, 0.5, True, 1.0, 7),
        (0.0, 0.0, False, 0.0, 7),
        (1.0, 1.0, False, 0.0, 7),
    ]


class Numbered:
    """Stands for the encoder: the prompt of a number has it as a column."""

    def encode(self, row):
        return Prompt(f"numbers:{row['number']}", "numbers", (), "", (), {"number": row["number"]})


def test_prompts_come_in_order_whatever_is_taken():
    rows = [{"number": row} for row in range(10)]
    stream = PromptStream(rows, Numbered(), PromptSampler(10, 4, shuffle=False))
    taken = [stream.take(count) for count in (4, 1, 4, 3, 6)]
    assert [len(part) for part in taken] == [4, 1, 4, 3, 6]
    prompts = [prompt for part in taken for prompt in part]
    assert [prompt.columns["number"] for prompt in prompts] == [n % 10 for n in range(18)]
