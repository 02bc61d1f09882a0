"""Rewards, the loss and what it does to the policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from swift_r1.algorithms.method import Distillation, Loss
from swift_r1.algorithms.methods import DISTILLATIONS, LOSSES
from swift_r1.record.glossary.metric import Metric as M


def _of_methods(methods: Iterable[Loss | Distillation]) -> Iterator[M]:
    """Yields what single methods log, as their files declare it."""
    for method in methods:
        yield from (M(*logged, f"`{method.chosen_by}`") for logged in method.metrics)


REWARDS = (
    M(
        "reward",
        "mean reward of the completions: the weighted sum of the reward functions",
        "",
        "rises",
    ),
    M(
        "reward_stderr",
        "standard error of `reward`; completions of one prompt resemble each other, and count accordingly",
        "",
        "small beside the rise that is to be seen",
    ),
    M(
        "reward_std",
        "standard deviation of rewards within a group, averaged over groups",
        "",
        "above 0: without a difference there is no advantage",
    ),
    M(
        "frac_reward_zero_std",
        "groups whose rewards are all equal",
        "share",
        "below 0.5; near 1 nothing is learned: the prompts are too hard, too easy or the policy has settled",
    ),
    M("frac_groups_all_invalid", "groups without any usable reward", "share", "0"),
    M(
        "tasks/<task>/prompts",
        "prompts of one task in the round, those that `--dynamic_sample` replaced too",
        "prompts",
        "",
        "`--mixture`",
    ),
    M(
        "tasks/<task>/<metric>",
        "the metric of that name over the completions of one task: of rewards, completions, turns, tools and agents",
        "",
        "",
        "`--mixture`",
    ),
    M("rewards/<reward>/mean", "mean of one reward function or reward model", "", "rises"),
    M(
        "rewards/<reward>/stderr",
        "standard error of that mean, as `reward_stderr`",
        "",
        "small beside the rise that is to be seen",
    ),
    M(
        "rewards/<reward>/equal_differ",
        "completions that equal an earlier one of their prompt and yet got another value",
        "share",
        "0: above it the function is noisy",
        "some completions are equal",
    ),
    M(
        "recheck/<reward>/changed",
        "completions that got another value when the function was asked again",
        "share",
        "0: above it the function is noisy",
        "`--recheck_rewards`, rounds 8, 16, 32, …",
    ),
    M(
        "recheck/<reward>/noise",
        "share of the variance of the reward that is only due to asking twice (1 less its reliability)",
        "share",
        "0; near 1 the reward is chance",
        "`--recheck_rewards`, rounds 8, 16, 32, …",
    ),
    M(
        "recheck/<reward>/reordered",
        "completions that got another value when they came in another order, and the same in the same order",
        "share",
        "0: above it values may belong to other completions",
        "`--recheck_rewards`, rounds 8, 16, 32, …",
    ),
    M(
        "recheck/<reward>/own",
        "completions that earn more with their row's columns than with another row's",
        "share",
        "above `other`, if the function reads columns",
        "`--recheck_rewards`, rounds 8, 16, 32, …",
    ),
    M(
        "recheck/<reward>/other",
        "completions that earn less with their row's columns than with another row's",
        "share",
        "below `own`",
        "`--recheck_rewards`, rounds 8, 16, 32, …",
    ),
    M(
        "recheck/<reward>/before",
        "completions that earn more with the columns of the row before their own",
        "share",
        "below `own`",
        "`--recheck_rewards`, and `own` does not exceed `other`",
    ),
    M(
        "recheck/<reward>/after",
        "the same with the columns of the row after it",
        "share",
        "below `own`",
        "`--recheck_rewards`, and `own` does not exceed `other`",
    ),
    M(
        "advantages/mean_size",
        "mean of the completions' advantages without their signs",
        "",
        "above 0",
    ),
    M(
        "policy/moved",
        "mean change of a token's log-prob since the run began, without its sign, on what the policy wrote of the first "
        "64 tokens of up to four completions of its first round, behind their whole prompts, images included",
        "nats",
        "grows; near 0 after many rounds the policy does not move",
        "rounds 2 to 8, then every fourth",
    ),
    M(
        "policy/kl_to_start",
        "KL divergence between the policy of the start and this one, estimated on the same tokens (k3)",
        "nats per token",
        "grows slowly",
        "rounds 2 to 8, then every fourth",
    ),
    M(
        "rewards/<reward>/std",
        "standard deviation of one reward over all completions",
        "",
        "above 0, until it is learned",
    ),
    M(
        "rewards/<reward>/invalid",
        "completions without a usable value of this reward",
        "share",
        "0; over `--max_invalid_reward_ratio` the run ends; `invalid_rewards.jsonl` has the causes",
    ),
    M(
        "rewards/<reward>/invalid/<kind>",
        "invalid values of one kind: `value` (not a finite number), `shape` (not one value per completion), "
        "`exception`, "
        "`timeout`, `died` (its process), `memory`",
        "share",
        "",
        "there were any",
    ),
    M(
        "rewards/<reward>/seconds",
        "total time in the function over its processes",
        "s",
        "may be hidden behind generation: `time/reward` is what training waits for",
    ),
    M(
        "dynamic_sample/resampled",
        "groups replaced because their rewards were equal",
        "groups",
        "each costs a generation: most of a round means prompts of the wrong difficulty",
        "`--dynamic_sample true`",
    ),
    M(
        "dynamic_sample/kept_without_signal",
        "groups with equal rewards that were trained on because `--max_resample_times` was reached",
        "groups",
        "0",
        "`--dynamic_sample true`",
    ),
    M(
        "kl_penalty",
        "mean KL penalty subtracted from a completion's reward",
        "",
        "small against `reward`",
        "`--kl_in_reward true`, or PPO with a KL",
    ),
)

POLICY = (
    M(
        "loss",
        "policy loss of the whole optimizer step",
        "",
        "tells little: with one step per round it is near 0 by construction; look at `reward`",
    ),
    M(
        "grad_norm",
        "norm of the gradient, before clipping",
        "",
        "steady; single spikes: a few tokens dominate (`--max_grad_norm`); 0: nothing to learn from",
    ),
    M("learning_rate", "learning rate of this step", "", "the schedule that was asked for"),
    M(
        "loss_scale",
        "factor that the loss was multiplied by",
        "",
        "halves where the gradient overflows",
        "float16",
    ),
    M(
        "skipped",
        "1 if loss or gradient was not finite and the update was skipped; the batch is in `skipped/`",
        "share of steps",
        "0; too many in a row end the run (`--max_skipped_steps`)",
    ),
    M(
        "weights/changed",
        "16-bit weights that the step changed, in a sample of each matrix",
        "share",
        "0.3 % at a learning rate of 5e-7; below 0.01 % updates are rounded away",
        "weights in 16 bits",
    ),
    M(
        "ratio",
        "importance ratio: the policy's probability of a token over that before the round (at sequence level of a "
        "completion), mean",
        "",
        "1 in the first step of a round; within 0.1 of it later",
    ),
    M(
        "clip_ratio/low",
        "ratios below 1 - `--epsilon` where the advantage is negative (`gmpo`: log-ratios below -`--epsilon`; `dppo_tv`, "
        "`dppo_kl`: what their mask takes out there): these tokens have no gradient; 0 for `cispo`, "
        "`sapo`, `real` and `kl_cov`",
        "share",
        "0 in the first step of a round, a few percent later; 30 % on both sides together: steps are too large or "
        "completions too old",
    ),
    M(
        "clip_ratio/high",
        "ratios above 1 + `--epsilon_high` where the advantage is positive (`gmpo`, `dppo_tv`, `dppo_kl`: likewise); "
        "with `cispo` those above the cap; 0 for "
        "`sapo`, `real` and `kl_cov`",
        "share",
        "as `clip_ratio/low`",
    ),
    M(
        "entropy",
        "mean entropy of the policy per token",
        "nats",
        "falls slowly; below 0.1 without more reward the policy has settled too early",
    ),
    M("entropy/max", "largest mean entropy of a completion", "nats", "", "`--log_entropy true`"),
    M(
        "entropy/min",
        "smallest mean entropy of a completion",
        "nats",
        "near 0: a completion that the policy knows by heart",
        "`--log_entropy true`",
    ),
    M(
        "entropy/threshold",
        "least entropy at which a token is trained on",
        "nats",
        "",
        "`--top_entropy_quantile` below 1",
    ),
    M(
        "entropy_coef",
        "weight that the entropy bonus had in the step",
        "",
        "adaptive: 0 while `entropy` is above `--entropy_target`; at `--entropy_coef_max` for long the target is too high",
        "`--entropy_coef` above 0 or `--use_adaptive_entropy true`",
    ),
    M(
        "kl",
        "mean KL of the policy to its reference per token (k3 estimator)",
        "nats",
        "0 to 0.3; above 1 and growing the policy leaves its reference: raise `--beta`, lower the learning rate",
        "there is a reference (`--beta` above 0)",
    ),
    M(
        "kl/pull",
        "mean size of the KL's gradient at a token's log-prob, where an advantage's is its own size",
        "",
        "below a tenth of `advantages/mean_size`; beside it the policy stays where its reference is: lower `--beta`",
        "the KL is in the loss (`--beta` above 0)",
    ),
    M(
        "ref_model_synced",
        "1 if the reference was moved towards the policy",
        "",
        "",
        "`--sync_ref_model true`",
    ),
    M("micro_batches", "micro-batches of each rank in the step"),
    M(
        "tokens_computed",
        "tokens that went through the model on all ranks: prompts, completions and padding",
        "tokens",
    ),
    M("token_accuracy", "learned tokens that were the likeliest", "share", "rises", "`swift sft`"),
    M("perplexity", "e to the power of `loss`", "", "falls, never below 1", "`swift sft`"),
    M("tokens_learned", "tokens whose mean the loss is", "tokens", "", "`swift sft`"),
    *_of_methods(LOSSES.values()),
)

CRITIC = (
    M("value_loss", "the critic's loss", "", "falls, then follows the returns' variance", "PPO"),
    M(
        "explained_variance",
        "1 - Var(returns - values) / Var(returns)",
        "",
        "rises towards 1; at or below 0 the critic is no better than a constant: a higher critic learning rate or "
        "`--critic_warmup_steps`",
        "PPO",
    ),
    M("returns/mean", "mean of the returns at tokens", "", "follows `reward`", "PPO"),
    M("returns/std", "standard deviation of the returns", "", "above 0", "PPO"),
    M("values/mean", "mean of the critic's values", "", "near `returns/mean`", "PPO"),
    M(
        "clip_ratio/value",
        "tokens whose value was clipped (`--cliprange_value`)",
        "share",
        "",
        "PPO",
    ),
    M("critic/grad_norm", "norm of the critic's gradient, before clipping", "", "steady", "PPO"),
    M("critic/learning_rate", "the critic's learning rate", "", "", "PPO"),
    M(
        "critic/loss_scale",
        "factor that the critic's loss was multiplied by",
        "",
        "",
        "PPO in float16",
    ),
)

TEACHER = (
    M(
        "teacher_kl",
        "mean over tokens of the policy's log-prob minus the teacher's (or the KL over the teacher's likeliest tokens)",
        "nats",
        "falls",
        "a teacher",
    ),
    *_of_methods(DISTILLATIONS.values()),
    M(
        "chord/mu",
        "weight of the experts' loss",
        "",
        "follows `--chord_mu_peak` and related flags",
        "CHORD",
    ),
    M(
        "chord/nll",
        "mean negative log-prob of a token of the experts' answers",
        "nats",
        "falls",
        "CHORD",
    ),
)
