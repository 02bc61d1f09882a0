"""The embedded engine: completions from a transformers model in the trainer's own process, all of a round together.
Each prompt is read once, its keys and values are shared by its `n` completions, and rows that end leave the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swift_r1.models.routing import routing_of
from swift_r1.models.vision import PromptSpan, PromptWithImages, Vision, image_arguments
from swift_r1.serving.engines.decoding import (
    AppendCache,
    Groups,
    check_layers,
    decoding,
    packed_weights,
    sample,
    shares_prompts,
    uniform_streams,
)
from swift_r1.wire.protocol import (
    Completion,
    FinishReason,
    RolloutOutput,
    RolloutRequest,
    Routes,
    RoutesAsked,
    SamplingParams,
)
from swift_r1.wire.routes import packed

_CACHE_BYTES = 2 * 2**30
_COMPACT_BELOW = 0.75


@dataclass(slots=True)
class _Row:
    """One completion of the request of this number, None until it has ended."""

    request: int
    seed: int
    completion: Completion | None = None


class TransformersEngine:
    """Generates with `model`, a causal LM whose weights the trainer may change between calls. Nothing else may use the
    model meanwhile: it attends in another way.

    Args:
        tokenizer: Hugging Face's, for stop strings.
        pad_token_id: fills shorter prompts on the left; attention never sees it.
        vision: of a model that reads images.

    Raises:
        UsageError: for an architecture whose layers need another cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        vision: Vision | None = None,
    ) -> None:
        self.vision = vision
        self.config = model.config.get_text_config()
        check_layers(self.config)
        self.model = model
        self.tokenizer = tokenizer
        self.eos = torch.tensor(sorted(eos_token_ids), dtype=torch.long)
        self.pad_token_id = pad_token_id
        self._bytes_per_token = 0  # of the cache, known once a prompt was read

    def generate(
        self,
        requests: Sequence[RolloutRequest],
        weight_version: int,
        on_done: Callable[[int], None] = lambda _count: None,
        on_output: Callable[[int, RolloutOutput], None] = lambda _number, _output: None,
        unwanted: Callable[[], bool] = lambda: False,
        images: Mapping[str, bytes] = {},
    ) -> list[RolloutOutput]:
        """Completions of all requests, in order.

        Args:
            images: the files of those that requests name, by SHA-256.
            unwanted: asked before each token; from its first True on no completion goes on.
            on_done: called with the number of completions that have just ended.
            on_output: called with each request's number and output as soon as all its completions have ended.

        Raises:
            ValueError: a request does not have one seed per completion, or has a pattern.
        """
        groups: list[list[_Row]] = []
        for number, request in enumerate(requests):
            if request.seeds is None or len(request.seeds) != request.n:
                raise ValueError(f"request {request.request_id}: one seed per completion is needed")
            if request.sampling.structured_outputs_regex or request.sampling.structural_tag:
                raise ValueError(
                    f"request {request.request_id}: this engine follows no pattern, vLLM does"
                )
            if request.images and self.vision is None:
                raise ValueError(
                    f"request {request.request_id} has images, and this engine was started without"
                )
            groups.append([_Row(number, seed) for seed in request.seeds])
        prompts = [
            PromptWithImages(
                request.prompt_token_ids, tuple(images[name] for name in request.images)
            )
            for request in requests
        ]
        outputs: dict[int, RolloutOutput] = {}

        def ended(done: Sequence[_Row]) -> None:
            on_done(len(done))
            for number in dict.fromkeys(row.request for row in done):
                completions = tuple(
                    row.completion for row in groups[number] if row.completion is not None
                )
                if len(completions) == requests[number].n:
                    outputs[number] = RolloutOutput(
                        request_id=requests[number].request_id, completions=completions
                    )
                    on_output(number, outputs[number])

        most = sum(len(group) for group in groups)
        asked = any(request.routes is not None for request in requests)
        noting = routing_of(self.model).noting() if asked else nullcontext()
        with (
            _evaluating(self.model),
            torch.inference_mode(),
            packed_weights(self.model, most),
            noting,
        ):
            for wave in self._waves(requests, [row for group in groups for row in group]):
                self._decode(requests, prompts, wave, weight_version, ended, unwanted)
        return [outputs[number] for number in range(len(requests))]

    def _waves(self, requests: Sequence[RolloutRequest], rows: list[_Row]) -> Iterator[list[_Row]]:
        """Rows that are decoded together: same sampling except `max_tokens`, similar prompts, a cache that fits."""
        kinds = [
            repr(request.sampling.model_copy(update={"max_tokens": 1})) for request in requests
        ]
        lengths = [len(request.prompt_token_ids) for request in requests]

        def order(row: _Row) -> tuple[Any, ...]:
            return (
                kinds[row.request],
                lengths[row.request],
                requests[row.request].prompt_token_ids,
                requests[row.request].images,
                row.request,
            )

        rows = sorted(rows, key=order)
        if not self._bytes_per_token:
            nothing = PromptWithImages((self.pad_token_id,), ())
            self._bytes_per_token = self._read_prompts([nothing], 0)[1].bytes_per_token()
        wave: list[_Row] = []
        room = 0
        prompts = set[tuple[Any, ...]]()
        for row in rows:
            request = requests[row.request]
            room = max(room, request.sampling.max_tokens)
            prompt = (request.prompt_token_ids, request.images)
            prompts.add(prompt)
            held = len(prompts) if self._shares else len(wave) + 1
            tokens = (len(wave) + 1) * room + held * lengths[row.request]
            full = tokens * self._bytes_per_token > _CACHE_BYTES
            if wave and (full or kinds[wave[0].request] != kinds[row.request]):
                yield wave
                wave = []
                room = request.sampling.max_tokens
                prompts = {prompt}
            wave.append(row)
        if wave:
            yield wave

    def _decode(
        self,
        requests: Sequence[RolloutRequest],
        of_requests: Sequence[PromptWithImages],
        wave: list[_Row],
        weight_version: int,
        on_ended: Callable[[Sequence[_Row]], None],
        unwanted: Callable[[], bool],
    ) -> None:
        """Fills the rows of a wave; those that have ended are given to `on_ended` while the others go on."""
        device = self.model.device
        sampling = requests[wave[0].request].sampling
        eos = self.eos[:0] if sampling.ignore_eos else self.eos
        ends = torch.cat([eos, torch.tensor(sampling.stop_token_ids, dtype=torch.long)]).to(device)
        limits = torch.tensor(
            [requests[row.request].sampling.max_tokens for row in wave], device=device
        )
        longest = int(limits.max())
        uniforms = uniform_streams([row.seed for row in wave], longest).to(device)
        written = torch.zeros(len(wave), longest, dtype=torch.long, device=device)
        logprobs = torch.zeros(len(wave), longest, device=device)
        over = torch.zeros(len(wave), dtype=torch.bool, device=device)

        def finish(places: Tensor, length: int, reason: FinishReason) -> None:
            ids = written[places, :length].tolist()
            values = logprobs[places, :length].tolist()
            done = [(place, wave[place]) for place in places.tolist()]
            for (place, row), row_ids, row_values in zip(done, ids, values, strict=True):
                asked = requests[row.request].routes
                row.completion = Completion(
                    token_ids=tuple(row_ids),
                    logprobs=tuple(row_values),
                    finish_reason=reason,
                    weight_version=weight_version,
                    routes=None if routes is None else routes.of(place, length, asked),
                )
            on_ended([row for _, row in done])

        # `rows` are the completions still in the batch; ended ones leave it when enough have gathered.
        rows = torch.arange(len(wave), device=device)
        prompts = [of_requests[row.request] for row in wave]
        routes = None
        if any(requests[row.request].routes is not None for row in wave):
            routes = WaveRoutes(self.model, prompts, longest)
        logits, state = self._read_prompts(prompts, longest)
        if routes is not None:
            routes.read()
        seen = None
        if sampling.repetition_penalty != 1:
            seen = torch.zeros(len(wave), logits.shape[-1], dtype=torch.bool, device=device)
            for place, prompt in enumerate(prompts):
                seen[place, list(prompt.token_ids)] = True
        # Only the end of a text is looked at for stop strings: a token has at least one byte.
        tail = max((len(text.encode()) for text in sampling.stop), default=0) + 8
        for step in range(longest):
            tokens, chosen = self._sample(
                logits, uniforms[rows, step], sampling, None if seen is None else seen[rows]
            )
            if seen is not None:
                seen[rows, tokens] = True
            written[rows, step] = tokens
            logprobs[rows, step] = chosen
            ended = torch.isin(tokens, ends)
            if sampling.stop:
                ended |= self._hits_stop_string(
                    written[rows, max(0, step + 1 - tail) : step + 1], sampling.stop
                )
            running = ~over[rows]
            last = (limits[rows] == step + 1) | unwanted()
            stopped = rows[ended & running]
            full = rows[~ended & running & last]
            over[stopped] = True
            over[full] = True
            if len(stopped):
                finish(stopped, step + 1, "stop")
            if len(full):
                finish(full, step + 1, "length")
            alive = ~over[rows]
            count = int(alive.sum())
            if count == 0:
                break
            if count < _COMPACT_BELOW * len(rows):
                keep = alive.nonzero().squeeze(-1)
                rows = rows[keep]
                tokens = tokens[keep]
                state.select_rows(keep)
            logits = self._next_logits(tokens, state)
            if routes is not None:
                routes.wrote(rows, step)

    def _hits_stop_string(self, written: Tensor, stop: Sequence[str]) -> Tensor:
        """Which rows' text holds a stop string."""
        texts = [self.tokenizer.decode(ids) for ids in written.tolist()]
        return torch.tensor([any(s in text for s in stop) for text in texts], device=written.device)

    def _read_prompts(self, prompts: list[PromptWithImages], room: int) -> tuple[Tensor, Any]:
        """Reads each different prompt once, equal ones being neighbours; gives every row the logits of its first token.
        `room`: tokens that each will write at most."""
        device = self.model.device
        different = list(dict.fromkeys(prompts))
        width = max(len(prompt.token_ids) for prompt in different)
        padded = [
            [self.pad_token_id] * (width - len(prompt.token_ids)) + list(prompt.token_ids)
            for prompt in different
        ]
        token_ids = torch.tensor(padded, device=device)
        lengths = torch.tensor([len(prompt.token_ids) for prompt in different], device=device)
        columns = torch.arange(width, device=device)
        attended = columns >= (width - lengths)[:, None]
        cache = AppendCache(self.config)
        ragged = not bool(attended.all())
        positions = (columns - (width - lengths)[:, None]).clamp(min=0)
        images: dict[str, Any] = {}
        behind = lengths
        if self.vision is not None:
            spans = []
            for number, prompt in enumerate(different):
                count = len(prompt.token_ids)
                spans += [PromptSpan(-1, 0, width - count), PromptSpan(number, 0, count)]
            axes = self.vision.position_ids(different, spans, len(different))
            if axes is not None:
                positions = axes.to(device)
                behind = positions[1:, :, -1].amax(0) + 1
            inputs = self.vision.inputs(different, spans, device)
            if inputs is not None:
                images = image_arguments(self.model, token_ids, inputs)
        logits = self._last_logits(
            token_ids, attended if ragged else None, positions, cache, **images
        )
        where = {prompt: number for number, prompt in enumerate(different)}
        rows = torch.tensor([where[prompt] for prompt in prompts], device=device)
        groups = Groups(rows, self._shares)
        cache.begin(groups)
        return logits[rows], _DecodeState(
            cache, groups, behind[rows], attended[rows] if ragged else None
        )

    @property
    def _shares(self) -> bool:
        """Whether a prompt's keys are held once for all its completions."""
        return shares_prompts(self.model)

    def _sample(
        self, logits: Tensor, uniforms: Tensor, sampling: SamplingParams, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return sample(logits, uniforms, sampling, seen)

    def _next_logits(self, tokens: Tensor, state: Any) -> Tensor:
        mask = state.advance()
        shared = state.groups.shared
        if shared:  # of four dimensions: it is taken as it is, none is made
            mask = (
                tokens.new_ones(1, 1, 1, 1, dtype=torch.bool)
                if mask is None
                else mask[:, None, None, :]
            )
        with decoding(self.model, shared):
            return self._last_logits(
                tokens[:, None], mask, state.positions[:, None] - 1, state.cache
            )

    def _last_logits(
        self,
        token_ids: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        cache: AppendCache,
        **images: Any,
    ) -> Tensor:
        """`[B, V]`, by the model's own forward: what an architecture does to its logits is part of it."""
        logits: Tensor = self.model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **images,
        ).logits
        return logits[:, -1]


