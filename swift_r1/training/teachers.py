"""Who teaches the policy (`--teacher_model`, `--teacher_model_server`): what a teacher says of a round's completions.

A teacher reads the tokens that the policy wrote, after the same prompt, or after that of the row's column
`teacher_prompt`: a hint which the policy does not see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from swift_r1.data.prompts import Prompt, PromptEncoder, Wording
from swift_r1.errors import RunFailed, ServerUnreachable, UsageError
from swift_r1.flags import RunFlags
from swift_r1.flags.adapters import AdapterArguments, adapter_flags
from swift_r1.flags.distillation import HINT, POLICY
from swift_r1.models.loading import load_model
from swift_r1.models.logprobs import TokenLogprobs
from swift_r1.models.policy import MicroBatch, ModelInputs
from swift_r1.models.shape import transformers_config
from swift_r1.rollout.scoring import ScoredRound
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.decoding import other_layers
from swift_r1.training.backends.base import Backend, Movable, ReferencePolicy
from swift_r1.training.batching import Batching, RoundBatch, collate
from swift_r1.training.grpo import batch_of_round
from swift_r1.training.micro_batches import SHARED, Form
from swift_r1.training.open_round import Steps
from swift_r1.training.setup import Context, check_tokens
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import ScoreResponse, ServerRefused, tokenizer_hash

_AT_ONCE = 32  # completions in one request to a server


class CurrentPolicy:
    """The policy as it is, without a gradient: its own teacher, who reads hints."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.weights = Movable(tuple)

    @torch.no_grad()
    def logprobs(self, inputs: ModelInputs, temperature: float) -> TokenLogprobs:
        return self.backend.logprobs(inputs, temperature)


@dataclass(frozen=True)
class Teacher:
    """Says of a round's completions what a teacher thinks of them. `teach` is collective."""

    ranks: Ranks
    encoder: PromptEncoder | None  # None in a replay, which has no messages to put a hint into
    temperature: float
    # `--gkd_logits_topk`: how many of the likeliest tokens the loss needs in each place; 0: none
    top: int
    vocab_size: int  # of the policy

    def teach(self, scored: ScoredRound | None, batch: RoundBatch, steps: Steps) -> Steps:
        """The micro-batches with `teacher_logps`, and with `top` the likeliest tokens; `scored` is on rank 0."""
        raise NotImplementedError

    def filled(
        self,
        micro: MicroBatch,
        logps: Tensor,
        ids: Tensor | None = None,
        tops: Tensor | None = None,
    ) -> MicroBatch:
        """Returns a micro-batch with log-probs `[K]`, and where they are known ids and log-probs `[K, top]`."""
        taught = replace(micro, teacher_logps=micro.unflatten(logps))
        if ids is None or tops is None:
            return taught
        unknown = ids >= self.vocab_size  # rows of padding, in a larger table than the policy's
        ids = ids.masked_fill(unknown, 0)
        tops = tops.masked_fill(unknown, -torch.inf)
        return replace(taught, teacher_ids=micro.unflatten(ids), teacher_tops=micro.unflatten(tops))

    def prompts(self, scored: ScoredRound) -> list[tuple[int, ...]]:
        """Returns the prompt that the teacher reads, of each completion."""
        known: dict[int, tuple[int, ...]] = {}  # once a group
        for trajectory in scored.trained:
            prompt = trajectory.prompt
            if id(prompt) not in known:
                known[id(prompt)] = self._prompt(prompt)
        return [known[id(trajectory.prompt)] for trajectory in scored.trained]

    def _prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns a prompt with the hint, if it has one, in the place of the user's last message. Raises RunFailed."""
        hint = prompt.columns.get(HINT)
        if not hint:
            return prompt.token_ids
        if self.encoder is None:
            raise RunFailed(
                f"{prompt.prompt_id} has a {HINT}, and a replay has no messages to put it into"
            )
        asked = [
            place for place, message in enumerate(prompt.messages) if message["role"] == "user"
        ]
        if not isinstance(hint, str) or not asked:
            raise RunFailed(
                f"{prompt.prompt_id}: {HINT} must be text, in the place of the user's message: {hint!r}"
            )
        messages = list(prompt.messages)
        messages[asked[-1]] = dict(messages[asked[-1]]) | {"content": hint}
        return self.encoder.tokenize(self.encoder.render(messages, prompt.tools))


