"""Formulas against cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.lab.estimate import wire
from swift_r1.lab.estimate.chips import Chip, chip_of
from swift_r1.lab.estimate.job import sampling_seconds
from swift_r1.lab.estimate.model import Model, from_config
from swift_r1.lab.estimate.phases import (
    KERNELS,
    ServerRoofline,
    TrainerRoofline,
    at_once,
    decode_seconds,
    exchanged_bytes,
    generate_seconds,
    launches,
    least_train_seconds,
    logprob_seconds,
    train_seconds,
    training_flops,
)
from swift_r1.lab.estimate.wire import BYTES_PER_TOKEN, completion_bytes, push_seconds
from swift_r1.lab.estimate.work import GPU, Efficiency, Round, alive, lengths
from swift_r1.sync.writer import levels_of, parent_of
from tests.lab.estimate.conftest import SMALL

# 308 numbers without embedding and head (40), 2 layers, 8 numbers in the cache per token
MODEL = from_config(SMALL)
CHIP = Chip(
    "test", flops=1e6, bandwidth=1e3, memory=1e6, intra_node=100.0, inter_node=10.0, source=""
)
ALL = Efficiency(
    train=1.0,
    forward=1.0,
    decode=1.0,
    memory=1.0,
    layer_seconds=0.01,
    token_seconds=0.0,
    launch_seconds=0.0,
    push_seconds=0.0,
    link_seconds=0.0,
    network=1.0,
    exposed=0.0,
    gather_seconds=0.0,
)
SERVER = ServerRoofline(tensor_parallel=1, width=2, cache_width=2, cache_tokens=1e9, most=100)
TRAINER = TrainerRoofline(
    4, 8, None, micro_batches=3, width=2, passes=1, recomputes=False, trained=388
)
ROUND = Round(prompts=2, group=4, prompt_tokens=10, completion_tokens=20, longest=20)


@pytest.fixture(scope="module")
def model_h200() -> Model:
    """The kit's shape of Qwen2.5-0.5B (scripts/gpu/shapes.py)."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936}
    layers = {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    kind = {"model_type": "llama", "tie_word_embeddings": True, "dtype": "bfloat16"}
    return from_config(sizes | layers | kind)


def test_a_decoding_step() -> None:
    # Two completions at 10 positions: 348 numbers of 2 bytes, and a cache of 2 x 10 x 8 x 2, at 1,000 bytes/s;
    # 2 x (2 x 308 + 4 x 2 layers x width 4 x 10) + 2 x 2 x 40 = 2,032 FLOP take less; and 0.01 s a layer.
    assert decode_seconds(MODEL, CHIP, SERVER, ALL, 2, 10) == pytest.approx(
        (696 + 320) / 1e3 + 0.02
    )
    # With little arithmetic to be had that is the limit.
    slow = replace(CHIP, flops=1e3)
    assert decode_seconds(MODEL, slow, SERVER, ALL, 2, 10) == pytest.approx(2032 / 1e3 + 0.02)
    # Two devices halve that, and exchange twice a layer 2 x 1/2 of two hidden states of 4 numbers of 2 bytes.
    pair = replace(SERVER, tensor_parallel=2)
    exchanges = 2 * 2 * (2 * 0.5 * 2 * 4 * 2) / 100.0
    assert decode_seconds(MODEL, CHIP, pair, ALL, 2, 10) == pytest.approx(
        1.016 / 2 + 0.02 + exchanges
    )
    far = replace(pair, per_node=1)
    assert decode_seconds(MODEL, CHIP, far, ALL, 2, 10) == pytest.approx(
        1.016 / 2 + 0.02 + 10 * exchanges
    )


def test_what_the_host_does() -> None:
    """Its share of a decoding step is by token, and of training by kernel, whatever the GPU can do."""
    slow = replace(ALL, token_seconds=0.5)
    assert decode_seconds(MODEL, CHIP, SERVER, slow, 3, 10) == pytest.approx(
        decode_seconds(MODEL, CHIP, SERVER, ALL, 3, 10) + 1.5
    )
    fast = replace(CHIP, intra_node=1e9)
    # 3 micro-batches of 2 layers, a fourth more where layers are computed again
    assert launches(MODEL, TRAINER, ROUND) == KERNELS * 6
    assert launches(MODEL, replace(TRAINER, recomputes=True), ROUND) == KERNELS * 7.5
    bound = train_seconds(MODEL, fast, TRAINER, replace(ALL, launch_seconds=1.0), ROUND)
    assert bound == pytest.approx(KERNELS * 6 + 32 * 388 / 1e3, rel=1e-3)
    assert least_train_seconds(MODEL, CHIP, TRAINER, ALL, ROUND) == {}


def test_the_parts_of_a_step_as_an_h200_measured_them(model_h200: Model) -> None:
    """results/gpu: a 0.5B, 64 completions of 640 tokens in four micro-batches: 8,472 kernels, 0.265 s of the GPU of
    which 59 % were products, 0.394 s by the clock when there were 11,164."""
    round_ = Round(prompts=8, group=8, prompt_tokens=128, completion_tokens=512, longest=512)
    trainer = TrainerRoofline(1, 8, None, 4, 2.0, 0, False, model_h200.total)
    assert launches(model_h200, trainer, round_) == pytest.approx(8472, rel=0.01)
    least = least_train_seconds(model_h200, chip_of("h200"), trainer, GPU, round_)
    assert least["products"] == pytest.approx(0.59 * 0.265, rel=0.05)
    assert 0.75 * 0.265 < least["products"] + least["memory"] < 0.265
    assert 11_164 * GPU.launch_seconds == pytest.approx(0.394, rel=0.02)
    assert train_seconds(model_h200, chip_of("h200"), trainer, GPU, round_) == pytest.approx(
        0.394, rel=0.15
    )
    server = ServerRoofline(1, 2.0, 2.0, 1e9, 1024)
    for batch, measured in ((64, 16_417), (256, 24_513), (1024, 19_483)):
        step = decode_seconds(model_h200, chip_of("h200"), server, GPU, batch, 384)
        assert batch / step == pytest.approx(measured, rel=0.25)


def test_generation_of_equal_lengths_is_a_step_a_token() -> None:
    # All 8 at once for 20 tokens; a step's context on average is 10 + 10. Two prompts of 10 tokens before that.
    step = decode_seconds(MODEL, CHIP, SERVER, ALL, 8, 20)
    prefill = MODEL.forward_flops(20, 2, 5) / 1e6
    assert generate_seconds(MODEL, CHIP, SERVER, ALL, ROUND, 1) == pytest.approx(
        20 * step + prefill
    )
    # In two halves: twice the steps, each of 4.
    halves = replace(SERVER, most=4)
    four = decode_seconds(MODEL, CHIP, halves, ALL, 4, 20)
    assert generate_seconds(MODEL, CHIP, halves, ALL, ROUND, 1) == pytest.approx(
        40 * four + prefill
    )
    factor = replace(ALL, generate_factor=3.0)
    assert generate_seconds(MODEL, CHIP, halves, factor, ROUND, 1) == pytest.approx(
        3 * (40 * four + prefill)
    )


def test_a_long_tail_costs_unless_the_next_round_fills_it() -> None:
    tailed = replace(ROUND, longest=200)
    whole = generate_seconds(MODEL, CHIP, SERVER, ALL, tailed, 1)
    assert whole > 1.5 * generate_seconds(MODEL, CHIP, SERVER, ALL, ROUND, 1)
    assert generate_seconds(MODEL, CHIP, SERVER, ALL, tailed, 1, overlapped=True) < whole / 1.5


def test_completions_at_once() -> None:
    # Each takes 10 / 4 of the prompt and half of its 20 tokens: 12.5.
    assert at_once(replace(SERVER, cache_tokens=100.0), ROUND) == 8
    assert at_once(replace(SERVER, cache_tokens=1e6), ROUND) == 100
    assert at_once(replace(SERVER, cache_tokens=0.0), ROUND) == 1


@pytest.mark.parametrize(
    ("mean", "longest"), [(10.0, 10), (10.0, 1000), (600.0, 1000), (1.0, 4096), (2048.0, 4096)]
)
def test_lengths_have_the_mean(mean: float, longest: int) -> None:
    found = lengths(mean, longest)
    assert list(found) == sorted(found) and found[-1] <= longest
    assert sum(found) / len(found) == pytest.approx(mean, rel=0.02)
    assert sum(tokens * share for tokens, share in alive(found)) == pytest.approx(mean, rel=0.02)


def test_training() -> None:
    # 8 completions of 20 tokens and a prompt of 10 each: 240 tokens, 160 of them predicted, context 10 + 10.
    forward = 240 * (2 * 308 + 4 * 2 * 4 * 20) + 160 * 80
    assert training_flops(MODEL, ROUND, recomputes=False) == 3 * forward
    assert training_flops(MODEL, ROUND, recomputes=True) == 4 * forward
    assert (
        training_flops(MODEL, replace(ROUND, shares_prompts=True), recomputes=False) < 3 * forward
    )
    assert logprob_seconds(MODEL, CHIP, TRAINER, ALL, ROUND) == pytest.approx(forward / 4e6)
    # The gradients' sum, 2 x 3/4 of 388 numbers of 2 bytes at 100 bytes/s, takes longer than computing.
    updated = 32 * 388 / 1e3
    assert train_seconds(MODEL, CHIP, TRAINER, ALL, ROUND) == pytest.approx(
        2 * 0.75 * 388 * 2 / 100 + updated
    )
    fast = replace(CHIP, intra_node=1e9)
    assert train_seconds(MODEL, fast, TRAINER, ALL, ROUND) == pytest.approx(
        3 * forward / 4e6 + updated, rel=1e-3
    )
    sharded = replace(TRAINER, stage=1)
    assert train_seconds(MODEL, fast, sharded, ALL, ROUND) == pytest.approx(
        3 * forward / 4e6 + updated / 4, rel=1e-3
    )


def test_what_ranks_exchange() -> None:
    share = 0.75 * 2  # of a rank, times two bytes
    assert exchanged_bytes(MODEL, replace(TRAINER, ranks=1)) == 0
    assert exchanged_bytes(MODEL, replace(TRAINER, stage=1)) == share * 2 * 388
    assert exchanged_bytes(MODEL, replace(TRAINER, stage=2)) == share * (3 + 1) * 388
    assert exchanged_bytes(MODEL, replace(TRAINER, stage=3)) == share * 3 * 3 * 388


def test_a_push() -> None:
    use = replace(ALL, shm=100.0, http=50.0, load=200.0, changed=0.1)
    fast = replace(CHIP, inter_node=1e9)

    def seconds(
        servers: int, devices: int, transport: str, delta: bool = False, fanout: int = 0
    ) -> float:
        return push_seconds(1000, 2, fast, TRAINER, use, servers, devices, transport, delta, fanout)

    assert seconds(3, 1, "shm") == pytest.approx(2000 / 100 + 2000 / 200)  # one copy for all
    # each device loads its half
    assert seconds(1, 2, "shm") == pytest.approx(2000 / 100 + 1000 / 200)
    assert seconds(3, 1, "http") == pytest.approx(2000 / 50 + 3 * 2000 / 75 + 10)
    assert seconds(3, 1, "http", delta=True) == pytest.approx(2000 / 50 + 3 * 200 / 75 + 10)
    # Down a tree: 2 + 4 + 3 servers, and all is one bucket.
    assert seconds(9, 1, "http", fanout=2) == pytest.approx(
        2000 / 50 + 2 * (2000 + 2 * 2000) / 75 + 10
    )


@pytest.mark.parametrize(("fanout", "measured"), [(0, 10.8), (4, 3.4), (2, 2.0), (1, 1.7)])
def test_a_push_down_a_tree_takes_about_what_was_measured(
    fanout: int, measured: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`benchmarks/fanout.py`: 16 servers at 200 Mbit/s each, 16 buckets of 1 MB (docs/scaling.md)."""
    monkeypatch.setattr(wire, "BUCKET_BYTES", 1e6)
    use = replace(ALL, network=1.0, http=1e12, load=1e12)
    network = replace(CHIP, inter_node=25e6)
    found = push_seconds(8e6, 2, network, TRAINER, use, 16, 1, "http", False, fanout)
    assert 0.7 * measured < found < measured


@pytest.mark.parametrize(
    ("servers", "fanout", "levels"), [(7, 0, 1), (2, 2, 1), (3, 2, 2), (7, 2, 3), (5, 1, 5)]
)
def test_levels_of_a_tree(servers: int, fanout: int, levels: int) -> None:
    assert levels_of(servers, fanout) == levels
    deepest, place = 1, servers - 1
    while fanout and (above := parent_of(place, fanout)) is not None:
        deepest, place = deepest + 1, above
    assert deepest == levels


def test_bytes_of_a_completion_on_the_wire() -> None:
    import random

    from swift_r1.wire.protocol import Completion, RolloutOutput, RolloutResponse

    dice = random.Random(0)
    count = 500
    one = Completion(
        token_ids=tuple(dice.randrange(150_000) for _ in range(count)),
        logprobs=tuple(-dice.expovariate(1.0) for _ in range(count)),
        finish_reason="stop",
        weight_version=3,
    )
    output = RolloutOutput(request_id="r", completions=(one,))
    sent = len(RolloutResponse(outputs=(output,)).model_dump_json())
    assert BYTES_PER_TOKEN * count == pytest.approx(sent, rel=0.1)
    round_ = Round(1, 1, 100, count, count)
    assert completion_bytes(round_) == pytest.approx(sent + 100 * 7 + 400, rel=0.1)


def test_seconds_of_sampling(model_folder: Path) -> None:
    """As many parts as there are, one after another; the longer the answers may be, the longer."""
    args = parse_arguments(
        RlhfArguments,
        f"--model {model_folder} --dataset d --reward_funcs r --max_completion_length 64".split(),
        {},
        recorded={"rlhf_type": "grpo"},
    )
    one = sampling_seconds(args, 1, [4], 8)
    assert one > 0
    assert sampling_seconds(args, 1, [4, 4, 1], 8) == pytest.approx(3 * one)
    assert sampling_seconds(replace(args, max_completion_length=256), 1, [4], 8) > 2 * one
