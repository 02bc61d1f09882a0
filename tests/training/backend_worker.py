"""One rank that trains a tiny model for a few optimizer steps, once for each line of JSON on standard input.

Started by `conftest.py`. A line is a `Case`; rank 0 writes what came out to its `out`, and every rank answers
with a line: `ok`, or a traceback as JSON.
"""

import gc
import json
import sys
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from swift_r1.algorithms.advantages import group_advantages
from swift_r1.algorithms.config import LossConfig
from swift_r1.algorithms.methods.real import reward_labels
from swift_r1.algorithms.ppo import PPOConfig
from swift_r1.algorithms.rewards import from_flags
from swift_r1.data.vision import VisionProcessor
from swift_r1.flags import RlhfArguments, make_plan, parse_arguments
from swift_r1.flags.adapters import AdapterArguments
from swift_r1.models.loading import Quantization, load_critic, load_model, load_tokenizer
from swift_r1.models.policy import Critic, Policy
from swift_r1.models.vision import Vision
from swift_r1.models.weights import part_of, policy_weights
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import join_ranks
from swift_r1.runtime.sequence_parallel import join_sequence_group
from swift_r1.training import prefixes
from swift_r1.training.backends.deepspeed_config import read_config
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.batching import Batching, collate, round_batch, split_step
from swift_r1.training.checkpoint.tensors import SavedTensors, write_tensors
from swift_r1.training.chord import ExpertStep
from swift_r1.training.grpo import (
    before_training,
    needs_old_policy,
    rewards_after_kl,
    split_round,
    train_step,
)
from swift_r1.training.micro_batches import Form
from swift_r1.training.model_checks import check_logprobs
from swift_r1.training.optimizer import LearningRate, OptimizerConfig
from swift_r1.training.ppo import TrainedCritic, critic_step, token_advantages
from tests.vision import image_file, picture

prefixes.LEAST = 2  # rows are short here, and some of a group begin alike
COMPLETIONS, GROUP = 16, 4
MOVED = ("fipo", "real", "kl_cov", "gmpo", "dppo_kl")
FORMS = {"": Form(), "p": Form(packed=True), "s": Form(packed=True, shared=True)}


def ragged_round(vision=None, folder=None, alike=False):
    """16 completions of 2 to 18 tokens, some of a group `alike` at their beginnings; a quarter of them truncated, engine
    log-probs that are off. With `vision` the first group's prompt has an image, and the second one's two."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(3, 100, (count,), generator=generator).tolist()

    prompts = [
        prompt for i in range(COMPLETIONS // GROUP) for prompt in [tokens(4 + i % 3)] * GROUP
    ]
    completions = [tokens(2 + 3 * i % 17) for i in range(COMPLETIONS)]
    for i in range(COMPLETIONS if alike else 0):
        common = min((0, 4, 2, 6)[i % GROUP], len(completions[i]))
        completions[i][:common] = completions[i - 1][:common]
    images = [()] * COMPLETIONS
    for group, sizes in enumerate([[(28, 28)], [(16, 40), (28, 16)]] if vision else []):
        files = tuple(image_file(folder, picture(*size), size) for size in sizes)
        text = "a".join([vision.processor.placeholder] * len(files))
        expanded = vision.processor.expand(text, [one.read() for one in files])
        for place in range(group * GROUP, (group + 1) * GROUP):
            prompts[place] = [*prompts[place], *expanded, 7]
            images[place] = files
    rows = [
        TokenSequence(prompt, ids, [-8.0] * len(ids), [True] * len(ids), images=own)
        for prompt, ids, own in zip(prompts, completions, images, strict=True)
    ]
    truncated = [i % 4 == 3 for i in range(COMPLETIONS)]
    return round_batch(rows, torch.linspace(-0.5, 1.5, COMPLETIONS).tolist(), truncated)


def collate_all(batch):
    """The inputs of one micro-batch of all completions, a row each."""
    return collate(
        batch, [(sample,) for sample in range(len(batch))], Form(), torch.device("cpu")
    ).inputs


def step_on(
    batch,
    backend,
    reference,
    config,
    cut,
    ranks,
    overlong_filter=False,
    rate=1e-3,
    apart=True,
    mu=0.0,
    vision=None,
):
    """One optimizer step on a round, its rewards taken as advantages unless the KL goes into them.

    `cut` is the token budget of a micro-batch, with a `p` behind it where they are packed, an `s` where completions
    share their prompt too. Groups whose rewards are all equal are trained `apart`. Losses of `MOVED` begin with a
    policy that has moved. With `mu` half of the completions are experts' too.
    """
    budget = int(cut.rstrip("ps"))
    form = FORMS[cut.lstrip("0123456789")]
    batching = Batching(
        form,
        1,
        GROUP,
        budget,
        overlong_filter=overlong_filter,
        silent_apart=apart,
        vision=vision,
    )
    split = split_round(batch, 1, batching, ranks)
    moved = config.loss_type in MOVED
    asked = RlhfArguments(
        kl_in_reward=config.kl_in_reward,
        top_entropy_quantile=config.top_entropy_quantile,
        loss_type=config.loss_type,
    )
    steps = before_training(
        split, backend, reference, 0.9, old_policy=moved or needs_old_policy(asked, 1)
    )
    if moved:
        steps = [[drifted(micro) for micro in steps[0]]]
    advantages = (
        rewards_after_kl(batch, steps, config.beta, ranks) if config.kl_in_reward else batch.rewards
    )
    if config.loss_type == "real":
        centred = group_advantages(advantages, GROUP, scale_rewards="none")
        advantages = reward_labels(centred, advantages.isfinite(), GROUP)
    experts = None
    if mu:
        answers = split_step(batch, range(COMPLETIONS // 2), Batching(form, 1, 1, budget), ranks)
        experts = ExpertStep(
            mu, answers, float(batch.completion_lengths[: COMPLETIONS // 2].sum()), True
        )
    return train_step(steps[0], advantages, backend, config, 0.9, rate, ranks, experts=experts)


def drifted(micro):
    """With old log-probs other than the policy's, by completion and place."""
    places = torch.arange(micro.mask.shape[1]) + 7 * micro.samples[:, None]
    return replace(micro, old_logps=micro.old_logps + 0.3 * torch.sin(places) * micro.mask)


