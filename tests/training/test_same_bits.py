"""With `--batch_invariant` a token's log-prob has the same bits in the engine and in every form of the trainer's rows."""

from __future__ import annotations

import random

import pytest
import torch

from swift_r1.errors import UsageError
from swift_r1.models import invariant
from swift_r1.models.attention import takes_packed_rows
from swift_r1.models.loading import load_model
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.serving.engines.invariant import InvariantEngine
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.training import prefixes
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import collate, round_batch
from swift_r1.training.micro_batches import SHARED, Form
from swift_r1.training.model_checks import check_invariance
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.protocol import RolloutRequest, SamplingParams
from tests.families import FAMILIES, save_family

CPU = torch.device("cpu")
REFUSED = {
    *("qwen3_next", "kimi_linear", "lfm2_moe"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3"),
    *("gemma2", "gpt_oss"),
}
PROVEN = [name for name in FAMILIES if name not in REFUSED and name != "deepseek_v4"]
TEMPERATURE = 0.7


def backend_of(folder, dtype="float32"):
    config = OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0)
    return LocalBackend(load_model(folder, dtype, False), config)


def sampled(engine, source, longest=40):
    """Returns prompts of many lengths, each with the completions that a group got, as `(prompt, completion)`."""
    requests = []
    for number in range(source.randint(1, 4)):
        prompt = [source.randrange(3, 100) for _ in range(source.randint(1, 80))]
        n = source.randint(1, 5)
        requests.append(
            RolloutRequest(
                request_id=str(number),
                prompt_token_ids=tuple(prompt),
                n=n,
                seeds=tuple(source.randrange(1000) for _ in range(n)),
                sampling=SamplingParams(
                    max_tokens=source.randint(1, longest), temperature=TEMPERATURE
                ),
            )
        )
    outputs = engine.generate(requests, 0)
    return [
        (request.prompt_token_ids, one)
        for request, output in zip(requests, outputs, strict=True)
        for one in output.completions
    ]


def differences(backend, pairs, units, form):
    """Returns how many of the engine's log-probs the trainer computes otherwise, where its rows are in `form`."""
    rows = [TokenSequence.of_answer(list(prompt), list(one.token_ids)) for prompt, one in pairs]
    batch = round_batch(rows, [0.0] * len(rows))
    own = takes_packed_rows(backend.model)
    micro = collate(batch, units, form, CPU, own)
    logps = micro.unflatten(backend.logprobs(micro.inputs, TEMPERATURE).logps.detach())
    found = 0
    for row, sample in zip(logps, micro.samples.tolist(), strict=True):
        engine = torch.tensor(pairs[sample][1].logprobs)
        found += int((row[: len(engine)] != engine).sum())
    return found


def groupings(pairs, source):
    """Yields the rows in forms of their own: padded and packed, in parts of several sizes, behind what they share."""
    numbers = list(range(len(pairs)))
    for form in (Form(), Form(packed=True)):
        source.shuffle(numbers)
        size = source.randint(1, len(numbers))
        for start in range(0, len(numbers), size):
            yield [(one,) for one in numbers[start : start + size]], form
    groups = {}
    for number, (prompt, _) in enumerate(pairs):
        groups.setdefault(prompt, []).append(number)
    yield [tuple(group) for group in groups.values()], SHARED


def compared(backend, engine, seed, rounds):
    source = random.Random(seed)
    found = 0
    for _ in range(rounds):
        pairs = sampled(engine, source)
        for units, form in groupings(pairs, source):
            found += differences(backend, pairs, units, form)
    return found


@pytest.mark.parametrize(
    "family",
    [
        name if name in ("mistral", "qwen3_moe") else pytest.param(name, marks=pytest.mark.long)
        for name in PROVEN
    ],
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_engine_and_trainer_agree_to_the_bit(family, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(prefixes, "LEAST", 2)
    backend = backend_of(save_family(tmp_path, family), dtype)
    with invariant.invariant_forward():
        engine = InvariantEngine(backend.model, None, (2,), 0)
        check_invariance(engine, backend)
        assert compared(backend, engine, 0, 2) == 0
    if family == "mistral":  # else this proves nothing
        engine = TransformersEngine(backend.model, None, (2,), 0)
        assert compared(backend, engine, 0, 1) > 0
        with pytest.raises(UsageError, match="MistralForCausalLM is not computed so: the engine"):
            check_invariance(engine, backend)


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(pytest.param(one, marks=pytest.mark.long) for one in sorted(REFUSED - {"gemma2"})),
    ],
)
def test_other_families_are_refused(family, tmp_path):
    backend = backend_of(save_family(tmp_path, family))
    with pytest.raises(UsageError, match="of another kind than those that are proven"):
        InvariantEngine(backend.model, None, (2,), 0)
