"""What a teacher says of a round, against transformers' own log-probs; and what it must not depend on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.methods.teacher import teacher_advantages
from swift_r1.data.prompts import PromptEncoder
from swift_r1.errors import RunFailed
from swift_r1.models.loading import load_model
from swift_r1.rollout.scoring import ScoredRound
from swift_r1.rollout.trajectory import TokenSequence, Trajectory
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching
from swift_r1.training.grpo import (
    batch_of_round,
    before_training,
    of_round,
    split_round,
    train_step,
)
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.training.teachers import LocalTeacher, ServerTeacher
from swift_r1.wire.protocol import ScoreResponse
from tests.training import backend_worker as worker

ALONE = Ranks(0, 1, torch.device("cpu"), None)
CUTS = ("1000", "120", "1000p", "90p", "1000s", "90s")
GROUP, TEMPERATURE, TOP = 2, 0.9, 4


class Frozen(LocalBackend):
    """Keeps its gradients and takes no step."""

    def step(self, learning_rate):
        self.gradient = torch.cat(
            [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        )
        self.model.zero_grad()
        return self.gradient.norm().item()


def learner(folder):
    model = load_model(folder, "float32", gradient_checkpointing=False)
    return Frozen(model, OptimizerConfig(1e-3, 0.1, 0.9, 0.95, 1e-8, 1.0))


@pytest.fixture(scope="module")
def student(tiny_model):
    return learner(tiny_model)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory, save_model):
    """Another Llama, and a Qwen2 with a larger table of tokens."""
    folder = tmp_path_factory.mktemp("teachers")
    return {
        "llama": save_model(folder / "llama", seed=5),
        "qwen2": save_model(folder / "qwen2", kind="qwen2", tied=False, seed=6, vocab_size=128),
    }


def scored_round(tokenizer, hints):
    """Four prompts with two completions each; some with a hint."""
    encoder, generator, trained = PromptEncoder(tokenizer), torch.Generator().manual_seed(0), []
    for group in range(4):
        row = {
            "messages": [{"role": "user", "content": f"count from {group}"}],
            "prompt_id": f"d:{group}",
        }
        row["level"] = group % 3
        more = (
            {"teacher_prompt": f"count from {group}: {group} {group + 1}"}
            if hints and group % 2
            else {}
        )
        prompt = encoder.encode(row | {"dataset": "d"} | more)
        for number in range(GROUP):
            ids = tuple(
                torch.randint(3, 100, (3 + 2 * group + number,), generator=generator).tolist()
            )
            mask = [place != 1 for place in range(len(ids))]
            own = TokenSequence(prompt.token_ids, ids, (-3.0,) * len(ids), mask, ((0, 0),))
            value = float(number)
            scored = {
                "group": group,
                "number": number,
                "reward": 0.0,
                "objective": value,
                "outcome": value,
            }
            trained.append(
                Trajectory(f"r/{group}", prompt, (own,), (ids,), [], "", "stop", **scored)
            )
    return ScoredRound(trained, [])


def taught(student, folder, hints, cut, top, dtype="float32"):
    """The round, its micro-batches as the teacher of a folder fills them, and the teacher's model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scored = scored_round(tokenizer, hints)
    batch = batch_of_round(scored, ALONE)
    form = worker.FORMS[cut.lstrip("0123456789")]
    shares = 0.0 if form.shared else None
    batching = Batching(form, 1, GROUP, int(cut.rstrip("ps")), share_from=shares)
    own = load_model(folder, dtype, gradient_checkpointing=False)
    teacher = LocalTeacher(
        ALONE,
        PromptEncoder(tokenizer),
        TEMPERATURE,
        top,
        student.vocab_size,
        model=student.reference(load=lambda: own),
        batching=batching,
        alike=own.config.model_type == "llama",
    )
    steps = split_round(batch, 1, batching, ALONE)
    steps = before_training(steps, student, None, TEMPERATURE, old_policy=True)
    return scored, batch, teacher.teach(scored, batch, steps)


@pytest.mark.parametrize("hints", [False, True], ids=["plain", "hinted"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_log_probs_are_those_of_the_teacher_after_its_own_prompt(student, teachers, kind, hints):
    scored, batch, steps = taught(student, teachers[kind], hints, "1000s", TOP, "float64")
    found = of_round("teacher_logps", batch, steps, ALONE)
    [micro] = steps[0]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(teachers[kind], dtype=torch.float64),
        AutoTokenizer.from_pretrained(teachers[kind]),
    )
    encoder = PromptEncoder(tokenizer)
    for number, item in enumerate(scored.trained):
        prompt, ids = item.prompt, list(item.sequences[0].token_ids)
        content = prompt.columns.get("teacher_prompt", prompt.messages[0]["content"])
        before = encoder.tokenize(encoder.render([{"role": "user", "content": content}]))
        with torch.no_grad():
            logits = (
                model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1] / TEMPERATURE
            )
        logps, mask = logits.log_softmax(-1).float(), torch.tensor(item.sequences[0].loss_mask)
        own = logps.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(found[number, : len(ids)][mask], own[mask], rtol=0, atol=1e-5)
        row = micro.samples.tolist().index(number)
        tops, known = micro.teacher_tops[row, : len(ids)][mask], logps.topk(TOP)
        padding = known.indices[mask] >= student.vocab_size
        assert torch.equal(tops == -torch.inf, padding)
        torch.testing.assert_close(tops[~padding], known.values[mask][~padding], rtol=0, atol=1e-5)
        assert torch.equal(
            micro.teacher_ids[row, : len(ids)][mask], known.indices[mask].masked_fill(padding, 0)
        )