class Ppo:
    """What the loop does for PPO with the micro-batches of a step."""

    def __init__(self, args, policy, critic, reference, rate, ranks):
        self.args, self.policy, self.critic, self.reference = args, policy, critic, reference
        self.rate, self.ranks = rate, ranks
        self.config = from_flags(PPOConfig, args)
        self.loss = replace(from_flags(LossConfig, args), loss_type="bnpo")
        self.updates = make_plan(args, 1, 100).optimizer_steps_per_round

    def prepared(self, batch, cut):
        return before_training(
            split_round(
                batch, 1, replace(cut, overlong_filter=self.args.overlong_filter), self.ranks
            ),
            self.policy,
            self.reference,
            self.args.temperature,
            old_policy=needs_old_policy(self.args, self.updates),
            critic=self.critic,
        )

    def advantages(self, batch, steps):
        return token_advantages(batch, steps, self.config, self.ranks)

    def step(self, micro_batches, advantages, number):
        frozen = number < self.args.critic_warmup_steps
        policy = (self.policy, self.loss, self.args.temperature, self.rate, self.ranks)
        metrics = train_step(micro_batches, advantages.values, *policy, frozen=frozen)
        critic = TrainedCritic(self.critic, LearningRate("constant", self.rate, 0, 8), self.config)
        return metrics | critic_step(micro_batches, advantages, critic, self.ranks)


@dataclass
class Case:
    """One run.

    Attributes:
        backend: `local`, `ddp`, `fsdp2`, what `--deepspeed` takes, or `summed`: plain
            torch on every rank, which takes no step and writes the first step's gradients, summed over ranks, in place
            of weights.
        sequence: `--sequence_parallel_size`.
        mu: of CHORD.
        images: prompts have some, and all parts of the model are trained.
        silent: two of the four groups have reward 0 throughout.
        cuts: of each step, see `step_on`.
        loss: fields of LossConfig, and overlong_filter.
        mix_after: the step after which the reference moves to the policy.
        train: full, lora or qlora, with a prefix to freeze behind a colon (`full:model.embed`), or with flags of the
            adapters as JSON (`lora:{"use_dora": true}`).
        reload_after: the step after which the training state goes through `training_state` into a new backend.
        away: between two steps all that can leaves the device, and nothing is left of it there.
        ppo: flags of PPO, for steps of it in place of GRPO's.
    """

    backend: str
    model: str
    out: str
    dtype: str = "float32"
    cuts: str = "150 150 150"
    loss: dict = field(default_factory=dict)
    rate: float = 1e-3
    mix_after: int | None = None
    train: str = "full"
    optim: str = "adamw_torch_fused"
    checkpointing: bool = False
    reload_after: int | None = None
    ppo: str = ""
    away: bool = False
    sequence: int = 1
    silent: bool = False
    mu: float = 0.0
    images: bool = False


