"""Policy and critic as the trainer sees them: token ids in, log-probs or values of the completion's tokens out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from swift_r1.models.attention import PackedRow
from swift_r1.models.logprobs import LogitForm, TokenLogprobs, selective_logprobs
from swift_r1.models.multimodal import decoder_of, placeholders
from swift_r1.models.routing import replayed
from swift_r1.models.vision import ImageInputs, states_with_images
from swift_r1.models.weights import output_head
from swift_r1.runtime.sequence_parallel import SequenceGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ModelInputs(NamedTuple):
    """`B` completions as they go through the model, each after its prompt: a row each, or packed in one row.

    Padding is on the right and attention is causal, so no real token sees it and no mask is needed.

    Example: two completions, `[7, 8]` and `[9]`, of the prompt `[5, 6]`, a row each:
        token_ids [[5, 6, 7, 8], [5, 6, 9, 0]], positions [1, 2, 5], targets [7, 8, 9]
    """

    token_ids: Tensor  # `[R, S]` int64, prompt then completion; `R` is `B`, or 1 where packed
    # `[K]` int64 into the flattened `[R * S]` hidden states: where each of the `K` tokens that the policy wrote is
    # predicted
    positions: Tensor
    # int64, the tokens predicted there, `[K]`; or `[K, W]`, others in their places too
    targets: Tensor
    # int64: where packed `[1, S]`; with images perhaps `[4, R, S]`, of which the first are those of the tokens
    position_ids: Tensor | None = None
    # the packed row's groups for `packed_attention`; None where rows are not packed, or where the model's own attention
    # tells samples apart by position ids that start again
    packed_row: PackedRow | None = None
    sequence: SequenceGroup | None = None  # the ranks that a packed row's tokens are spread over
    # int64, which of the `K` tokens this rank of `sequence` predicts; None without one
    mine: Tensor | None = None
    # so many of the likeliest tokens in each place are targets too (`selective_logprobs`)
    top: int = 0
    entropy_gradient: bool = False  # the entropies are differentiable too
    squares: bool = False  # sums of squared probabilities are wanted too
    images: ImageInputs | None = None  # of the rows' prompts
    # `[R, S, layers, k]`, the experts that the policy's routers are to choose (`models/routing.py`); None: they choose
    # by themselves
    routes: Tensor | None = None

    def own(self) -> ModelInputs:
        """This rank's part of a row that is spread over a group; `packed_row` stays that of the whole row."""
        assert self.sequence is not None and self.position_ids is not None and self.mine is not None
        part = self.sequence.own(self.token_ids.shape[1])
        return self._replace(
            token_ids=self.token_ids[:, part],
            position_ids=self.position_ids[:, part],
            positions=self.positions.index_select(0, self.mine) - part.start,
            targets=self.targets.index_select(0, self.mine),
            routes=None if self.routes is None else self.routes[:, part],
        )

    def together(self, values: Tensor) -> Tensor:
        """Returns what each rank of `sequence` has of its own tokens, as `[K, *]` on all of them (collective)."""
        assert self.sequence is not None and self.mine is not None
        return self.sequence.together(values, self.mine, len(self.targets))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`B` completions that go through the model together.

    Example: those of `ModelInputs`, the first two rows of a round:
        mask [[True, True], [True, False]], places [0, 1, 2], trained as mask, rollout_logps [[-0.1, -0.4], [-1.2, 0]],
        samples [0, 1], shares [1, 1]
    """

    inputs: ModelInputs
    # `[B, T]` bool, True on completion tokens that the policy wrote; `mask.sum() == K`, row-major in the order of
    # `targets`
    mask: Tensor
    places: Tensor  # `[K]` int64, where `mask` is True once it is flattened
    # `[B, T]` bool, those of `mask` that the loss is over: all of a completion's, or none (`--overlong_filter`)
    trained: Tensor
    rollout_logps: Tensor  # `[B, T]` float32, the engine's log-probs
    samples: Tensor  # `[B]` int64 on the CPU, which rows of the round these are
    # `[sum of the rows' lengths]` int64 on the CPU: where in `token_ids`, flattened, the tokens of each row are, prompt
    # and completion; rows that begin alike may have places in common
    token_places: Tensor
    shares: Tensor  # `[B]` float32, which part of its completion's trained tokens a row has
    # old_logps, old_entropies: `[B, T]` float32, of the policy before the round's first update; None where nothing
    # needs them
    old_logps: Tensor | None = None
    old_entropies: Tensor | None = None
    # `[B, T]` float32, the sum of that policy's squared probabilities at each token; None where nothing needs it
    old_squares: Tensor | None = None
    ref_logps: Tensor | None = None  # `[B, T]` float32, None without a reference policy
    teacher_logps: Tensor | None = None  # `[B, T]` float32, None without a teacher
    # teacher_ids, teacher_tops: `[B, T, M]` int64 and float32, the likeliest tokens in each place under the teacher and
    # their log-probs, -inf for none; None where the loss has no KL to a teacher
    teacher_ids: Tensor | None = None
    teacher_tops: Tensor | None = None
    # `[B, T]` float32, of the critic before the round's first update; None without a critic
    old_values: Tensor | None = None

    def unflatten(self, values: Tensor) -> Tensor:
        """`[K, *]` per-token values as `[B, T, *]`, zero on padding."""
        # Not by the mask: how many a mask chooses only the device knows, and asking it takes as long as its queue.
        sizes = values.shape[1:]
        flat = values.new_zeros(self.mask.numel(), *sizes).index_copy(0, self.places, values)
        return flat.view(*self.mask.shape, *sizes)

    def flatten(self, values: Tensor) -> Tensor:
        """`[B, T, *]` as `[K, *]`."""
        return values.flatten(0, 1).index_select(0, self.places)


class Policy(nn.Module):
    """A causal LM whose forward gives log-probs (and entropies) of chosen tokens, never `[tokens, vocabulary]`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.logprob_head = LogprobHead(output_head(model), model.config)

    def forward(self, temperature: float, *fields: Any) -> TokenLogprobs:
        """Returns the log-probs of `K` tokens; takes the fields of `ModelInputs`, since ZeRO-3 looks for tensors among
        the arguments."""
        inputs = ModelInputs(*fields)
        head = partial(
            self.logprob_head,
            temperature=temperature,
            top=inputs.top,
            entropy_gradient=inputs.entropy_gradient,
            squares=inputs.squares,
        )
        routes = inputs.routes
        if routes is not None and inputs.sequence is not None:
            routes = inputs.own().routes
        with replayed(self.model, None if routes is None else routes.flatten(0, 1)):
            return TokenLogprobs(*_of_tokens(self.model, inputs, head))


