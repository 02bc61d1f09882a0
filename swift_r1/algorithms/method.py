"""What a method declares of itself: a loss, an estimator of advantages, or a way to learn from a teacher.

A method is a file in `methods/`, which is found by being there. The flags are made of the declarations, so neither this
module nor those files load torch when they are imported: it is imported for types, or inside of functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")

LoggedMetric = tuple[str, str, str, str]  # its name, what it is, its unit, and what is good

LOG_RATIO_BOUND = 60.0
"""Log-ratios are kept within this before `exp`: float32 overflows at 88, and inf * 0 in a backward pass is NaN."""


def setting(default: Any, help: str, **limits: Any) -> Any:
    """Returns a field of a method's settings, which is a flag of that name and a field of `LossConfig`.

    Args:
        help: the flag's line in `--help`.
        limits: `at_least`, `more_than`, `at_most`, `less_than`; other fields of `FlagInfo` concern the flag alone.
    """
    return field(default=default, metadata={"help": help, "limits": limits})


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The losses of tokens, and what became of each token, `[B, T]`.

    Example: one completion of three tokens, whose last ratio is above the clip range:
        `TokenLoss(tensor([[-0.9, -1.0, -1.2]]), tensor([[False] * 3]), tensor([[False, False, True]]))`
    """

    loss: Tensor
    # bool: where the ratio was clipped from below and from above
    clipped_low: Tensor
    clipped_high: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # what else is logged, by name
    dropped: Tensor | None = None  # bool: tokens that have no loss for another reason; None: none