def run_ppo(case, ranks):
    """Optimizer steps of PPO, each on a round of its own, cut as `cuts` say; the critic goes through its saved state
    too."""
    policy, critic = open_backend(case, ranks), open_critic_backend(case, ranks)
    args = parse_arguments(
        RlhfArguments,
        f"--rlhf_type ppo --model {case.model} --dataset a.jsonl --reward_funcs format --num_generations {GROUP} "
        f"--per_device_train_batch_size {COMPLETIONS} --max_steps 8 --lr_scheduler_type constant --temperature 0.9 "
        f"{case.ppo}".split(),
    )
    reference = policy.reference(args.offload_ref_model) if args.wants_reference else None
    steps = []
    for number, cut in enumerate(case.cuts.split()):
        ppo, batch = Ppo(args, policy, critic, reference, case.rate, ranks), ragged_round()
        batch.rewards[5] = torch.nan
        prepared = ppo.prepared(
            batch, Batching(FORMS[cut.lstrip("0123456789")], 1, GROUP, int(cut.rstrip("ps")))
        )
        advantages, metrics = ppo.advantages(batch, prepared)
        steps.append(metrics | ppo.step(prepared[0], advantages, number))
        if len(steps) == case.reload_after:
            policy = reloaded(policy, ranks, case.out, lambda: open_backend(case, ranks))
            critic = reloaded(critic, ranks, case.out, lambda: open_critic_backend(case, ranks))
    weights = {}
    for prefix, backend in (("", policy), ("critic.", critic)):
        for bucket in backend.weight_buckets(policy_weights(backend.model)):
            weights |= {prefix + name: tensor.float() for name, tensor in bucket}
    if ranks.is_rank0:
        out = Path(case.out)
        save_file(
            {name: tensor.clone() for name, tensor in weights.items()},
            out.with_suffix(".safetensors"),
        )
        out.write_text(
            json.dumps(
                {"steps": steps, "generation_equals_weights": True, "backend": policy.describe()}
            )
        )


def open_critic_backend(case, ranks):
    optimizer = OptimizerConfig(case.rate, 0.1, 0.9, 0.95, 1e-8, 1.0, case.optim)

    def load():
        return load_critic(case.model, case.dtype, case.checkpointing)

    if case.backend == "local":
        return LocalBackend(load(), optimizer, wrap=Critic)
    if case.backend == "ddp":
        from swift_r1.training.backends.ddp import DdpBackend

        return DdpBackend(load(), optimizer, ranks, Critic)
    if case.backend == "summed":
        return Summed(load(), optimizer, wrap=Critic)
    if case.backend.startswith("fsdp"):
        return fsdp_backend(case, load, optimizer, ranks, Critic)
    from swift_r1.training.backends.deepspeed import DeepSpeedBackend

    dtype, config = getattr(torch, case.dtype), read_config(case.backend)
    return DeepSpeedBackend(load, dtype, optimizer, config, ranks, wrap=Critic)


class Summed(LocalBackend):
    def step(self, learning_rate):
        gradients = {
            name: one.grad for name, one in self.model.named_parameters() if one.requires_grad
        }
        for gradient in gradients.values() if dist.is_initialized() else ():
            dist.all_reduce(gradient)
        self.gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        self.optimizer.zero_grad(set_to_none=False)
        return torch.stack([one.norm() for one in self.gradients.values()]).norm().item()

    def weight_buckets(self, weights, to=0, on_host=True):
        yield list(self.gradients.items())


def open_backend(case, ranks):
    kind, _, more = case.train.partition(":")
    trained = {
        "train_type": kind,
        "lora_rank": 4,
        "lora_alpha": 16,
        "target_modules": ["all-linear"],
    }
    if kind == "full":
        trained["freeze_parameters"] = [more] if more else []
    elif more:
        trained |= json.loads(more)
    ratio = trained.pop("lorap_lr_ratio", None)
    if case.images:
        trained |= {"freeze_vit": False, "freeze_aligner": False}

    def load():
        torch.manual_seed(0)
        return load_model(
            case.model,
            case.dtype,
            case.checkpointing,
            AdapterArguments(**trained),
            quantization=Quantization() if kind == "qlora" else None,
            towers=case.images,
        )

    optimizer = OptimizerConfig(case.rate, 0.1, 0.9, 0.95, 1e-8, 1.0, case.optim, ratio)
    if case.backend == "local":
        return LocalBackend(load(), optimizer)
    if case.backend == "ddp":
        from swift_r1.training.backends import ddp

        ddp.BUCKET_NUMBERS = 10_000  # several buckets
        return ddp.DdpBackend(load(), optimizer, ranks)
    if case.backend == "summed":
        return Summed(load(), optimizer)
    if case.backend.startswith("fsdp"):
        return fsdp_backend(case, load, optimizer, ranks)
    from deepspeed.accelerator import get_accelerator

    from swift_r1.training.backends.deepspeed import DeepSpeedBackend

    # On a CPU DeepSpeed asks for fast instructions; the slow ones compute the same.
    get_accelerator().is_fp16_supported = lambda: True
    config = read_config(case.backend)
    return DeepSpeedBackend(
        load, getattr(torch, case.dtype), optimizer, config, ranks, kind == "qlora"
    )