class Critic(nn.Module):
    """A transformers sequence classifier of one label: its `score` is applied at every token, not at the last one."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.value_head = ValueHead(model.score)

    def forward(self, *fields: Any) -> Tensor:
        """Returns float32 `[K]`: at the position that predicts a token the value of the state before it. Takes the
        fields of `ModelInputs`."""
        values: Tensor
        (values,) = _of_tokens(
            self.model, ModelInputs(*fields), lambda states, _: [self.value_head(states)]
        )
        return values


class LogprobHead(nn.Module):
    """Holds the output head's own parameters, so that ZeRO-3 gathers them around this module's forward; where it is
    trained beside adapters (`--modules_to_save`) also those of the model as it was loaded."""

    weight: nn.Parameter

    def __init__(self, output_embeddings: Any, config: Any) -> None:
        super().__init__()
        self.weight = output_embeddings.weight
        self.bias = getattr(output_embeddings, "bias", None)
        self._switch = [output_embeddings]  # in a list: not a module of this one
        loaded = getattr(output_embeddings, "original_module", None)
        if loaded is not None:
            self.loaded_weight = loaded.weight
            self.loaded_bias = getattr(loaded, "bias", None)
        self.form = logit_form(config)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        top: int,
        entropy_gradient: bool,
        squares: bool,
    ) -> TokenLogprobs:
        weight = self.weight
        bias = self.bias
        if getattr(self._switch[0], "disable_adapters", False):
            weight = self.loaded_weight
            bias = self.loaded_bias
        return selective_logprobs(
            hidden,
            weight,
            targets,
            bias=bias,
            form=self.form,
            temperature=temperature,
            top=top,
            entropy_gradient=entropy_gradient,
            squares=squares,
        )


def logit_form(config: Any) -> LogitForm:
    """Returns what an architecture does to its logits, by transformers' names; `check_logprobs` finds out where one does
    something else."""
    text = config.get_text_config()
    scale = (getattr(text, "logit_scale", None) or 1.0) / (
        getattr(text, "logits_scaling", None) or 1.0
    )
    return LogitForm(scale, getattr(text, "final_logit_softcapping", None), placeholders(config))


class ValueHead(nn.Module):
    """Holds the head's own weight `[1, hidden]`, so that ZeRO-3 gathers it around this module's forward."""

    weight: nn.Parameter

    def __init__(self, score: Any) -> None:
        super().__init__()
        self.weight = score.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """`[K, hidden]` to float32 `[K]`; in float32, since in bf16 values near 1 are 0.008 apart."""
        return (hidden.float() @ self.weight.float().t()).squeeze(-1)


def _of_tokens(
    model: PreTrainedModel, inputs: ModelInputs, head: Callable[[Tensor, Tensor], Sequence[Any]]
) -> Sequence[Any]:
    """What `head` gives (`[K, *]` each) of the states before `K` tokens and of these; each rank of a group computes it
    for its own tokens."""
    if inputs.sequence is None:
        return head(_chosen_states(model, inputs), inputs.targets)
    own = inputs.own()
    given = head(_chosen_states(model, own), own.targets)
    return [None if values is None else inputs.together(values) for values in given]


def _chosen_states(model: PreTrainedModel, inputs: ModelInputs) -> Tensor:
    """`[K, hidden]`: the last hidden states of a transformers model, with any head, at `positions`."""
    packed: dict[str, Any] = (
        {} if inputs.position_ids is None else {"position_ids": inputs.position_ids}
    )
    if inputs.packed_row is not None:
        # A mask of four dimensions is taken as it is: none is made for the row, and `packed_attention` needs none.
        mask = inputs.token_ids.new_zeros(1, 1, 1, 1, dtype=torch.bool)
        packed |= {
            "packed_row": inputs.packed_row,
            "sequence": inputs.sequence,
            "attention_mask": mask,
        }
    if inputs.images is not None:
        hidden = states_with_images(model, inputs.token_ids, inputs.images, **packed)
    else:
        read = decoder_of(model)
        hidden = read(input_ids=inputs.token_ids, use_cache=False, **packed).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, inputs.positions)
