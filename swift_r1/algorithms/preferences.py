"""Losses of answers that are compared: DPO and its kin, CPO, SimPO and ORPO.

Each is a function of a whole optimizer step, which sees the sums of the answers' log-probs alone: nothing depends on how
the step is cut into micro-batches or among ranks. Its gradient by these sums is all that a backward pass needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

_LEAST_SMOOTHING = 1e-3
"""`--label_smoothing` of `exo_pair`, whose loss has its logarithm, where it is 0 (arXiv 2402.00856)."""


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The flags of the losses, whose help says what each is."""

    rlhf_type: str = "dpo"
    loss_type: tuple[str, ...] | list[str] = ("sigmoid",)
    loss_weights: tuple[float, ...] | list[float] = ()
    beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float | None = None
    ld_alpha: float | None = None
    discopop_tau: float = 0.05
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    cpo_alpha: float = 1.0
    simpo_gamma: float = 1.0


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """The answers of an optimizer step, float64 `[N]` each.

    Example: two answers of three and two tokens under a policy that is the reference:
        scores [-4.2, -1.5], logps [-4.2, -1.5], reference [-4.2, -1.5], tokens [3, 2]

    Attributes:
        scores: the sum of the log-probs of its learned tokens, of those behind the shorter answer's length `ld_alpha`
            times (LD-DPO, arXiv 2409.06411).
        logps: the same, each token once.
        reference: the same under the reference policy; 0 without one.
        tokens: how many are learned.
    """

    scores: Tensor
    logps: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def ratios(self) -> Tensor:
        """Returns the log-ratios to the reference."""
        return self.scores - self.reference

    def part(self, places: slice) -> AnswerSums:
        return AnswerSums(*(getattr(self, one.name)[places] for one in fields(self)))

    def averaged(self) -> AnswerSums:
        """Returns the same with the means over the tokens in the place of the scores."""
        tokens = self.tokens.clamp(min=1)
        return replace(self, scores=self.scores / tokens, reference=self.reference / tokens)


@dataclass(frozen=True, slots=True)
class PairLoss:
    """What a loss makes of an optimizer step: its terms, whose sum is the loss, and what it holds each answer to be
    worth, without gradient."""

    terms: Mapping[str, Tensor]
    chosen: Tensor
    rejected: Tensor

    @property
    def loss(self) -> Tensor:
        return torch.stack([*self.terms.values()]).sum()


def compared(answers: AnswerSums, config: PreferenceConfig) -> PairLoss:
    """Returns the loss of pairs: of chosen answers, each with the rejected one behind it."""
    if "ipo" in config.loss_type or "simpo" in config.loss_type or config.rlhf_type == "orpo":
        answers = answers.averaged()
    chosen, rejected = answers.part(slice(0, None, 2)), answers.part(slice(1, None, 2))
    return OBJECTIVES[config.rlhf_type](chosen, rejected, config)


