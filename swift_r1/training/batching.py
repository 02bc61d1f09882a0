"""From a round's ragged completions to the micro-batches of each rank and optimizer step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from swift_r1.algorithms.advantages import groups_without_signal
from swift_r1.algorithms.aggregation import drop_truncated
from swift_r1.errors import RunFailed
from swift_r1.models.attention import PackedRow, Segment, packed_row
from swift_r1.models.policy import MicroBatch, ModelInputs
from swift_r1.models.vision import ImageInputs, PromptSpan, PromptWithImages, Vision
from swift_r1.rollout.trajectory import TokenSequence
from swift_r1.runtime.ranks import Ranks
from swift_r1.runtime.sequence_parallel import SequenceGroup
from swift_r1.training.micro_batches import (
    SHARED,
    Form,
    RowLengths,
    Unit,
    plan_micro_batches,
    tokens_computed,
)
from swift_r1.training.prefixes import ALONE, RowTokens, in_order, tree_of

_NOWHERE = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class RoundBatch:
    """Holds all `N` completions of one round, ragged and flat, the same on every rank. Each has a row, an agent's
    episode perhaps several: `R` rows in the order of the completions.

    Example: two completions, `[7, 8]` and `[9]`, of the prompt `[5, 6]`, whose rewards are 1 and 0:
        token_ids [5, 6, 7, 8, 5, 6, 9], prompt_lengths [2, 2], completion_lengths [2, 1], truncated [0, 0],
        rollout_logps [-0.1, -0.4, -1.2], rewards [1, 0], loss_mask [1, 1, 1], prompt_numbers [0, 0], owners [0, 1],
        turn_advantages [], image_counts [0, 0], the other images' [], routes []
    """

    token_ids: Tensor  # int64 `[sum of lengths]`, for each row its prompt and then its own tokens
    prompt_lengths: Tensor  # int64 `[R]`
    completion_lengths: Tensor  # int64 `[R]`, of the rows' own tokens
    truncated: Tensor  # int64 `[R]`, 1 where the completion was cut at the length limit
    rollout_logps: Tensor  # float32 `[sum of completion lengths]`, the engine's log-probs
    rewards: Tensor  # float32 `[N]`, NaN where invalid
    # int64 `[sum of completion lengths]`, 1 on tokens to train: those that the policy wrote
    loss_mask: Tensor
    prompt_numbers: Tensor  # int64 `[R]`, equal for rows of the same prompt tokens and images
    owners: Tensor  # int64 `[R]`, the completion that a row belongs to, ascending
    # float32 `[sum of completion lengths]`, what the rewards of turns add to a token's advantage; empty without them
    turn_advantages: Tensor
    image_bytes: Tensor  # uint8, the files of the round's different images, one after another
    image_lengths: Tensor  # int64, their bytes
    image_numbers: Tensor  # int64, for each row those of its prompt, in order
    image_counts: Tensor  # int64 `[R]`, how many these are
    # uint8, the bytes of the experts of each token of `token_ids`, as `of_routes` has them; empty: nobody noted them
    routes: Tensor
    route_shape: Tensor  # int64, `[layers, k, bytes of a number]`; empty too

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def lengths(self) -> Tensor:
        """int64 `[R]`: the tokens of each row, its prompt included."""
        return self.prompt_lengths + self.completion_lengths

    @property
    def starts(self) -> Tensor:
        """int64 `[R]`: where each row begins in `token_ids`."""
        return starts_of(self.lengths)

    @property
    def own_starts(self) -> Tensor:
        """int64 `[R]`: where each row's own tokens begin in `rollout_logps` and `loss_mask`."""
        return starts_of(self.completion_lengths)

    def rows(self, completions: range) -> range:
        """Returns the rows of consecutive completions."""
        first, end = torch.searchsorted(
            self.owners, torch.tensor([completions.start, completions.stop])
        ).tolist()
        return range(first, end)

    def of_completions(self, of_rows: Tensor) -> Tensor:
        """Sums over the rows of each completion, `[N]` of `[R]`."""
        return torch.zeros(len(self), dtype=of_rows.dtype).index_add_(0, self.owners, of_rows)

    def shares(self) -> Tensor:
        """float32 `[R]`: the part of its completion's trained tokens that a row has, together 1."""
        if len(self.owners) == len(self):
            return torch.ones(len(self))
        trained = self.token_mask().sum(1).float()
        one = torch.ones(len(self.owners))
        whole = self.of_completions(trained)[self.owners]
        rows = self.of_completions(one)[self.owners]
        return torch.where(whole > 0, trained / whole, 1 / rows)

    def padded(self, of_tokens: Tensor) -> Tensor:
        """`[R, longest]` of `[sum of completion lengths]`, 0 behind the end of a row."""
        filled = filled_places(self.completion_lengths, int(self.completion_lengths.max()))
        return torch.zeros(filled.shape, dtype=of_tokens.dtype).masked_scatter_(filled, of_tokens)

    def token_mask(self) -> Tensor:
        """bool `[R, longest]`: the tokens that the policy wrote."""
        return self.padded(self.loss_mask.bool())

    def beginnings(self, samples: Sequence[int]) -> list[RowTokens]:
        """Returns what rows may have in common."""
        starts = self.starts[list(samples)].tolist()
        lengths = self.lengths[list(samples)].tolist()
        tokens = self.token_ids.numpy()
        return [
            RowTokens(
                tokens[start : start + length],
                int(self.prompt_lengths[sample]),
                int(self.prompt_numbers[sample]),
                bool(self.image_counts[sample]),
            )
            for sample, start, length in zip(samples, starts, lengths, strict=True)
        ]

    def written(self, samples: Tensor) -> Tensor:
        """Returns the places that the tokens of these rows, one after another, have among those of all rows, int64
        `[K]`. Only tokens that the policy wrote count."""
        counts = self.token_mask().sum(1)
        return places_of(starts_of(counts)[samples], counts[samples])

    @cached_property
    def _image_files(self) -> list[bytes]:
        data = self.image_bytes.numpy().tobytes()
        sizes = self.image_lengths.tolist()
        ends = self.image_lengths.cumsum(0).tolist()
        return [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def prompt(self, row: int, whole: bool = False) -> PromptWithImages:
        """Returns the prompt of a row, or the `whole` row, with the files of its images."""
        start = int(self.starts[row])
        lengths = self.lengths if whole else self.prompt_lengths
        ids = self.token_ids[start : start + int(lengths[row])]
        first = int(starts_of(self.image_counts)[row])
        numbers = self.image_numbers[first : first + int(self.image_counts[row])]
        return PromptWithImages(
            tuple(ids.tolist()), tuple(self._image_files[one] for one in numbers.tolist())
        )

    @cached_property
    def of_routes(self) -> Tensor | None:
        """`[sum of lengths, layers, k]` uint8 or int16, the largest number for a token whose experts are unknown; None
        where nobody noted any."""
        if not self.routes.numel():
            return None
        layers, chosen, size = self.route_shape.tolist()
        kind = torch.uint8 if size == 1 else torch.int16
        return self.routes.clone().view(kind).view(-1, layers, chosen)

    def with_routes(self, routes: Tensor) -> RoundBatch:
        """Returns the round with these experts of its tokens, as `of_routes`."""
        shape = torch.tensor([*routes.shape[1:], routes.itemsize])
        return replace(self, routes=routes.flatten().view(torch.uint8), route_shape=shape)

    def with_images(self, of_rows: Sequence[Sequence[bytes]]) -> RoundBatch:
        """Returns the round with these files of images of its rows' prompts."""
        files = list(dict.fromkeys(chain.from_iterable(of_rows)))
        places = {content: place for place, content in enumerate(files)}
        return replace(
            self,
            image_bytes=torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
            if files
            else torch.zeros(0, dtype=torch.uint8),
            image_lengths=torch.tensor([len(one) for one in files], dtype=torch.long),
            image_numbers=_flat([[places[one] for one in row] for row in of_rows], torch.long),
            image_counts=torch.tensor([len(row) for row in of_rows], dtype=torch.long),
        )

    def tensors(self) -> dict[str, Tensor]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def round_batch(
    rows: Sequence[TokenSequence],
    rewards: Sequence[float],
    truncated: Sequence[bool] | None = None,
    owners: Sequence[int] | None = None,
    turn_advantages: Sequence[Sequence[float]] = (),
) -> RoundBatch:
    """Puts `R` rows, one after another, into flat tensors.

    Args:
        rewards: of the `N` completions.
        truncated: of the `N` completions; None: none was.
        owners: of the `R` rows; None: each is a completion of its own.
        turn_advantages: of the tokens of the `R` rows; empty without any.
    """
    numbers: dict[Hashable, int] = {}
    images = {image.sha256: image for row in rows for image in row.images}
    files = {name: image.read() for name, image in images.items()}
    nothing = torch.zeros(0, dtype=torch.long)
    owned = torch.arange(len(rows)) if owners is None else torch.tensor(owners)
    cut = torch.tensor([False] * len(rewards) if truncated is None else truncated, dtype=torch.long)
    batch = RoundBatch(
        token_ids=_flat(
            [part for row in rows for part in (row.prompt_token_ids, row.token_ids)], torch.long
        ),
        prompt_lengths=torch.tensor([len(row.prompt_token_ids) for row in rows]),
        completion_lengths=torch.tensor([len(row.token_ids) for row in rows]),
        truncated=cut[owned],
        rollout_logps=_flat([row.logprobs for row in rows], torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        loss_mask=_flat([row.loss_mask for row in rows], torch.long),
        prompt_numbers=torch.tensor(
            [
                numbers.setdefault((tuple(row.prompt_token_ids), tuple(row.images)), len(numbers))
                for row in rows
            ]
        ),
        owners=owned,
        turn_advantages=_flat(turn_advantages, torch.float32),
        image_bytes=nothing,
        image_lengths=nothing,
        image_numbers=nothing,
        image_counts=nothing,
        routes=torch.zeros(0, dtype=torch.uint8),
        route_shape=nothing,
    ).with_images([[files[image.sha256] for image in row.images] for row in rows])
    known = [row.routes for row in rows if row.routes is not None]
    return batch.with_routes(_routes(rows, known[0])) if known else batch


def _routes(rows: Sequence[TokenSequence], one: np.ndarray) -> Tensor:
    """Returns the experts of all tokens of the rows, in the form of `one` of them."""
    lengths = [len(row.prompt_token_ids) + len(row.token_ids) for row in rows]
    whole = np.full((sum(lengths), *one.shape[1:]), np.iinfo(one.dtype).max, one.dtype)
    for row, part in zip(rows, np.split(whole, np.cumsum(lengths[:-1])), strict=True):
        if row.routes is not None:
            part[: len(row.routes)] = row.routes
    return torch.from_numpy(whole)


def _flat(of_rows: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Returns the values of all rows one after another."""
    return torch.tensor(list(chain.from_iterable(of_rows)), dtype=dtype)


def everywhere(batch: RoundBatch | None, ranks: Ranks) -> RoundBatch:
    """Returns the batch of rank 0 on every rank; the others pass None. Collective."""
    return RoundBatch(*ranks.broadcast(None if batch is None else list(batch.tensors().values())))


def starts_of(lengths: Tensor) -> Tensor:
    """Returns where each of `R` spans begins, `[R]`, if they stand one after another."""
    return lengths.cumsum(0) - lengths


def places_of(starts: Tensor, lengths: Tensor) -> Tensor:
    """Returns `start, start + 1, ...` of each of `R` spans, `[sum of lengths]`."""
    return torch.arange(int(lengths.sum())) + (starts - starts_of(lengths)).repeat_interleave(
        lengths
    )


def filled_places(lengths: Tensor, width: int) -> Tensor:
    """Returns which entries of `R` padded rows are not padding, bool `[R, width]`."""
    return torch.arange(width) < lengths[:, None]


@dataclass(frozen=True, slots=True)
class Batching:
    """Says how a round is split into micro-batches."""

    form: Form
    # `--per_device_train_batch_size`: without `max_tokens` the token budget is this many of the optimizer step's
    # longest completions
    completions: int
    group_size: int  # completions per prompt
    max_tokens: int | None = None  # the token budget of a micro-batch
    # what rows begin with is shared where that saves at least this share of the tokens that go through the model in
    # `form`; None: never
    share_from: float | None = None
    # whether the model uses `packed_attention`; else its own attention tells the samples of a row apart by their
    # position ids
    own_attention: bool = True
    overlong_filter: bool = False  # truncated completions are left out of the loss
    # groups whose rewards are all equal teach nothing, and get micro-batches of their own
    silent_apart: bool = False
    vision: Vision | None = None  # of a run whose rows have images
    images_anywhere: bool = False  # in a row, not only in its prompt; then each row stands alone


def split_step(
    batch: RoundBatch, completions: range, batching: Batching, ranks: Ranks
) -> list[MicroBatch]:
    """This rank's micro-batches of an optimizer step on the given completions of the round."""
    samples = batch.rows(completions)
    prompts, written, owners = (
        one[samples.start : samples.stop].tolist()
        for one in (batch.prompt_lengths, batch.completion_lengths, batch.owners)
    )
    groups: list[Hashable] = [owner // batching.group_size for owner in owners]
    silent: list[bool] = []
    if batching.silent_apart:
        without_signal = groups_without_signal(batch.rewards, batching.group_size)
        silent = without_signal[[owner // batching.group_size for owner in owners]].tolist()
    lengths = RowLengths(prompts, written, groups, silent)
    if batching.form.shared or batching.share_from is not None:
        lengths = _begin_alike(batch, samples, lengths)
    budget = batching.max_tokens or batching.completions * lengths.longest()
    form = batching.form
    plan = plan_micro_batches(lengths, batching.form, ranks.data_parallel_size, budget)
    if batching.share_from is not None:
        shared = plan_micro_batches(lengths, SHARED, ranks.data_parallel_size, budget)
        if tokens_computed(shared, SHARED, lengths) <= (1 - batching.share_from) * tokens_computed(
            plan, form, lengths
        ):
            form = SHARED
            plan = shared
    numbered = [
        [tuple(samples[one] for one in unit) for unit in units]
        for units in plan[ranks.data_parallel_rank]
    ]
    return [
        collate(
            batch,
            units,
            form,
            ranks.device,
            own_attention=batching.own_attention,
            overlong_filter=batching.overlong_filter,
            sequence=ranks.sequence,
            vision=batching.vision,
            images_anywhere=batching.images_anywhere,
        )
        for units in numbered
    ]


def _begin_alike(batch: RoundBatch, samples: range, lengths: RowLengths) -> RowLengths:
    """Returns the lengths with what rows of a group have in common at their beginnings: a group for those that have
    something."""
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(lengths.groups):
        members.setdefault(group, []).append(number)
    places = [0] * len(lengths)
    common = [0] * len(lengths)
    clusters = [0] * len(lengths)
    place = 0
    cluster = 0
    for own in members.values():
        ordered = in_order(batch.beginnings([samples[one] for one in own]))
        for row, again in zip(ordered.rows, ordered.common, strict=True):
            number = own[row]
            cluster += again == 0
            places[number] = place
            common[number] = again
            clusters[number] = cluster
            place += 1
    return replace(lengths, groups=clusters, places=places, common=common)


class _Rows(NamedTuple):
    """What goes through the model, and where in it, flattened, the tokens of each row are, prompt and completion, one
    row after another (`token_places` `[sum of lengths]`)."""

    source_tokens: Tensor  # int64 `[R, S]`, where in the round each token is; -1 for padding
    token_places: Tensor
    # in order; the number of a span's prompt is a row of the round
    spans: Sequence[PromptSpan] = ()
    position_ids: Tensor | None = None
    packed_row: PackedRow | None = None

    def with_images(
        self, batch: RoundBatch, vision: Vision | None, device: torch.device, anywhere: bool
    ) -> tuple[ImageInputs | None, Tensor | None]:
        """Returns the images of the rows, and their positions. Those of the round's first prompt with images go through
        the tower where the rows have none and other ranks' may have some."""
        if not batch.image_numbers.numel():
            return None, self.position_ids
        if vision is None:
            raise RunFailed(
                "a row has images, and the run began without: the first rows of streamed data decide, give some with "
                "images as a --dataset of its own"
            )
        # a prompt once, however many rows have it
        numbers = range(len(batch.owners)) if anywhere else batch.prompt_numbers.tolist()
        row_of = {numbers[one.prompt]: one.prompt for one in self.spans if one.prompt >= 0}
        prompts = [batch.prompt(row, anywhere) for row in row_of.values()]
        places = {number: place for place, number in enumerate(row_of)}
        spans = [
            replace(one, prompt=places[numbers[one.prompt]]) if one.prompt >= 0 else one
            for one in self.spans
        ]
        first = batch.prompt(int(batch.image_counts.nonzero()[0]))
        images = vision.inputs(prompts, spans, device, first if vision.together else None)
        positions = vision.position_ids(prompts, spans, len(self.source_tokens))
        return images, self.position_ids if positions is None else positions


def collate(
    batch: RoundBatch,
    units: Sequence[Unit],
    form: Form,
    device: torch.device,
    own_attention: bool = True,
    overlong_filter: bool = False,
    sequence: SequenceGroup | None = None,
    vision: Vision | None = None,
    images_anywhere: bool = False,
) -> MicroBatch:
    """The given completions in one micro-batch: a row each, padded on the right to their own longest, or packed; a
    packed row is spread over the ranks of `sequence`. Without any a row of padding goes through the model, of which
    nothing is trained: the other ranks have some."""
    samples = torch.tensor([sample for unit in units for sample in unit], dtype=torch.long)
    ranks = 1 if sequence is None else sequence.size
    rows = (
        _packed(batch, units, form.shared, device, own_attention, ranks)
        if form.packed
        else _padded(batch, samples)
    )
    images, position_ids = rows.with_images(batch, vision, device, images_anywhere)
    lengths = batch.completion_lengths[samples]
    width = int(lengths.max()) if units else 1
    steps = torch.arange(width)
    places = batch.own_starts[samples][:, None] + steps
    filled = filled_places(lengths, width)
    mask = filled.clone()
    mask[filled] = batch.loss_mask[places[filled]].bool()
    rollout_logps = torch.zeros(mask.shape)
    rollout_logps[mask] = batch.rollout_logps[places[mask]]
    token_starts = (batch.starts + batch.prompt_lengths)[samples]
    # Hidden state p predicts token p + 1, so a completion's first token is predicted by its prompt's last.
    first = starts_of(batch.lengths[samples]) + batch.prompt_lengths[samples] - 1
    positions = rows.token_places[places_of(first, lengths)][mask[filled]]
    mine = None
    if sequence is not None:
        part = sequence.own(rows.source_tokens.shape[1])
        mine = ((positions >= part.start) & (positions < part.stop)).nonzero().flatten().to(device)
    padding = rows.source_tokens < 0
    taken = rows.source_tokens.clamp(min=0)
    routes = None
    if batch.of_routes is not None:
        routes = batch.of_routes[taken]
        routes[padding] = torch.iinfo(routes.dtype).max
    return MicroBatch(
        inputs=ModelInputs(
            token_ids=batch.token_ids[taken].masked_fill(padding, 0).to(device),
            positions=positions.to(device),
            targets=batch.token_ids[(token_starts[:, None] + steps)[mask]].to(device),
            position_ids=None if position_ids is None else position_ids.to(device),
            packed_row=rows.packed_row,
            sequence=sequence,
            mine=mine,
            images=images,
            routes=None if routes is None else routes.to(device),
        ),
        mask=mask.to(device),
        places=mask.flatten().nonzero().flatten().to(device),
        trained=(drop_truncated(mask, batch.truncated[samples]) if overlong_filter else mask).to(
            device
        ),
        rollout_logps=rollout_logps.to(device),
        samples=samples,
        token_places=rows.token_places,
        shares=batch.shares()[samples].to(device),
    )


def _padded(batch: RoundBatch, samples: Tensor) -> _Rows:
    if not len(samples):
        return _Rows(torch.full((1, 1), -1), samples, [PromptSpan(-1, 0, 1)])
    starts = batch.starts[samples]
    lengths = batch.lengths[samples]
    columns = torch.arange(int(lengths.max()))
    real = filled_places(lengths, len(columns))
    token_places = places_of(torch.arange(len(samples)) * len(columns), lengths)
    spans = [PromptSpan(sample, 0, len(columns)) for sample in samples.tolist()]
    return _Rows(torch.where(real, starts[:, None] + columns, -1), token_places, spans)


def _packed(
    batch: RoundBatch,
    units: Sequence[Unit],
    shared: bool,
    device: torch.device,
    own_attention: bool,
    least: int,
) -> _Rows:
    """One row of `least` tokens or more; with `shared` what completions of a unit begin with stands once."""
    starts = batch.starts.tolist()
    lengths = batch.lengths.tolist()
    if not shared:
        units = [(sample,) for unit in units for sample in unit]
    segments: list[Segment] = []
    origins: list[
        tuple[int, int]
    ] = []  # of each segment: a row of the round that has it, and where in that
    token_places: dict[int, Tensor] = {}  # by row
    place = 0
    for unit in units:
        ordered = in_order(batch.beginnings(unit)) if len(unit) > 1 else ALONE
        tree = tree_of(ordered, [lengths[sample] for sample in unit])
        places = []
        for one, (row, begin) in zip(tree.segments, tree.origins, strict=True):
            places.append(torch.arange(place, place + one.length))
            origins.append((unit[row], begin))
            place += one.length
        for row, path in zip(ordered.rows, tree.paths, strict=True):
            token_places[unit[row]] = torch.cat([places[number] for number in path])
        first = len(segments)
        segments += [
            one._replace(parent=one.parent + first if one.parent >= 0 else -1)
            for one in tree.segments
        ]
    source_tokens = [
        torch.arange(one.length) + starts[row] + begin
        for one, (row, begin) in zip(segments, origins, strict=True)
    ]
    spans = [
        PromptSpan(row, begin, one.length)
        for one, (row, begin) in zip(segments, origins, strict=True)
    ]
    if place < least:
        source_tokens.append(torch.full((least - place,), -1))
        segments.append(Segment(least - place))
        spans.append(PromptSpan(-1, 0, least - place))
    return _Rows(
        torch.cat(source_tokens)[None],
        torch.cat([*(token_places[sample] for unit in units for sample in unit), _NOWHERE]),
        spans,
        torch.cat([torch.arange(one.tokens) + one.start for one in spans])[None],
        packed_row(segments, device) if own_attention else None,
    )
