"""Flags of the algorithms: advantages and losses of GRPO and its kin, and PPO's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from swift_r1.algorithms.method import Field, Loss, with_settings
from swift_r1.algorithms.methods import ESTIMATORS, LOSSES
from swift_r1.flags.fields import RATE, Scope, flag, resumable_flag

MS_SWIFT_RLHF_TYPES = ("kto", "rm", "gkd")
"""`--rlhf_type` of runs that are handed to ms-swift."""
DEFAULT_SCALE_REWARDS = {name: estimator.default_scale for name, estimator in ESTIMATORS.items()}
"""`--advantage_estimator` to the `--scale_rewards` that its paper, and ms-swift, go with."""


def _not_ppo(why: str) -> Scope:
    return Scope(lambda args: args.rlhf_type != "ppo", f"with --rlhf_type ppo: {why}")


@cache
def _only(*losses: str) -> Scope:
    """Returns the scope of flags that these losses read."""
    return Scope(
        lambda args: args.loss_type in losses,
        "with --loss_type {loss_type}: leave it out",
        allow_default=True,
    )


def _reads(name: str) -> Scope:
    """Returns the scope of a flag that several losses share."""
    return _only(*(loss.name for loss in LOSSES.values() if name in loss.reads))


def _ignored(name: str) -> list[Scope]:
    """Returns a scope for each loss that ignores a flag."""
    return [
        _unless(loss.name, loss.ignores[name]) for loss in LOSSES.values() if name in loss.ignores
    ]


def _unless(loss: str, why: str) -> Scope:
    return Scope(lambda args: args.loss_type != loss, f"with --loss_type {loss}: {why}")


_PPO = Scope(lambda args: args.rlhf_type != "grpo", "with --rlhf_type grpo: it is PPO's")
NO_GROUPS = _not_ppo("rewards are not compared in groups")
_KL = _not_ppo("the KL is in the reward: --kl_coef")
_EQUAL = _not_ppo("a group of equal rewards teaches the critic too")
_ONE_LOSS = _not_ppo("it has one loss, the mean over tokens")
_CHORD = Scope(lambda args: bool(args.chord_sft_dataset), "without --chord_sft_dataset")
_REFERENCE = Scope(
    lambda args: args.wants_reference,
    "without a KL: give --beta (--kl_coef with --rlhf_type ppo) above 0",
    allow_default=True,
)
_REFERENCE_OR_PPO = Scope(
    lambda args: args.wants_reference or args.rlhf_type == "ppo",
    "without a KL: give --beta above 0",
    allow_default=True,
)
_OWN_REFERENCE = Scope(
    lambda args: args.train_type == "full" or args.ref_model is not None,
    "with --train_type {train_type}: the reference is the model without its adapters",
    allow_default=True,
)
_SAME_REFERENCE = Scope(
    lambda args: args.ref_model is None, "with --ref_model, another model", allow_default=True
)
_SYNC_REFERENCE = Scope(lambda args: args.sync_ref_model, "without --sync_ref_model true")
_CORRECTED = Scope(
    lambda args: args.correction is not None, "without --rollout_importance_sampling_mode"
)
_RESAMPLES = Scope(lambda args: args.dynamic_sample, "without --dynamic_sample true")


def _own_flag(method: Any, item: Field) -> Any:
    """Returns a flag of one loss or estimator."""
    scopes = [_of_estimator(method.name)]
    if isinstance(method, Loss):
        scopes = [_ONE_LOSS, _only(method.name)]
    return flag(item.default, item.metadata["help"], *scopes, **item.metadata["limits"])


@cache
def _of_estimator(name: str) -> Scope:
    return Scope(
        lambda args: args.advantage_estimator == name, f"without --advantage_estimator {name}"
    )


@dataclass(frozen=True, kw_only=True)
@with_settings([*LOSSES.values(), *ESTIMATORS.values()], _own_flag)
class AlgorithmArguments:
    """Algorithm."""

    rlhf_type: str = flag(
        "grpo",
        "grpo or ppo; dpo, cpo, simpo and orpo have flags of their own; kto, rm and gkd are handed to ms-swift",
        choices=("grpo", "ppo"),
        elsewhere=dict.fromkeys(
            MS_SWIFT_RLHF_TYPES,
            "is ms-swift's: with --rlhf_type on the command line the run is handed to it, where it is installed",
        ),
        required=True,
    )
    beta: float = flag(
        0.0, "weight of the KL to the reference policy", _KL, at_least=0, ms_swift="0.04"
    )
    epsilon: float = flag(
        0.2,
        "lower clip range of the ratio (gmpo: of its log; dppo_tv, dppo_kl: of the divergence)",
        _reads("epsilon"),
        at_least=0,
        less_than=1,
        aliases=("cliprange",),
    )
    epsilon_high: float | None = flag(
        None,
        "upper clip range of the same (default: --epsilon; cispo: 5.0)",
        _reads("epsilon_high"),
        at_least=0,
    )
    delta: float | None = flag(
        None,
        "bound of the ratio where the advantage is negative; above 1 + --epsilon_high",
        _reads("delta"),
        more_than=1,
    )
    loss_type: str = flag(
        "grpo",
        "the loss, and its divisor",
        _ONE_LOSS,
        choices=tuple(LOSSES),
    )
    scale_rewards: str | None = flag(
        None,
        "standard deviation to divide by (default: group; rloo: none; reinforce_plus_plus: batch); gdpo: batch, with "
        "--multi_objective_aggregation normalize_then_sum",
        _not_ppo(
            "rewards are not compared in groups; --whiten_rewards and --whiten_advantages scale"
        ),
        *_ignored("scale_rewards"),
        choices=("group", "batch", "none", "gdpo"),
        synonyms={"true": "group", "false": "none"},
    )
    advantage_estimator: str = flag(
        "grpo",
        "how rewards become advantages; reinforce_plus_plus (or ..._batch) has the batch's mean as its baseline, "
        "reinforce_plus_plus_baseline (or ..._group) the group's, optimal_token_baseline one for each token; gigpo "
        "compares turns that begin in the same state too",
        _not_ppo("advantages come from the critic"),
        choices=tuple(ESTIMATORS),
        synonyms={
            estimator.synonym: name
            for name, estimator in ESTIMATORS.items()
            if estimator.synonym is not None
        },
        ms_swift="grpo; its reinforce_plus_plus is reinforce_plus_plus_group here",
    )
    importance_sampling_level: str = flag(
        "token",
        "level of the importance ratio; sequence_token: the completion's, with the gradient of each token's own",
        _not_ppo("advantages, and so ratios, are of tokens"),
        *_ignored("importance_sampling_level"),
        choices=("token", "sequence", "sequence_token"),
    )
    top_entropy_quantile: float = flag(
        1.0,
        "share of tokens, by highest entropy, that keep their policy loss",
        more_than=0,
        at_most=1,
    )
    entropy_coef: float = flag(
        0.0,
        "weight of an entropy bonus: so much times the entropy of the policy at each token is subtracted from its loss",
        at_least=0,
    )
    overlong_filter: bool = flag(
        False, "exclude truncated completions from the loss (their rewards still count)"
    )
    kl_in_reward: bool = flag(
        False,
        "subtract --beta times the KL from the reward instead of adding it to the loss",
        _not_ppo("the KL is always in the reward: --kl_coef"),
        _REFERENCE_OR_PPO,
        ms_swift="true for rloo and reinforce_plus_plus",
    )
    rollout_importance_sampling_mode: str | None = flag(
        None,
        "correct for the gap between the engine's log-probs and the trainer's (default: not at all; with "
        "--async_generate token_truncate)",
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    rollout_importance_sampling_threshold: float = flag(
        2.0, "largest weight in it", _CORRECTED, more_than=0
    )
    off_policy_sequence_mask_delta: float | None = flag(
        None,
        "completions of negative advantage leave the loss where their mean log-prob is lower than the engine's by more "
        "than this (default: none)",
        _not_ppo("advantages are of tokens"),
        at_least=0,
    )
    log_rollout_offpolicy_metrics: bool = resumable_flag(
        False,
        "log perplexities, KL, chi-squared and effective sample sizes of engine against trainer, under rollout/",
    )
    router_replay_mode: str = flag(
        "disabled",
        "the experts that a mixture's routers choose in training: their own, again those of the pass before the round's "
        "first update (R2), or those that the engine chose while sampling (R3)",
        choices=("disabled", "R2", "R3"),
    )
    log_entropy: bool = flag(
        False,
        "write each completion's mean entropy to completions.jsonl, and log entropy/max and entropy/min (the mean is "
        "always logged); one forward pass more where a round has one optimizer step",
    )
    dynamic_sample: bool = flag(
        False, "replace groups with equal rewards by groups of further prompts", _EQUAL
    )
    max_resample_times: int = flag(
        3,
        "maximum resampling attempts per round; remaining groups are trained on",
        _EQUAL,
        _RESAMPLES,
        at_least=1,
    )
    ref_model: str | None = flag(
        None,
        "folder or id of the reference policy, of the policy's architecture and tokenizer (default: --model, without "
        "adapters)",
        _REFERENCE,
    )
    sync_ref_model: bool = flag(
        False,
        "move the reference towards the policy at intervals",
        *(_REFERENCE, _OWN_REFERENCE, _SAME_REFERENCE),
    )
    ref_model_sync_steps: int = flag(
        512, "optimizer steps between these moves", _SYNC_REFERENCE, at_least=1
    )
    ref_model_mixup_alpha: float = flag(
        0.6,
        "reference = alpha * policy + (1 - alpha) * reference",
        _SYNC_REFERENCE,
        more_than=0,
        at_most=1,
    )
    offload_ref_model: bool = flag(
        False,
        "keep the reference in host memory except while it computes (GPU only)",
        _REFERENCE,
        _OWN_REFERENCE,
    )
    num_iterations: int = flag(
        1,
        "optimizer passes over a round of completions",
        at_least=1,
        aliases=("num_ppo_epochs",),
        ms_swift="4 for PPO",
    )
    steps_per_generation: int | None = flag(
        None,
        "micro-batches per rank that are generated at once (default: --gradient_accumulation_steps, and no fewer)",
        at_least=1,
    )
    generation_batch_size: int | None = flag(
        None,
        "completions generated at once, over all ranks",
        at_least=2,
        instead_of=("steps_per_generation",),
    )


@dataclass(frozen=True, kw_only=True)
class ChordArguments:
    """CHORD."""

    chord_sft_dataset: list[str] = flag(
        [],
        "data sets of questions with answers, written like --dataset; mu times the loss of their answers and 1 - mu "
        "times the policy's make the loss",
        _not_ppo("it is GRPO's"),
    )
    chord_sft_per_device_train_batch_size: int | None = flag(
        None, "demonstrations per process and accumulation step", _CHORD, at_least=1
    )
    chord_enable_phi_function: bool = flag(
        False, "weight each demonstration token by p (1 - p)", _CHORD
    )
    chord_mu_warmup_steps: int | None = flag(
        None, "optimizer steps until mu peaks", _CHORD, at_least=0
    )
    chord_mu_decay_steps: int | None = flag(
        None, "steps from the peak to the final value", _CHORD, at_least=0
    )
    chord_mu_peak: float | None = flag(None, "peak value of mu", _CHORD, at_least=0, at_most=1)
    chord_mu_valley: float | None = flag(None, "final value of mu", _CHORD, at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True)
class PPOArguments:
    """PPO."""

    critic_model: str | None = flag(
        None,
        "folder or id of the critic: a language model, or the critic/ of a checkpoint (default: --model)",
        _PPO,
    )
    critic_learning_rate: float | None = flag(
        None, "the critic's peak learning rate (default: --learning_rate)", _PPO, **RATE
    )
    critic_warmup_steps: int = flag(
        0, "initial optimizer steps that train only the critic", _PPO, at_least=0
    )
    num_mini_batches: int | None = flag(
        None,
        "optimizer steps in one pass over a round, each of --gradient_accumulation_steps micro-batches",
        _PPO,
        at_least=1,
        instead_of=("steps_per_generation", "generation_batch_size"),
        ms_swift="1",
    )
    kl_coef: float = flag(
        0.0, "weight of the KL in each token's reward", _PPO, at_least=0, ms_swift="0.05"
    )
    gamma: float = flag(1.0, "discount factor of later rewards", _PPO, at_least=0, at_most=1)
    lam: float = flag(
        0.95,
        "lambda of GAE: 0 trusts the critic at the next token, 1 the whole return",
        _PPO,
        at_least=0,
        at_most=1,
    )
    cliprange_value: float = flag(
        0.2, "clip range of the value within a round; 0: no clipping", _PPO, at_least=0
    )
    vf_coef: float = flag(
        0.1, "weight of the value loss, applied to its gradient before clipping", _PPO, more_than=0
    )
    whiten_rewards: bool = flag(
        False, "divide a round's token rewards by their standard deviation", _PPO
    )
    whiten_advantages: bool = flag(
        True, "give a round's advantages mean 0 and standard deviation 1", _PPO
    )