def _dpo(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> PairLoss:
    """DPO (arXiv 2305.18290) and the losses that came of it, a sum of several by `loss_weights`; with `rpo_alpha` times
    -log p of the chosen answers' tokens (RPO, arXiv 2404.19733)."""
    weights = config.loss_weights or [1.0] * len(config.loss_type)
    terms: dict[str, Tensor] = {}
    for name, weight in zip(config.loss_type, weights, strict=True):
        one = _nll(chosen) if name == "sft" else DPO_LOSSES[name](chosen, rejected, config).mean()
        terms[name] = weight * one
    if config.rpo_alpha is not None:
        terms["rpo"] = config.rpo_alpha * _nll(chosen)
    return _worth(terms, config.beta * chosen.ratios, config.beta * rejected.ratios)


def _cpo(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> PairLoss:
    """CPO (arXiv 2401.08417); with `simpo` SimPO (arXiv 2405.14734), on means over tokens. Both have no reference."""
    [name] = config.loss_type
    margin = config.simpo_gamma / config.beta if name == "simpo" else 0.0
    function = DPO_LOSSES["sigmoid" if name == "simpo" else name]
    further = replace(chosen, scores=chosen.scores - margin)
    terms = {name: function(further, rejected, config).mean()}
    if config.cpo_alpha:
        terms["nll"] = config.cpo_alpha * _nll(chosen)
    return _worth(terms, config.beta * chosen.scores, config.beta * rejected.scores)


def _orpo(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> PairLoss:
    """ORPO (arXiv 2403.07691, eq. 6), on means over tokens."""
    one, other = chosen.scores, rejected.scores
    odds = one - other - (torch.log1p(-one.exp()) - torch.log1p(-other.exp()))
    terms = {"nll": _nll(chosen), "odds": -config.beta * logsigmoid(odds).mean()}
    return _worth(terms, config.beta * one, config.beta * other)


def _worth(terms: Mapping[str, Tensor], chosen: Tensor, rejected: Tensor) -> PairLoss:
    return PairLoss(terms, chosen.detach(), rejected.detach())


OBJECTIVES: Mapping[str, Callable[[AnswerSums, AnswerSums, PreferenceConfig], PairLoss]] = {
    "dpo": _dpo,
    "cpo": _cpo,
    "simpo": _cpo,
    "orpo": _orpo,
}


def _nll(answers: AnswerSums) -> Tensor:
    """Returns -log p of the answers' tokens, the mean over all of them."""
    return -answers.logps.sum() / answers.tokens.sum().clamp(min=1)


def _logits(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """Returns by how much the chosen answers are preferred, by log-ratios to the reference (f-DPO, arXiv 2309.16240)."""
    one, other = chosen.ratios, rejected.ratios
    if config.f_divergence_type == "alpha_divergence":
        alpha = config.f_alpha_divergence_coef
        return ((-alpha * other).exp() - (-alpha * one).exp()) / alpha
    if config.f_divergence_type == "js_divergence":
        return one - other - (softplus(one) - softplus(other))
    return one - other


def _smoothed(logits: Tensor, config: PreferenceConfig) -> Tensor:
    """Returns -log sigmoid of beta times the logits, where a share `label_smoothing` of the labels is wrong (cDPO)."""
    smoothing = config.label_smoothing
    scaled = config.beta * logits
    return -logsigmoid(scaled) * (1 - smoothing) - logsigmoid(-scaled) * smoothing


def _sigmoid(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    return _smoothed(_logits(chosen, rejected, config), config)


def _robust(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2403.00409."""
    smoothing = config.label_smoothing
    scaled = config.beta * _logits(chosen, rejected, config)
    both = -logsigmoid(scaled) * (1 - smoothing) + logsigmoid(-scaled) * smoothing
    return both / (1 - 2 * smoothing)


def _exo_pair(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2402.00856, eq. 16."""
    smoothing = config.label_smoothing or _LEAST_SMOOTHING
    scaled = config.beta * _logits(chosen, rejected, config)
    right = scaled.sigmoid() * (logsigmoid(scaled) - math.log(1 - smoothing))
    return right + (-scaled).sigmoid() * (logsigmoid(-scaled) - math.log(smoothing))


def _hinge(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """SLiC (arXiv 2305.10425)."""
    return torch.relu(1 - config.beta * _logits(chosen, rejected, config))


def _ipo(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2310.12036, on means over tokens."""
    return (_logits(chosen, rejected, config) - 1 / (2 * config.beta)) ** 2


def _bco_pair(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2404.04656; what rewards are compared with is their mean over the step."""
    one, other = config.beta * chosen.ratios, config.beta * rejected.ratios
    middle = torch.cat([one, other]).mean().detach()
    return -logsigmoid(one - middle) - logsigmoid(middle - other)


def _sppo_hard(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2405.00675."""
    half = 0.5 / config.beta
    return (chosen.ratios - half) ** 2 + (rejected.ratios + half) ** 2


def _nca_pair(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2402.05369."""
    one, other = config.beta * chosen.ratios, config.beta * rejected.ratios
    return -logsigmoid(one) - 0.5 * logsigmoid(-one) - 0.5 * logsigmoid(-other)


def _aot_unpaired(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2406.05882: the chosen answers of the step against the rejected ones, each in the order of their
    log-ratios."""
    return _smoothed(chosen.ratios.sort().values - rejected.ratios.sort().values, config)


def _aot(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2406.05882: by how much the policy prefers the chosen answers of the step against by how much the reference
    does, each in its order."""
    policy = (chosen.scores - rejected.scores).sort().values
    return _smoothed(policy - (chosen.reference - rejected.reference).sort().values, config)


def _apo_zero(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2408.06266, eq. 7."""
    return 1 - (config.beta * chosen.ratios).sigmoid() + (config.beta * rejected.ratios).sigmoid()


def _apo_down(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2408.06266, eq. 8."""
    apart = (config.beta * (chosen.ratios - rejected.ratios)).sigmoid()
    return (config.beta * chosen.ratios).sigmoid() + 1 - apart


def _discopop(chosen: AnswerSums, rejected: AnswerSums, config: PreferenceConfig) -> Tensor:
    """arXiv 2406.08414."""
    scaled = config.beta * (chosen.ratios - rejected.ratios)
    share = (scaled / config.discopop_tau).sigmoid()
    return -logsigmoid(scaled) * (1 - share) + (-scaled).exp() * share


DPO_LOSSES: Mapping[str, Callable[[AnswerSums, AnswerSums, PreferenceConfig], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "discopop": _discopop,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
