"""Each family of models in the forms it is trained and sampled in, against its own plain forward pass, in float32."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from swift_r1.errors import UsageError
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.models.attention import takes_packed_rows
from swift_r1.models.expected import as_in_checkpoint, expected_weights
from swift_r1.models.loading import load_model
from swift_r1.models.multimodal import decoder_of, kept_on_disk, placeholders
from swift_r1.models.weights import policy_weights
from swift_r1.rollout.remote import own_logprobs
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.checks import check_engine
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.training import prefixes
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import collate, round_batch
from swift_r1.training.checkpoint.tensors import ModelShards
from swift_r1.training.micro_batches import SHARED, Form
from swift_r1.training.model_checks import check_logprobs, why_not_packed
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire.protocol import RolloutRequest, SamplingParams
from tests.families import FAMILIES, MULTIMODAL, WINDOW, family_class, save_family, tower_names

CPU = torch.device("cpu")
PACKED = Form(packed=True)
NOT_PACKED = {
    **{
        name: {PACKED, SHARED}
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "lfm2_moe")
    },
    **{name: {PACKED, SHARED} for name in ("deepseek_v32", "deepseek_v4", "gpt_oss")},
    "gemma2": {SHARED},
}
"""Where a completion would see others, or attention is not plain SDPA's: prompts are then computed for each."""
NOISE = 1e-4
GENERATOR = torch.Generator().manual_seed(0)
VOCAB = 102


def tokens(count):
    return torch.randint(3, VOCAB, (count,), generator=GENERATOR).tolist()


PROMPTS = [prompt for prompt in (tokens(21), tokens(13)) for _ in range(3)]
COMPLETIONS = [tokens(length) for length in (5, 20, 11, 30, 3, 17)]
for one, other, count in ((1, 0, 4), (2, 1, 9), (5, 3, 12)):
    COMPLETIONS[one][:count] = COMPLETIONS[other][:count]


class Family(NamedTuple):
    name: str
    folder: Any
    backend: LocalBackend
    plain: Any
    """The model as transformers loads it, with its plainest attention."""

    def plain_logprobs(self, prompt, completion):
        ids = torch.tensor([[*prompt, *completion]])
        logits = self.plain(ids).logits[0, len(prompt) - 1 : -1]
        never = torch.tensor(placeholders(self.plain.config), dtype=torch.long)
        logps = logits.index_fill(-1, never, float("-inf")).log_softmax(-1)
        return logps.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """What completions begin with makes a tree of four levels."""
    monkeypatch.setattr(prefixes, "LEAST", 2)