def fsdp_backend(case, load, optimizer, ranks, wrap=Policy):
    from swift_r1.training.backends.fsdp import FsdpBackend

    return FsdpBackend(load, optimizer, ranks, wrap)


def be_away(backend, reference):
    """All leave, in two calls, and come back to memory that was not theirs."""
    tensors = (backend.weights, backend.states, *([reference.weights] if reference else []))
    device = torch.device("cpu")
    for one in (*tensors, *tensors):
        one.leave(device)
    gone = [storage for one in tensors for storage, *_ in one._away]
    masters = {one.untyped_storage().data_ptr() for one in backend.states._tensors()}
    assert gone and all(storage.nbytes() == 0 for storage in gone) and masters == {0}
    assert all(
        part_of(weight).untyped_storage().nbytes() == 0 for weight in backend.model.parameters()
    )
    for one in tensors:
        one.come_back()
    assert all(storage.nbytes() for storage in gone)


def reloaded(backend, ranks, out, make):
    """A new backend that goes on from what `backend` would save."""
    state = {name: tensor for bucket in backend.training_state() for name, tensor in bucket}
    folder = Path(out).with_suffix(".state")
    folder.mkdir(exist_ok=True)
    write_tensors(folder / f"{ranks.rank}.safetensors", state)
    ranks.barrier()
    fresh = make()
    fresh.load_training_state(SavedTensors(folder, ""))
    return fresh


@cache
def with_sequence(ranks, size):
    return (
        replace(ranks, sequence=join_sequence_group(size, timedelta(seconds=60)))
        if size > 1
        else ranks
    )


def run(case, ranks):
    ranks = with_sequence(ranks, case.sequence)
    if case.ppo:
        run_ppo(case, ranks)
        return
    backend = open_backend(case, ranks)
    check_logprobs(backend)
    overlong_filter = case.loss.pop("overlong_filter", False)
    config = LossConfig(**{"beta": 0.1} | case.loss)
    reference = backend.reference() if config.beta else None
    steps = []
    vision = None
    if case.images:
        processor = VisionProcessor.load(case.model, load_tokenizer(case.model))
        vision = Vision(processor, backend.model, together=ranks.world_size > 1)
    for cut in case.cuts.split():
        batch = ragged_round(vision, Path(case.model))
        if case.silent:
            batch.rewards[GROUP : 3 * GROUP] = 0
        steps.append(
            step_on(
                batch,
                backend,
                reference,
                config,
                cut,
                ranks,
                overlong_filter,
                case.rate,
                mu=case.mu,
                vision=vision,
            )
        )
        if len(steps) == case.mix_after:
            reference.mix_in_policy(0.6)
        if len(steps) == case.reload_after:
            backend = reloaded(backend, ranks, case.out, lambda: open_backend(case, ranks))
        if case.away:
            be_away(backend, reference)
    weights = {
        name: tensor
        for bucket in backend.weight_buckets(policy_weights(backend.model))
        for name, tensor in bucket
    }
    generation = backend.generation_model()
    if ranks.is_rank0:
        out = Path(case.out)
        wanted = [] if case.backend == "summed" else policy_weights(generation)
        same = all(torch.equal(weights[w.name], w.value()) for w in wanted)
        save_file(
            {name: tensor.float() for name, tensor in weights.items()},
            out.with_suffix(".safetensors"),
        )
        out.write_text(
            json.dumps(
                {"steps": steps, "generation_equals_weights": same, "backend": backend.describe()}
            )
        )


def main():
    ranks = join_ranks(600, distributed=len(sys.argv) > 1)
    ranks.use_device()
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            run(Case(**json.loads(line)), ranks)
            print("ok", flush=True)
        except Exception:  # noqa: BLE001  told to the test
            print(json.dumps(traceback.format_exc()), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
