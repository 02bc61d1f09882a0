"""How old completions are, and what the loss makes of it."""

import pytest

from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.rewards import from_flags
from swift_r1.data.prompts import Prompt
from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.rollout.staleness import ServedVersions, oldest_rounds, staleness_metrics
from swift_r1.rollout.trajectory import TokenSequence, spans_of
from swift_r1.wire.protocol import Completion, versions_of_tokens

PROMPT = Prompt("data:0", "data", (), "a", (1,), {})


def completion(length: int, version: int, **more: object) -> Completion:
    return Completion(
        token_ids=(1,) * length,
        logprobs=(0.0,) * length,
        finish_reason="stop",
        weight_version=version,
        **more,
    )


@pytest.fixture
def served() -> ServedVersions:
    """A server that had served another run: versions 11, 12 (a repair of 11), 13 and 20 (after a restart)."""
    made = ServedVersions()
    for version, rounds in ((11, 0), (12, 0), (13, 1), (20, 2)):
        made.rounds = rounds
        made.pushing(version)
    return made


def test_age_is_counted_in_rounds_and_by_token(served: ServedVersions) -> None:
    several = completion(10, 12, weight_versions=((0, 12), (4, 13), (7, 20)))
    sequences = [TokenSequence.of_completion(PROMPT, one) for one in (several, completion(10, 13))]
    metrics = staleness_metrics(sequences, 3, served)
    assert metrics == {
        "rollout/staleness/mean": (4 * 3 + 3 * 2 + 3 * 1 + 10 * 2) / 20,
        "rollout/staleness/max": 3.0,
    }
    assert (sequences[0].oldest_version, sequences[0].newest_version) == (12, 20)
    assert oldest_rounds([20, 12], served) == 0
    assert 12 in served and 14 not in served


def test_versions_of_turns_join_to_those_of_the_trajectory() -> None:
    turn = completion(5, 1, weight_versions=((0, 1), (3, 2)))
    assert versions_of_tokens(turn.version_spans, 5) == [1, 1, 1, 2, 2]
    assert versions_of_tokens(completion(2, 7).version_spans, 2) == [7, 7]
    assert versions_of_tokens(completion(0, 7).version_spans, 0) == []
    # Tokens of the environment between two turns belong to the turn before them.
    assert spans_of([1, 1, None, 1, 2, None, None, 2, 3]) == ((0, 1), (4, 2), (8, 3))
    assert spans_of([None, 4]) == ((0, 4),)


def test_older_completions_are_corrected_for() -> None:
    words = "--rlhf_type grpo --model m --dataset a.jsonl --reward_funcs format --use_vllm true --vllm_server_host h"
    for more, mode in (
        ("--async_generate true", "token_truncate"),
        ("--async_generate true --rollout_importance_sampling_mode sequence_mask", "sequence_mask"),
        ("--async_generate true --max_staleness 0", None),
        ("", None),
    ):
        args = parse_arguments(RlhfArguments, [*words.split(), *more.split()])
        assert from_flags(LossConfig, args).rollout_importance_sampling_mode == mode