@pytest.mark.parametrize(
    ("kind", "hints", "top"),
    [
        pytest.param("llama", False, 0, id="llama-advantages"),
        pytest.param("qwen2", True, TOP, id="qwen2-hinted-loss"),
        pytest.param("llama", True, TOP, id="llama-hinted-loss", marks=pytest.mark.long),
        pytest.param("qwen2", True, 0, id="qwen2-hinted-advantages", marks=pytest.mark.long),
    ],
)
def test_cuts_packing_and_shared_prompts_change_neither_loss_nor_gradient(
    student, teachers, kind, hints, top
):
    results = []
    for cut in CUTS:
        _, batch, steps = taught(student, teachers[kind], hints, cut, top)
        advantages = batch.rewards
        if not top:
            old, said = (
                of_round(name, batch, steps, ALONE) for name in ("old_logps", "teacher_logps")
            )
            advantages = teacher_advantages(batch.rewards, old, said, batch.token_mask(), 0.5)
        config = LossConfig(loss_type="dapo", teacher_kl_coef=0.5)
        metrics = train_step(steps[0], advantages, student, config, TEMPERATURE, 1e-3, ALONE)
        results.append((metrics, student.gradient))
    (expected, gradient), *others = results
    assert expected["grad_norm"] > 1e-2 and ("teacher_kl" in expected) == bool(top)
    for metrics, other in others:
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
        assert metrics.get("teacher_kl", 0.0) == pytest.approx(
            expected.get("teacher_kl", 0.0), rel=1e-5
        )
        assert (other - gradient).norm() < 2e-5 * gradient.norm()


def test_the_loss_is_the_kl_over_whole_distributions(student, teachers):
    """With as many likeliest tokens as there are: autograd through full logits gives the same gradient."""
    everything = student.vocab_size
    scored, _, steps = taught(student, teachers["llama"], False, "1000", everything)
    config = LossConfig(loss_type="bnpo", teacher_kl_coef=2.0)
    nothing = torch.zeros(len(scored.trained))
    metrics = train_step(steps[0], nothing, student, config, TEMPERATURE, 1e-3, ALONE)
    other = learner(student.model.name_or_path)
    model, total, count = AutoModelForCausalLM.from_pretrained(teachers["llama"]), 0.0, 0
    for item in scored.trained:
        prompt, ids = item.prompt.token_ids, item.sequences[0].token_ids
        inputs, mask = torch.tensor([[*prompt, *ids]]), torch.tensor(item.sequences[0].loss_mask)
        p, q = (
            (one(inputs).logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)[mask]
            for one in (other.model, model)
        )
        total, count = total + (p.exp() * (p - q.detach())).sum(), count + int(mask.sum())
    (2.0 * total / count).backward()
    slow = torch.cat([p.grad.flatten() for p in other.model.parameters() if p.grad is not None])
    assert metrics["loss"] == pytest.approx(2 * total.item() / count, rel=1e-5)
    assert (student.gradient - slow).norm() < 1e-4 * slow.norm()


class Server:
    """Answers as `swift rollout` does."""

    base_url = "http://server"

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    @torch.no_grad()
    def score(self, sequences, temperature, top, *, every_copy):
        logps, ids, tops = [], [], []
        for sequence in map(list, sequences):
            found = (self.model(torch.tensor([sequence])).logits[0, :-1] / temperature).log_softmax(
                -1
            )
            logps.append(found.gather(-1, torch.tensor(sequence[1:])[:, None]).squeeze(-1).tolist())
            likeliest = found.topk(top)
            ids.append(likeliest.indices.tolist())
            tops.append(likeliest.values.tolist())
        more = {"top_ids": ids, "top_logprobs": tops} if top else {}
        return ScoreResponse(logprobs=logps, weight_version=0, **more)


@pytest.mark.parametrize("top", [0, TOP], ids=["advantages", "loss"])
def test_servers_say_what_the_model_itself_does(student, teachers, top):
    """Also of tokens that the policy does not know, and of tags that are numbers."""
    scored, batch, local = taught(student, teachers["qwen2"], True, "90s", top)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(teachers["qwen2"]))
    servers = dict.fromkeys("012", Server(teachers["qwen2"]))
    args = SimpleNamespace(teacher_tag_key="level", vllm_server_timeout=1.0)
    common = ALONE, encoder, TEMPERATURE, top, student.vocab_size
    teacher = ServerTeacher(*common, servers, dict.fromkeys(servers, 0), args, lambda what: None)
    said = teacher.teach(scored, batch, local)
    assert len(said[0]) > 1
    for one, other in zip(said[0], local[0], strict=True):
        torch.testing.assert_close(one.teacher_logps, other.teacher_logps, rtol=0, atol=1e-5)
        if top:
            assert torch.equal(one.teacher_ids, other.teacher_ids)
            torch.testing.assert_close(one.teacher_tops, other.teacher_tops, rtol=0, atol=1e-5)
    assert not top or any((one.teacher_tops == -torch.inf).any() for one in said[0])
    few = replace(teacher, servers={"0": servers["0"], "1": servers["1"]})
    with pytest.raises(
        RunFailed, match=r"d:2: level 2 is of no teacher of --teacher_model_server \(0, 1\)"
    ):
        few.teach(scored, batch, local)
