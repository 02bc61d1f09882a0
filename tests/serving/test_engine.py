"""The embedded engine against the model's own full forward pass."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swift_r1.errors import UsageError
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.wire.protocol import RolloutRequest, SamplingParams
from tests.cuts import CUTS, check_first_tokens

EOS, PAD, VOCAB = 1, 0, 40


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # sharper than a fresh model's near-uniform output
    return model


class Characters:
    def decode(self, token_ids):
        return "".join(chr(65 + token) for token in token_ids)


def engine(model):
    return TransformersEngine(model, Characters(), [EOS], PAD)


def requests(lengths, n=3, **sampling):
    generator = torch.Generator().manual_seed(1)
    return [
        RolloutRequest(
            request_id=str(i),
            prompt_token_ids=tuple(
                torch.randint(2, VOCAB, (length,), generator=generator).tolist()
            ),
            n=n,
            seeds=tuple(range(100 * i, 100 * i + n)),
            sampling=SamplingParams(**({"max_tokens": 24} | sampling)),
        )
        for i, length in enumerate(lengths)
    ]


def full_forward(model, prompt, completion, temperature):
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logps = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    return logps[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("lengths", [[7, 7, 7, 7], [3, 11, 7, 5]], ids=["same length", "ragged"])
def test_logprobs_equal_a_full_forward_pass(model, lengths, temperature):
    asked = requests(lengths, temperature=temperature)
    ends = set()
    for request, output in zip(asked, engine(model).generate(asked, 5), strict=True):
        assert output.request_id == request.request_id
        for completion in output.completions:
            expected = full_forward(
                model, request.prompt_token_ids, completion.token_ids, temperature
            )
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-4
            )
            assert completion.weight_version == 5
            ends.add(completion.finish_reason)
            assert (completion.token_ids[-1] == EOS) == (completion.finish_reason == "stop")
            assert EOS not in completion.token_ids[:-1]
    assert ends == {"stop", "length"}, (
        "the case should hold rows that end early and rows that do not"
    )


def test_a_seed_pins_its_completion_whatever_is_beside_it(model):
    asked = requests([3, 11, 7, 5])
    together = engine(model).generate(asked, 0)
    alone = engine(model).generate([asked[2]], 0)
    for one, same in zip(alone[0].completions, together[2].completions, strict=True):
        assert one.token_ids == same.token_ids
        # Matrix products of other sizes round differently.
        assert one.logprobs == pytest.approx(same.logprobs, abs=1e-4)
    reversed_ = engine(model).generate(asked[::-1], 0)
    assert [c.token_ids for c in reversed_[-1].completions] == [
        c.token_ids for c in together[0].completions
    ]
    other = asked[2].model_copy(update={"seeds": (7, 8, 9)})
    assert (
        engine(model).generate([other], 0)[0].completions[0].token_ids
        != alone[0].completions[0].token_ids
    )


@pytest.mark.parametrize("cuts", [{}, *CUTS], ids=str)
def test_sampling_follows_the_distribution(model, cuts):
    (request,) = requests([6], n=2000, max_tokens=1, **cuts)
    (output,) = engine(model).generate([request], 0)
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt_token_ids])).logits[0, -1].tolist()
    check_first_tokens(output.completions, logits, request.sampling, abs_error=1e-4)


def test_greedy_top_k_and_stop_strings(model):
    (greedy,) = engine(model).generate(requests([6], temperature=0.0), 0)
    assert len({c.token_ids for c in greedy.completions}) == 1
    (top_one,) = engine(model).generate(requests([6], top_k=1), 0)
    assert top_one.completions[0].token_ids == greedy.completions[0].token_ids
    first_three = Characters().decode(greedy.completions[0].token_ids[:3])
    (stopped,) = engine(model).generate(requests([6], temperature=0.0, stop=(first_three,)), 0)
    assert stopped.completions[0].token_ids == greedy.completions[0].token_ids[:3]
    assert stopped.completions[0].finish_reason == "stop"


def test_min_p_and_the_penalty_change_the_distribution_that_is_sampled_and_reported(model):
    asked = requests(
        [5, 9], n=40, temperature=1.3, min_p=0.2, repetition_penalty=1.7, ignore_eos=True
    )
    for request, output in zip(asked, engine(model).generate(asked, 1), strict=True):
        for one in output.completions:
            ids = [*request.prompt_token_ids, *one.token_ids]
            logits = model(torch.tensor([ids])).logits[0].float()
            for place, logprob in enumerate(one.logprobs, start=len(request.prompt_token_ids)):
                row = logits[place - 1].tolist()
                for token in set(ids[:place]):
                    row[token] = row[token] / 1.7 if row[token] > 0 else row[token] * 1.7
                probs = (torch.tensor(row) / 1.3).softmax(-1)
                probs = probs.where(probs >= 0.2 * probs.max(), 0.0)
                assert probs[ids[place]] > 0
                assert logprob == pytest.approx(
                    (probs[ids[place]] / probs.sum()).log().item(), abs=1e-4
                )


def test_a_pattern_is_refused(model):
    with pytest.raises(ValueError, match="this engine follows no pattern"):
        engine(model).generate(requests([5], structured_outputs_regex="a+"), 0)


def test_outputs_are_given_as_soon_as_a_prompt_has_all_of_its_completions(model):
    asked = requests([4, 9, 6], n=2, max_tokens=5, ignore_eos=True)
    asked += requests([7], n=2, max_tokens=9, ignore_eos=True)
    done, given = [], []

    def take(number, output):
        given.append((sum(done), number, output))

    outputs = engine(model).generate(asked, 0, done.append, take)
    assert sorted((number, output) for _, number, output in given) == list(enumerate(outputs))
    # The longer ones are not waited for: when the others are given, six completions of eight have ended.
    assert [ended for ended, number, _ in given if number < 3] == [6, 6, 6]
    stopping = requests([4, 9, 6, 5, 8], stop_token_ids=tuple(range(2, 8)))
    lengths = [
        max(len(one.token_ids) for one in output.completions)
        for output in engine(model).generate(stopping, 0)
    ]
    order = []
    engine(model).generate(stopping, 0, on_output=lambda number, _output: order.append(number))
    assert len(set(lengths)) > 2 and [lengths[number] for number in order] == sorted(lengths)


def test_what_is_wanted_no_more_ends_at_once(model):
    asked, answers = requests([5, 7, 9], ignore_eos=True), iter([False] * 4)
    whole = engine(model).generate(asked, 0)
    for request, ended, full in zip(
        asked,
        engine(model).generate(asked, 0, unwanted=lambda: next(answers, True)),
        whole,
        strict=True,
    ):
        assert len(ended.completions) == request.n
        for one, other in zip(ended.completions, full.completions, strict=True):
            assert one.token_ids == other.token_ids[:5] and one.finish_reason == "length"


def test_training_mode_and_attention_are_put_back(model):
    model.train()
    engine(model).generate(requests([4]), 0)
    assert model.training and model.config._attn_implementation == "sdpa"


def test_an_architecture_whose_cache_is_not_carried_is_refused(model, monkeypatch):
    monkeypatch.setattr(
        model.config, "layer_types", ["full_attention", "chunked_attention"], raising=False
    )
    monkeypatch.setattr(model.config, "attention_chunk_size", 8, raising=False)
    with pytest.raises(UsageError, match="no cache for the chunked_attention layers of llama"):
        engine(model)


def test_keys_that_are_changed_after_the_cache_are_refused():
    from transformers import JetMoeConfig, JetMoeForCausalLM

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
    }
    changing = JetMoeForCausalLM(
        JetMoeConfig(
            **sizes,
            num_key_value_heads=2,
            kv_channels=8,
            num_local_experts=2,
            num_experts_per_tok=2,
        )
    )
    with pytest.raises(
        UsageError,
        match="cannot serve JetMoeAttention, which changes the keys that its cache holds",
    ):
        engine(changing).generate(requests([5]), 0)


def test_sampling_from_a_part_leaves_the_trainers_ratio_whole(model):
    """Temperature 1.2, top-p 0.8: the engine's log-probs are the trainer's less log Z; the ratio has no Z in it."""
    from swift_r1.algorithms.aggregation import mean_metrics
    from swift_r1.algorithms.config import LossConfig
    from swift_r1.algorithms.losses import policy_loss

    asked = requests([5, 9], temperature=1.2, top_p=0.8)
    tokens, whole, reported, mass = [], [], [], []
    for request, output in zip(asked, engine(model).generate(asked, 1), strict=True):
        for completion in output.completions:
            ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
            with torch.no_grad():
                probs = (
                    model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1].float() / 1.2
                ).softmax(-1)
            for row, token, logprob in zip(
                probs, completion.token_ids, completion.logprobs, strict=True
            ):
                kept = 0.0
                for value in sorted(row.tolist(), reverse=True):
                    kept += value
                    if kept >= 0.8:
                        break
                assert row[token] >= value - 1e-6, "a token from outside of the cut"
                tokens.append(token)
                whole.append(row[token].log())
                reported.append(logprob)
                mass.append(kept)
    old, rollout, mass = (
        torch.stack(whole)[None],
        torch.tensor(reported)[None],
        torch.tensor(mass)[None],
    )
    assert len(tokens) > 60 and mass.min() >= 0.8 and mass.mean() < 0.97
    torch.testing.assert_close(rollout, old - mass.log(), atol=2e-5, rtol=0)
    config = LossConfig(
        cuts_sampling=True, rollout_importance_sampling_mode="token_truncate", loss_type="bnpo"
    )
    logps = old.clone().requires_grad_()
    out = policy_loss(
        logps,
        old,
        torch.tensor([2.0]),
        torch.ones_like(old, dtype=torch.bool),
        config,
        rollout_logps=rollout,
    )
    means = mean_metrics(out.metrics)
    assert means["ratio"] == 1.0
    assert means["rollout/kept_mass"] == pytest.approx(mass.mean().item(), abs=1e-4)
    out.loss.backward()
    # Each token counts as often as the whole policy would have drawn it.
    torch.testing.assert_close(logps.grad, -2.0 * mass / mass.numel(), atol=1e-5, rtol=0)