def nowhere(like: Tensor) -> Tensor:
    """Returns False for each entry of a tensor, bool of its shape."""
    return like.new_zeros(like.shape).bool()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A value of `--loss_type`."""

    name: str
    # from the importance ratio `[B, T]` (the same number along a row at sequence level), log-probs `[B, T]`, advantages
    # `[B, T]` and the `LossConfig`, which has the fields of `settings`; and what `marks` gives, bool `[B, T]`
    function: Callable[..., TokenLoss]
    # what the step's sum is divided by: its trained tokens; its completions, each of which counts by the mean over its
    # tokens; or its completions times `--max_completion_length`
    mean_over: Literal["tokens", "completions", "length"] = "tokens"
    reads: tuple[str, ...] = ()  # flags that several losses share: epsilon, epsilon_high, delta
    ignores: Mapping[str, str] = field(default_factory=dict)  # flags that do nothing here, and why
    # weighs tokens by their own importance ratios: no other level will do
    ratio_of_tokens: bool = False
    # what a token's log-ratio becomes before the mean over its completion is taken, which is the only level then: from
    # log-ratios and advantages `[B, T]` and the `LossConfig`
    limit: Callable[[Tensor, Tensor, Any], Tensor] | None = None
    settings: type | None = None  # a dataclass of fields made by `setting`
    cap: float | None = None  # `epsilon_high` where it is not given; None: `epsilon`
    # what `advantages` are replaced by, for a loss that compares whole groups: from those of all completions of a round
    # `[N]`, which are valid (bool `[N]`), and the completions per group
    labels: Callable[[Tensor, Tensor, int], Tensor] | None = None
    # with `labels`, the advantages of an optimizer step and the sum of its losses: from the completions' mean
    # log-ratios `[N]`, their labels `[N]` (0 outside of the step) and the `LossConfig`
    targets: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]] | None = None
    # which tokens of an optimizer step `function` treats otherwise, bool `[R, T]`: from log-probs before the round's
    # first update, advantages and which are trained (bool), each `[R, T]` on the CPU; the `LossConfig`; and a generator
    marks: Callable[[Tensor, Tensor, Tensor, Any, Any], Tensor] | None = None
    everywhere: bool = False  # tokens without an advantage have a gradient too
    from_second: bool = False  # is what its name says from a round's second optimizer step on
    metrics: tuple[LoggedMetric, ...] = ()  # those of `TokenLoss`

    @property
    def chosen_by(self) -> str:
        """The flag that asks for it, as it is written."""
        return f"--loss_type {self.name}"


class CreditsTurns(Protocol):
    def __call__(
        self,
        rewards: Sequence[Sequence[Sequence[float]]],
        states: Sequence[Sequence[Sequence[Hashable]]],
        scale: str,
        settings: Any,
        /,
    ) -> list[list[list[float]]]:
        """Returns what is added to the advantages of turns, by groups and episodes, as their `rewards` and the `states`
        that they began in are; `scale` is `--scale_rewards`, and `settings` are flags with the estimator's fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """A value of `--advantage_estimator`."""

    name: str
    # rewards less their baseline, float64 `[G, n]`; from rewards float64 `[G, n]`, 0 where invalid, and bool `[G, n]`
    centre: Callable[[Tensor, Tensor], Tensor]
    # over which rewards it is; of a batch, equal groups teach too
    baseline: Literal["group", "batch"] = "group"
    default_scale: str = "group"  # the `--scale_rewards` that its paper, and ms-swift, go with
    synonym: str | None = None  # another word for it
    # what is centred is divided by its deviation over the whole batch, or by nothing
    over_batch: bool = False
    note: str | None = None  # what the log of a run says of it
    # advantages of tokens `[N, T]` in the place of those of completions: from rewards `[N]`, NaN where invalid, log-probs
    # of the policy that sampled and the sums of its squared probabilities `[N, T]`, the mask `[N, T]`, the completions
    # per group, and the weights `[N, T]` of a correction between engine and trainer or None
    of_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, int, Tensor | None], Tensor] | None = None
    of_turns: CreditsTurns | None = None
    settings: type | None = None  # as those of a loss

    @property
    def chosen_by(self) -> str:
        """The flag that asks for it, as it is written."""
        return f"--advantage_estimator {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """A way in which the policy learns from a teacher."""

    name: str
    described: str  # of the plan of a run, with `{name}` in the place of a flag's value
    # the flag that asks for it, and with which value (None: any that is on); no flag: where no other way is asked for
    flag: str | None = None
    value: str | None = None
    by_itself: bool = False  # where no teacher is named, the policy teaches itself
    # the `rewards` of completions `[N]`; and the `advantages` of tokens `[N, T]`, from those of completions, with what
    # is logged. Both are made of the log-probs `[N, T]` of the policy that sampled and of the teacher, the mask
    # `[N, T]` and the flags; `advantages` also of the number of optimizer steps before the round
    rewards: Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor] | None = None
    advantages: (
        Callable[[Tensor, Tensor, Tensor, Tensor, Any, int], tuple[Tensor, dict[str, float]]] | None
    ) = None
    # a loss of tokens `[B, T]` with what is logged, from log-probs `[B, T]` of policy and teacher and the `LossConfig`;
    # its weight is the value of `flag`
    token_loss: Callable[[Tensor, Tensor, Any], tuple[Tensor, dict[str, Tensor]]] | None = None
    settings: type | None = None  # as those of a loss
    needs_rewards: bool = False  # says which tokens count, and rewards in which direction
    metrics: tuple[LoggedMetric, ...] = ()  # what it logs beside `teacher_kl`

    @property
    def chosen_by(self) -> str:
        """The flag that asks for it, as it is written."""
        return f"--{self.flag}" if self.value is None else f"--{self.flag} {self.value}"

    @property
    def needs_old_logps(self) -> bool:
        """Whether the policy's log-probs are needed before the round's first update."""
        return self.rewards is not None or self.advantages is not None

    def chosen(self, flags: object) -> bool:
        """Whether the flags ask for it by `flag`."""
        value = getattr(flags, self.flag) if self.flag else None
        return bool(value) and self.value in (None, value)


Method = Loss | Estimator | Distillation
Field = dataclasses.Field[Any]


def with_settings(
    methods: Iterable[Method], made: Callable[[Any, Field], object] | None = None
) -> Callable[[type[_T]], type[_T]]:
    """Returns a decorator that gives a class, before it becomes a dataclass, the settings of methods as fields.

    Args:
        made: makes a field of a method and one of its settings; None: it is as the method has it.
    """

    def extended(cls: type[_T]) -> type[_T]:
        for method in methods:
            for item in () if method.settings is None else dataclasses.fields(method.settings):
                cls.__annotations__[item.name] = item.type
                own = (
                    field(default=item.default, metadata=item.metadata)
                    if made is None
                    else made(method, item)
                )
                setattr(cls, item.name, own)
        return cls

    return extended
