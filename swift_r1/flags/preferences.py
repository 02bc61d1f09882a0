"""The arguments of `swift rlhf --rlhf_type dpo`, cpo, simpo and orpo: those of `swift sft`, on rows with a rejected
answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from swift_r1.data.sources import DataFlags
from swift_r1.flags.fields import Scope, flag
from swift_r1.flags.sft import ALWAYS as OF_SFT
from swift_r1.flags.sft import GROUPS as GROUPS_OF_SFT
from swift_r1.flags.sft import SftArguments
from swift_r1.flags.world import World

PREFERENCE_TYPES = ("dpo", "cpo", "simpo", "orpo")
DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("aot", "aot_unpaired", "discopop", "apo_zero", "apo_down"),
)
CPO_LOSSES = ("sigmoid", "hinge", "ipo", "simpo")
ALWAYS: Mapping[str, Any] = {
    name: value for name, value in OF_SFT.items() if name not in ("rlhf_type", "share_prompt")
}
GROUPS = ("Preferences", *GROUPS_OF_SFT)
_TAKEN = (
    *("rlhf_type", "beta", "loss_type", "external_plugins", "ref_model", "offload_ref_model"),
    "label_smoothing",
)


def _of(*types: str) -> Scope:
    return Scope(
        lambda args: args.rlhf_type in types,
        "with --rlhf_type {rlhf_type}: leave it out",
        allow_default=True,
    )


_DPO = _of("dpo")
_CPO = _of("cpo", "simpo")
_REFERENCE = Scope(
    lambda args: args.wants_reference, "without a reference policy", allow_default=True
)
_LOSSES = Scope(lambda args: args.rlhf_type != "orpo", "with --rlhf_type orpo, which has one loss")
_SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_unpaired", "simpo")


@dataclass(frozen=True, kw_only=True)
class PreferenceArguments(SftArguments):
    """Preferences."""

    command: ClassVar[str] = "rlhf"
    groups: ClassVar[Sequence[str]] = GROUPS
    taken: ClassVar[Sequence[str]] = _TAKEN
    not_taken: ClassVar[frozenset[str]] = SftArguments.not_taken - {"share_prompt", "ref_adapters"}
    rlhf_type: str = flag("dpo", "dpo, cpo, simpo or orpo", choices=PREFERENCE_TYPES, required=True)
    beta: float = flag(
        0.1,
        "how strongly log-ratios (orpo: log-odds) count; simpo: 2.0 unless given",
        more_than=0,
    )
    loss_type: list[str] = flag(  # type: ignore[assignment]  # of another kind than that of the base
        [],
        "the loss (default: sigmoid; simpo: simpo); dpo takes several, which are summed, sft among them: -log p of "
        "the chosen answers",
        _LOSSES,
        choices=(*DPO_LOSSES, "simpo", "sft"),
    )
    loss_weights: list[float] = flag(
        [], "what the losses of --loss_type are multiplied by (default: 1 each)", _DPO
    )
    label_smoothing: float = flag(
        0.0,
        "share of the preferences that are taken to be wrong",
        Scope(
            lambda args: bool({*(args.loss_type or ["sigmoid"])} & {*_SMOOTHED}),
            f"with another --loss_type than {', '.join(_SMOOTHED)}",
            allow_default=True,
        ),
        at_least=0,
        less_than=0.5,
    )
    rpo_alpha: float | None = flag(
        None,
        "add this many times -log p of the chosen answers' tokens (default: nothing)",
        _DPO,
        at_least=0,
    )
    ld_alpha: float | None = flag(
        None,
        "weight of an answer's tokens behind the length of the other one (default: 1)",
        _DPO,
        at_least=0,
        at_most=1,
    )
    discopop_tau: float = flag(0.05, "temperature of the loss discopop", _DPO, more_than=0)
    f_divergence_type: str = flag(
        "reverse_kl",
        "the divergence to the reference that is bounded",
        _DPO,
        choices=("reverse_kl", "js_divergence", "alpha_divergence"),
    )
    f_alpha_divergence_coef: float = flag(
        0.5,
        "alpha of the alpha divergence",
        Scope(
            lambda args: args.f_divergence_type == "alpha_divergence",
            "without --f_divergence_type alpha_divergence",
        ),
        more_than=0,
    )
    reference_free: bool = flag(
        False, "compare with a reference that gives all answers the same probability", _DPO
    )
    cpo_alpha: float = flag(1.0, "weight of -log p of the chosen answers' tokens", _CPO, at_least=0)
    simpo_gamma: float = flag(
        1.0, "margin that the loss simpo wants between the answers", _CPO, at_least=0
    )
    ref_model: str | None = flag(
        None,
        "folder or id of the reference policy, of the policy's architecture and tokenizer (default: --model, without "
        "adapters)",
        _REFERENCE,
    )
    offload_ref_model: bool = flag(
        False,
        "keep the reference in host memory except while it computes (GPU only)",
        _REFERENCE,
    )
    loss_scale: str = flag(
        "last_round",
        "what is compared: last_round the answers behind the user's last message, default all answers; `loss` of a "
        "message, true or false, comes before",
        choices=("default", "last_round"),
        ms_swift="default for orpo",
    )
    metric_for_best_model: str | None = flag(
        None,
        "keep the checkpoint that is best by it: rewards/accuracies, rewards/margins, or loss (this lowest)",
        may_change=True,
        ms_swift="loss",
    )

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        yield from super().faults(given, world)
        allowed = (*DPO_LOSSES, "sft") if self.rlhf_type == "dpo" else CPO_LOSSES
        for name in self.loss_type:
            if name not in allowed:
                yield (
                    f"--loss_type {name} is not one of --rlhf_type {self.rlhf_type}: {', '.join(allowed)}"
                )
        if len(self.loss_type) > 1 and self.rlhf_type != "dpo":
            yield f"--loss_type takes one loss with --rlhf_type {self.rlhf_type}"
        if self.lora_dropout:
            yield (
                "--lora_dropout is not for pairs: what they are worth is computed in a pass of its own, which would drop "
                "others"
            )
        if len({*self.loss_type}) < len(self.loss_type):
            yield "--loss_type names a loss twice"
        if self.loss_weights and len(self.loss_weights) != len(self.loss_type or ["sigmoid"]):
            yield (
                f"--loss_weights has {len(self.loss_weights)} weights for {len(self.loss_type or ['sigmoid'])} of "
                "--loss_type"
            )

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> Self:
        simpo = self.rlhf_type == "simpo"
        return replace(
            super().resolved(given, world, environ),
            beta=2.0 if simpo and "beta" not in given else self.beta,
            loss_type=self.loss_type or ["simpo" if simpo else "sigmoid"],
        )

    @property
    def written(self) -> str:
        return f"swift rlhf --rlhf_type {self.rlhf_type}"

    @property
    def wants_reference(self) -> bool:
        return self.rlhf_type == "dpo" and not self.reference_free

    @property
    def compared(self) -> Sequence[str]:
        return ("loss", "rewards/accuracies", "rewards/margins")

    @property
    def data_flags(self) -> DataFlags:
        return replace(super().data_flags, pairs=True)