@dataclass(frozen=True)
class LocalTeacher(Teacher):
    """A model in the trainer's processes, spread over them as the policy is."""

    model: ReferencePolicy | CurrentPolicy
    batching: Batching
    alike: bool  # of the policy's architecture: it takes rows in the same forms

    def teach(self, scored: ScoredRound | None, batch: RoundBatch, steps: Steps) -> Steps:
        hinted = None
        prompts = [] if scored is None else self.prompts(scored)
        own = (
            [] if scored is None else [trajectory.prompt.token_ids for trajectory in scored.trained]
        )
        if self.ranks.max(float(prompts != own)):
            hinted = batch_of_round(scored, self.ranks, prompts)
        return [[self._taught(micro, batch, hinted) for micro in step] for step in steps]

    def _taught(
        self, micro: MicroBatch, batch: RoundBatch, hinted: RoundBatch | None
    ) -> MicroBatch:
        inputs = (
            micro.inputs if self.alike and hinted is None else self._inputs(micro, hinted or batch)
        )
        found = self.model.logprobs(inputs._replace(top=self.top, routes=None), self.temperature)
        if found.likeliest is None:
            return self.filled(micro, found.logps)
        return self.filled(micro, found.logps[:, 0], found.likeliest[:, 1:], found.logps[:, 1:])

    def _inputs(self, micro: MicroBatch, batch: RoundBatch) -> ModelInputs:
        """The same completions in the same order, after the prompts of `batch`."""
        samples = micro.samples.tolist()
        batching = self.batching
        form = Form()
        if self.alike:
            form = batching.form if batching.share_from is None else SHARED
        same = batch.prompt_numbers.tolist()
        groups = groupby(
            samples, key=lambda one: (one // batching.group_size, same[one]) if form.shared else one
        )
        units = [tuple(unit) for _, unit in groups]
        micro = collate(
            batch,
            units,
            form,
            self.ranks.device,
            own_attention=batching.own_attention,
            sequence=self.ranks.sequence,
        )
        return micro.inputs


@dataclass(frozen=True)
class ServerTeacher(Teacher):
    """`swift rollout` servers, one a tag, which rank 0 asks."""

    servers: Mapping[str, RolloutClient]  # on rank 0; by tag, `""` for the only one
    versions: Mapping[str, int]  # of the weights that each had at the start
    args: RunFlags
    progress: Callable[[str], None]  # of the watchdog

    def teach(self, scored: ScoredRound | None, batch: RoundBatch, steps: Steps) -> Steps:
        with self.ranks.busy():
            answers = None if scored is None else self._ask(scored)
        logps, *wide = self.ranks.broadcast(answers)
        of_tokens = [logps, *(one.view(len(logps), self.top) for one in wide)]
        first = batch.own_starts

        def taught(micro: MicroBatch) -> MicroBatch:
            mask = micro.mask.cpu()
            place = (first[micro.samples][:, None] + torch.arange(mask.shape[1]))[mask]
            return self.filled(micro, *(one[place].to(micro.mask.device) for one in of_tokens))

        return [[taught(micro) for micro in step] for step in steps]

    def _ask(self, scored: ScoredRound) -> list[Tensor]:
        """Returns, for all tokens of the completions one after another: log-probs `[K]`, and with `top` ids and
        log-probs `[K * top]`. Raises ServerUnreachable, RunFailed."""
        trained = scored.trained
        of_tag: dict[str, list[int]] = {tag: [] for tag in self.servers}
        for number, trajectory in enumerate(trained):
            of_tag[self._tag(trajectory.prompt)].append(number)
        work = []
        # servers in turn: as many are asked at a time
        for start in range(0, len(trained), _AT_ONCE):
            for tag, numbers in of_tag.items():
                part = numbers[start : start + _AT_ONCE]
                if part:
                    work.append((tag, part))
        # no agent has a teacher
        written = [trajectory.sequences[0].token_ids for trajectory in trained]
        whole = [(*prompt, *ids) for prompt, ids in zip(self.prompts(scored), written, strict=True)]
        rows: dict[int, tuple[Sequence[Any], ...]] = {}
        with ThreadPoolExecutor(len(self.servers)) as threads:
            answers = threads.map(
                lambda part: self._scores(part[0], [whole[number] for number in part[1]]), work
            )
            for (_, numbers), answer in zip(work, answers, strict=True):
                self.progress("the teacher's log-probs")
                columns = (answer.logprobs, answer.top_ids, answer.top_logprobs)
                for place, number in enumerate(numbers):
                    size = len(written[number])
                    rows[number] = tuple(
                        column[place][-size:] if column else () for column in columns
                    )
        kinds = (torch.float32, torch.long, torch.float32)[: 3 if self.top else 1]
        return [
            torch.tensor(
                [value for number in range(len(whole)) for value in rows[number][part]], dtype=kind
            ).flatten()
            for part, kind in enumerate(kinds)
        ]

    def _tag(self, prompt: Prompt) -> str:
        if "" in self.servers:
            return ""
        key = self.args.teacher_tag_key
        # one may be a number
        tag = str(prompt.columns.get(key, prompt.dataset if key == "dataset" else None))
        if tag not in self.servers:
            known = ", ".join(self.servers)
            raise RunFailed(
                f"{prompt.prompt_id}: {key} {tag} is of no teacher of --teacher_model_server ({known})"
            )
        return tag

    def _scores(self, tag: str, sequences: Sequence[tuple[int, ...]]) -> ScoreResponse:
        """A server that is away, or is full, is asked again until `--vllm_server_timeout` is over."""
        client = self.servers[tag]
        end = time.monotonic() + self.args.vllm_server_timeout
        while True:
            try:
                answer = client.score(sequences, self.temperature, self.top, every_copy=False)
                break
            except (ServerUnreachable, ServerRefused) as error:
                left = end - time.monotonic()
                if left <= 0 or (isinstance(error, ServerRefused) and error.status != 503):
                    raise
                time.sleep(min(left, getattr(error, "retry_after", None) or 1.0))
                client.wait_until_ready(left)
        if answer.weight_version != self.versions[tag]:
            raise RunFailed(
                f"the teacher at {client.base_url} has got other weights: no other run may train it"
            )
        return answer


def open_teacher(context: Context, backend: Backend, batching: Batching) -> Teacher | None:
    """Returns the teacher; None without one. Collective. Raises UsageError: it cannot be loaded or reached, or reads
    other tokens."""
    args = context.args
    ranks = context.ranks
    if args.distillation is None:
        return None
    encoder = (
        PromptEncoder(context.tokenizer, Wording.of(args)) if context.start.replay is None else None
    )
    top = args.gkd_logits_topk or 0
    vocab_size = backend.vocab_size
    if top > vocab_size:
        raise UsageError(f"--gkd_logits_topk {top}: the policy knows {vocab_size} tokens")
    common = (ranks, encoder, args.temperature, top, vocab_size)
    if args.teacher_model_server:
        servers = _open_servers(context, vocab_size) if ranks.is_rank0 else {}
        versions = {tag: client.info().weight_version for tag, client in servers.items()}
        return ServerTeacher(*common, servers, versions, args, context.watchdog.progress)
    if args.teacher_model == POLICY:
        return LocalTeacher(*common, CurrentPolicy(backend), batching, True)
    path = args.teacher_model or args.model
    # before its config: it says what cannot be read
    check_tokens(path, "--teacher_model", context.tokenizer)
    config: Any = transformers_config(path).get_text_config()
    own: Any = backend.model.config.get_text_config()
    if config.vocab_size < vocab_size:
        raise UsageError(
            f"--teacher_model {path} knows {config.vocab_size} tokens, and the policy {vocab_size}"
        )
    alike = config.model_type == own.model_type and other_layers(config) == other_layers(own)
    if ranks.sequence is not None and not (
        alike and config.num_attention_heads % ranks.sequence.size == 0
    ):
        raise UsageError(
            f"--sequence_parallel_size: --teacher_model {path} cannot be spread as --model is"
        )

    lora = None
    folder = args.teacher_adapters
    if folder is not None:
        flags = adapter_flags("--teacher_adapters", folder)
        lora = AdapterArguments(train_type="lora", adapters=[folder], **flags)

    def load() -> PreTrainedModel:
        return load_model(
            path, args.torch_dtype, False, lora, attention=args.attn_impl, flag="--teacher_model"
        )

    itself = path == args.model and lora is None
    offload = args.offload_teacher_model and ranks.device.type != "cpu"
    return LocalTeacher(
        *common, backend.reference(offload, None if itself else load), batching, alike
    )


def _open_servers(context: Context, vocab_size: int) -> dict[str, RolloutClient]:
    found = {}
    hashed = tokenizer_hash(context.tokenizer)
    for tag, url in context.args.teacher_servers.items():
        client = context.cleanup.enter_context(RolloutClient(url, context.args.api_key))
        info = client.wait_until_ready(context.args.vllm_server_timeout)
        if info.tokenizer_hash != hashed or info.vocab_size < vocab_size:
            raise UsageError(
                f"--teacher_model_server {url} has another tokenizer than --model: it would read other words"
            )
        found[tag] = client
    return found