@dataclass(slots=True)
class _DecodeState:
    """The state of the next decode step, row by row: the cache, its groups, the next token's position `[B]`, and what
    of the prompts (or of all, where they are not shared) is not padding, bool `[B, P]`, None where nothing is
    padded."""

    cache: AppendCache
    groups: Groups
    positions: Tensor
    attended: Tensor | None

    def bytes_per_token(self) -> int:
        return self.cache.bytes_per_token()

    def select_rows(self, rows: Tensor) -> None:
        kept, of = self.groups.of[rows].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        self.groups = Groups(of, self.groups.shared)
        self.cache.select(rows, kept, self.groups)
        self.positions = self.positions[rows]
        self.attended = None if self.attended is None else self.attended[rows]

    def advance(self) -> Tensor | None:
        """Counts one more token; returns `attended`."""
        self.positions = self.positions + 1
        if self.attended is not None and not self.groups.shared:
            self.attended = torch.cat(
                [self.attended, self.attended.new_ones(len(self.attended), 1)], dim=1
            )
        return self.attended


class WaveRoutes:
    """Holds the experts of all tokens that a wave reads and writes: takes what the model's routers have chosen after each
    of its calls, while `Routing.noting` is open. A token has its experts once it was read: the last of a completion never
    is.

    Args:
        prompts: of the wave's rows, equal ones being neighbours.
        longest: tokens of a completion at most.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[PromptWithImages], longest: int
    ) -> None:
        self._routing = routing_of(model)
        self._prompts = prompts
        layers, chosen, _ = self._routing.shape
        size = (len(prompts), longest, layers, chosen)
        self._written = torch.zeros(size, dtype=self._routing.shape.dtype, device=model.device)
        self._read: dict[PromptWithImages, Tensor] = {}

    def read(self) -> None:
        """Takes those of the prompts, each of which was read once, padded on the left."""
        different = list(dict.fromkeys(self._prompts))
        noted = self._routing.noted()
        of_prompts = noted.view(len(different), -1, *noted.shape[1:])
        for prompt, routes in zip(different, of_prompts, strict=True):
            self._read[prompt] = routes[len(routes) - len(prompt.token_ids) :]

    def wrote(self, rows: Tensor, step: int) -> None:
        """Takes those of token `step` of these rows."""
        self._written[rows, step] = self._routing.noted()

    def of(self, row: int, length: int, asked: RoutesAsked | None) -> Routes | None:
        """Returns those of a row's prompt and of its completion of `length` tokens without the last."""
        if asked is None:
            return None
        whole = torch.cat([self._read[self._prompts[row]], self._written[row, : length - 1]])
        return packed(whole[asked.first :].cpu().numpy(), asked)


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode (no dropout, and gradient checkpointing would switch the cache off), then back."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)