CORNER = ("gemma3", "qwen3_moe")  # in each run; the other families in the long tests


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in CORNER else pytest.mark.long)
        for name in (*FAMILIES, *MULTIMODAL)
    ],
)
def family(request, tmp_path_factory):
    folder = save_family(tmp_path_factory.mktemp("models") / request.param, request.param)
    backend = LocalBackend(
        load_model(folder, "float32", False), OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0)
    )
    plain = (
        family_class(request.param)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    return Family(request.param, folder, backend, plain)


def test_logprobs_and_gradients_are_the_models_own(family):
    """Padded, packed and with shared beginnings, all longer than a window; a form that cannot be is refused."""
    assert min(map(len, PROMPTS)) > WINDOW and max(map(len, COMPLETIONS)) > WINDOW
    check_logprobs(family.backend)
    own = torch.cat(
        [family.plain_logprobs(*pair) for pair in zip(PROMPTS, COMPLETIONS, strict=True)]
    )
    own.sum().backward()
    expected = {name: parameter.grad for name, parameter in family.plain.named_parameters()}
    largest = max(gradient.abs().max() for gradient in expected.values() if gradient is not None)
    batch = round_batch(
        [TokenSequence.of_answer(*pair) for pair in zip(PROMPTS, COMPLETIONS, strict=True)],
        [0.0] * 6,
    )
    for form, units in (
        (Form(), [(i,) for i in range(6)]),
        (PACKED, [(i,) for i in range(6)]),
        (SHARED, [(0, 1, 2), (3, 4, 5)]),
    ):
        refused = form in NOT_PACKED.get(family.name, ())
        assert not form.packed or bool(why_not_packed(family.backend, form)) == refused
        if refused:
            continue
        family.backend.optimizer.zero_grad(set_to_none=False)
        inputs = collate(batch, units, form, CPU, takes_packed_rows(family.backend.model)).inputs
        logps = family.backend.logprobs(inputs, 1.0).logps
        torch.testing.assert_close(logps, own, atol=NOISE, rtol=0)
        logps.sum().backward()
        trained = dict(family.backend.model.named_parameters())
        assert expected.keys() - trained.keys() == tower_names(family.plain) & expected.keys()
        for name, parameter in trained.items():
            if ".indexer." in name:  # which keys are chosen has no gradient
                assert not parameter.requires_grad and expected[name] is None
                continue
            # Some, as that of a bias that all keys share, are 0 but for rounding.
            scale = expected[name].abs().max() + 1e-3 * largest
            torch.testing.assert_close(
                parameter.grad / scale, expected[name] / scale, atol=1e-3, rtol=0
            )


@torch.no_grad()
def test_the_embedded_engine_samples_from_the_model(family):
    if family.name == "deepseek_v4":
        with pytest.raises(
            UsageError, match="no cache for the compressed_sparse_attention, heavily_compressed_att"
        ):
            TransformersEngine(family.backend.model, None, (2,), 0)
        return
    engine = TransformersEngine(family.backend.model, None, (2,), 0)
    check_engine(engine)
    sampling = SamplingParams(max_tokens=24)
    requests = [
        RolloutRequest(
            request_id=str(n),
            prompt_token_ids=tuple(prompt),
            n=2,
            seeds=(n, 9 + n),
            sampling=sampling,
        )
        for n, prompt in enumerate((PROMPTS[0], PROMPTS[3], PROMPTS[0][:4]))
    ]
    differences = [
        (
            family.plain_logprobs(request.prompt_token_ids, one.token_ids)
            - torch.tensor(one.logprobs)
        ).abs()
        for request, output in zip(requests, engine.generate(requests, 0), strict=True)
        for one in output.completions
    ]
    assert sum(map(len, differences)) > 60
    assert torch.cat(differences).mean() < NOISE


@pytest.mark.parametrize(
    "lora",
    [
        None,
        AdapterArguments(
            train_type="lora", lora_rank=4, lora_alpha=8, target_modules=["all-linear"]
        ),
    ],
    ids=["full", "lora"],
)
def test_what_is_sent_and_saved_is_what_its_checkpoint_holds(family, tmp_path, lora):
    """Names, shapes and values, buffers too, whichever buckets they come in."""
    model = load_model(family.folder, "float32", False, lora)
    sent = {}
    for weight in policy_weights(model):
        sent |= as_in_checkpoint(model, {weight.name: weight.value()})
    whole = load_file(family.folder / "model.safetensors")
    disk = kept_on_disk(family.backend.model, str(family.folder))
    file = {name: tensor for name, tensor in whole.items() if name not in disk}
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == expected_weights(
        str(family.folder)
    )
    assert sent.keys() == file.keys() and all(torch.equal(sent[name], file[name]) for name in file)
    if lora is None:
        weights = {weight.name: weight.value() for weight in policy_weights(model)}
        model.save_pretrained(tmp_path, state_dict=weights)
        saved = load_file(tmp_path / "model.safetensors")
        assert saved.keys() == file.keys() and all(
            torch.equal(saved[name], file[name]) for name in file
        )
        assert (tmp_path / "config.json").read_text() == (family.folder / "config.json").read_text()


def test_every_tensor_of_a_hub_folder_is_in_a_checkpoint(tmp_path):
    """Two files, names of today where transformers would write older ones, a head that transformers does not load."""
    folder = save_family(tmp_path / "hub", "qwen2_5_vl")
    own = load_file(folder / "model.safetensors")
    names = [(r"^visual\.", "model.visual."), (r"^model\.(?!visual)", "model.language_model.")]
    tensors = {
        functools.reduce(lambda name, one: re.sub(*one, name), names, name): own[name]
        for name in own
    }
    tensors["mtp.norm.weight"] = torch.randn(7).bfloat16()
    parts = {f"model-{part}.safetensors": dict(list(tensors.items())[part::2]) for part in (0, 1)}
    for file, part in parts.items():
        save_file(part, folder / file)
    index = {
        "metadata": {},
        "weight_map": {name: file for file, part in parts.items() for name in part},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    backend = LocalBackend(
        load_model(folder, "bfloat16", False), OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0)
    )
    shards = ModelShards(backend.model, policy_weights(backend.model), Ranks(0, 1, CPU, None))
    shards.write(tmp_path / "model.safetensors", shards.tensors(backend))
    written, towers = load_file(tmp_path / "model.safetensors"), ("model.visual.", "mtp.")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(
            written[name], tensor if name.startswith(towers) else tensor.bfloat16()
        ), name


def test_placeholders_are_never_drawn(tmp_path):
    """However likely the model itself has made them."""
    model = load_model(save_family(tmp_path, "gemma3", tie_word_embeddings=False), "float32", False)
    never = placeholders(model.config)
    with torch.no_grad():
        decoder_of(model).norm.weight.fill_(1.0)
        model.get_output_embeddings().weight[list(never)] *= 50
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    request = RolloutRequest(
        request_id="0", prompt_token_ids=(3, 4), n=4, seeds=(0, 1, 2, 3), sampling=sampling
    )
    [output] = TransformersEngine(model, None, (2,), 0).generate([request], 0)
    assert never and all(set(never).isdisjoint(one.token_ids) for one in output.completions)
    backend = LocalBackend(model, OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0))
    for one in output.completions:
        own = own_logprobs(backend, [(3, 4, *one.token_ids)], CPU)[0][1:]
        torch.testing.assert_close(
            torch.tensor(own), torch.tensor(one.logprobs), atol=NOISE, rtol=0
        )


def test_experts_get_no_adapters_and_are_trained_in_full_training(tmp_path):
    folder = save_family(tmp_path, "mixtral")
    assert all(
        parameter.requires_grad for parameter in load_model(folder, "float32", False).parameters()
    )
    model = load_model(
        folder,
        "float32",
        False,
        AdapterArguments(
            train_type="lora", lora_rank=4, lora_alpha=8, target_modules=["all-linear"]
        ),
    )
    adapted = {
        name.split(".lora_")[0].rpartition(".")[2]
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(
        UsageError, match="--target_modules w1: the experts and routers of MixtralForCausalLM"
    ):
        load_model(
            folder,
            "float32",
            False,
            AdapterArguments(
                train_type="lora", lora_rank=4, lora_alpha=8, target_modules=["q_proj", "w1"]
            ),
        )


def test_zero3_trains_experts_and_keeps_buffers(jobs, tmp_path):
    """Two ranks, whose parameters are partitioned, end with the weights of one that has them whole."""
    folder = save_family(tmp_path, "glm4_moe")
    _, whole = jobs.run(backend="local", model=folder, cuts="150")
    _, parts = jobs.run(2, backend="zero3", model=folder, cuts="150")
    before = {
        weight.name: weight.value()
        for weight in policy_weights(load_model(folder, "float32", False))
    }
    assert whole.keys() == parts.keys() == before.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(parts[name], weight, atol=2e-4, rtol=0)
        assert torch.equal(weight, before[name]) == name.endswith("e_score_correction_bias")


def test_a_reference_keeps_its_buffers_through_a_checkpoint(tmp_path):
    backend = LocalBackend(
        load_model(save_family(tmp_path, "glm4_moe"), "float32", False),
        OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0),
    )
    reference = backend.reference()
    saved = {name: tensor for bucket in reference.weight_buckets() for name, tensor in bucket}
    (name,) = (name for name in saved if name.endswith("e_score_correction_bias"))
    assert saved[name].any()
    backend.model.get_buffer(name).zero_()
    other = backend.reference()
    other.load_weights(saved.__getitem__)
    assert torch.equal(other.policy.model.get_buffer(name), saved[name])


def test_dropout_is_off_and_stays_in_the_config(tmp_path, caplog):
    with caplog.at_level("INFO"):
        model = load_model(save_family(tmp_path, "gpt2"), "float32", False).train()
    assert "GPT2LMHeadModel is trained without its dropout" in caplog.text
    ids = torch.tensor([PROMPTS[0]])
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert model.config.attn_pdrop == 0.1


def test_an_attention_that_forgets_its_window_is_found(tmp_path, monkeypatch):
    """At the length of a real window, which no probe reaches: windows are narrowed for it."""
    from transformers import AttentionInterface

    from swift_r1.models import attention as training
    from swift_r1.serving.engines import decoding

    def forgetting(own):
        def attend(*args, sliding_window=None, **kwargs):
            return own(*args, **kwargs)

        return attend

    model = load_model(save_family(tmp_path, "mistral", sliding_window=4096), "float32", False)
    backend = LocalBackend(model, OptimizerConfig(1e-3, 0, 0.9, 0.95, 1e-8, 1.0))
    engine = TransformersEngine(model, None, (2,), 0)
    check_engine(engine)
    assert why_not_packed(backend, SHARED) == ""
    monkeypatch.setitem(
        AttentionInterface._global_mapping, decoding._NAME, forgetting(decoding.decode_attention)
    )
    with pytest.raises(
        UsageError, match="the embedded engine does not sample from MistralForCausalLM as it is"
    ):
        check_engine(engine)
    monkeypatch.setitem(
        AttentionInterface._global_mapping, training._NAME, forgetting(training.packed_attention)
    )
    assert "see its neighbours" in why_not_packed(backend, SHARED)
