"""A checkpoint of a run: the policy for its users, and `state/` to go on from. Every rank writes a share of it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from swift_r1.errors import RunFailed, describe
from swift_r1.flags.training import EIGHT_BIT
from swift_r1.models.loading import Quantization, as_readable_as_its_config
from swift_r1.models.merging import write_base
from swift_r1.models.multimodal import copy_processor, is_multimodal
from swift_r1.models.older_readers import write_older_rope
from swift_r1.models.shape import transformers_config
from swift_r1.models.tokenizer_files import tokenizer_files, write_tokenizer
from swift_r1.models.weights import (
    added_weights,
    has_adapters,
    policy_weights,
    whole_dtype,
    whole_shape,
)
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend, ReferencePolicy
from swift_r1.training.backends.optimizer_state import StateBucket
from swift_r1.training.checkpoint.folder import Draft, link_checkpoints, remove_old_checkpoints
from swift_r1.training.checkpoint.state import STATE, RunState, rng_state
from swift_r1.training.checkpoint.tensors import ModelShards, SavedTensors, one_each, write_tensors
from swift_r1.training.checkpoint.upload import Uploader
from swift_r1.training.memory import size_text

logger = logging.getLogger("swift_r1.training")

T = TypeVar("T")

FAILURES = 3  # saves that may fail one after another before the run ends
# kinds of tensors in `state/`
OPTIMIZER = "optimizer"
REFERENCE = "reference"
CRITIC_OPTIMIZER = "critic"
_ROUND = "round"
_RNG = "rng"
CRITIC = "critic"  # folder of the critic in a checkpoint, for `--critic_model`


@dataclass
class Saver:
    """Writes checkpoints and tolerates a full disk for a while. All methods are collective.

    Every rank writes a share: one file of the weights, and every so many buckets of the state. All write at the same
    time, when each has a bucket. Only what is being written is in memory twice.
    """

    run_dir: Path
    backend: Backend  # of the policy
    reference: ReferencePolicy | None  # one whose weights move and must be saved, or None
    tokenizer: Any
    ranks: Ranks
    keep: int | None  # `--save_total_limit`
    with_state: bool  # false for `--save_only_model true`
    quantization: Quantization | None = None  # of the weights under adapters
    critic: Backend | None = None  # of PPO: its model is saved too, in a folder of its own
    progress: Callable[[str], None] = lambda _doing: None  # is told of each bucket
    links: bool = False  # `--create_checkpoint_symlink`
    uploader: Uploader | None = None  # of `--push_to_hub`, on rank 0
    # models are written in the dtype of the config that they were loaded with
    own_dtype: bool = False
    # of the run's folder and a step: the README.md
    model_card: Callable[[Path, int], str] | None = None

    def __post_init__(self) -> None:
        self._failures = 0
        # now: the model's folder may go
        self._tokenizer_files = (
            tokenizer_files(self.tokenizer, alone=has_adapters(self.backend.model))
            if self.ranks.is_rank0
            else {}
        )
        models = [
            ("." if one is self.backend else CRITIC, one)
            for one in (self.backend, self.critic)
            if one
        ]
        self._models: list[tuple[str, Backend, ModelShards]] = []
        for name, one in models:
            if not has_adapters(one.model):
                model: Any = one.model
                dtype = transformers_config(model.name_or_path).dtype if self.own_dtype else None
                self._models.append(
                    (name, one, ModelShards(model, policy_weights(model), self.ranks, dtype))
                )

    def lack_of_room(self, count: int, optim: str) -> str | None:
        """Says that so many checkpoints do not fit on the disk; None where they do."""
        size = count * self.bytes_of_each(optim)
        free = shutil.disk_usage(self.run_dir).free
        if size <= free:
            return None
        each = size_text(size / count)
        what = (
            f"a checkpoint takes about {each}"
            if count == 1
            else f"{count:,} checkpoints take about {each} each"
        )
        return (
            f"{what}, and {size_text(free)} are free in {self.run_dir}: make room, or give --save_total_limit, "
            "--save_only_model true or another --output_dir"
        )

    def bytes_of_each(self, optim: str) -> int:
        """Returns about what a checkpoint takes: weights or adapters, and with state what the optimizer keeps."""
        size = 0
        moments = {"sgd": 0} | dict.fromkeys(EIGHT_BIT, 2)
        backends = [self.backend] if self.critic is None else [self.backend, self.critic]
        for one in backends:
            for parameter in one.model.parameters():
                width = whole_dtype(parameter).itemsize
                count = whole_shape(parameter).numel()
                if parameter.requires_grad or not has_adapters(one.model):
                    size += count * width
                if parameter.requires_grad and self.with_state:
                    size += count * (moments.get(optim, 8) + 4)  # and the float32 weight
        return size

    def save(
        self,
        step: int,
        run: RunState | None,
        round_tensors: Mapping[str, Tensor],
        last: bool,
        best_step: int | None = None,
    ) -> bool:
        """Makes `checkpoint-<step>`; that of `best_step` stays, however old. A failure is logged, and rank 0 is told.

        Args:
            run: on rank 0; None elsewhere.
            round_tensors: of the open round, by name; empty between rounds and on all ranks except 0.

        Raises RunFailed: it is the third failure in a row, or `last`.
        """
        draft = Draft(self.run_dir, step)
        with self.ranks.busy():
            small = self._gathered()
            if self.ranks.is_rank0:
                draft.attempt(draft.open)
                draft.attempt(
                    lambda: self._write_small(step, draft.folder, run, round_tensors, *small)
                )
            self.ranks.barrier()
            for name, backend, shards in self._models:
                tensors = self._reported(shards.tensors(backend))
                if shards.file is not None:
                    draft.write(
                        str(Path(name, shards.file)), partial(shards.write, tensors=tensors)
                    )
                for _ in tensors:
                    pass  # whoever writes nothing takes part in gathering
            for kind, buckets in self._state():
                size = self.ranks.world_size
                for turn, bucket in enumerate(one_each(self._reported(buckets), size)):
                    if bucket:
                        name = f"{STATE}/{kind}-{turn * size + self.ranks.rank:05}.safetensors"
                        draft.write(name, partial(write_tensors, tensors=dict(bucket)))
            fault = self._concluded(draft, best_step)
            if self.uploader is not None and fault is None:
                self.uploader.saved(draft.final, last)
        self._failures = 0 if fault is None else self._failures + 1
        failures = int(self.ranks.max(float(self._failures)))
        if failures and (last or failures >= FAILURES):
            times = "" if failures == 1 else f" ({failures} saves in a row failed)"
            raise RunFailed(f"{fault or 'rank 0 cannot save'}{times}")
        if fault is not None:
            logger.warning("%s; the run continues and tries again at the next save", fault)
        return fault is None

    def _gathered(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Adapters, tied ones under each of their names, and the ranks' random generators, on rank 0."""
        adapters: dict[str, Tensor] = {}
        for bucket in self.backend.weight_buckets(added_weights(self.backend.model)):
            adapters |= bucket
        named = self.backend.model.named_parameters
        first = {id(parameter): name for name, parameter in named()}
        for name, parameter in named(remove_duplicate=False):
            if first[id(parameter)] in adapters.keys() - {name}:
                adapters[name] = adapters[first[id(parameter)]].clone()
        rng = {}
        for name, tensor in rng_state().items():
            for rank, state in enumerate(self.ranks.gather(tensor) or ()):
                rng[f"{name}:{rank}"] = state
        return adapters, rng

    def _write_small(
        self,
        step: int,
        folder: Path,
        run: RunState | None,
        round_tensors: Mapping[str, Tensor],
        adapters: dict[str, Tensor],
        rng: dict[str, Tensor],
    ) -> None:
        """Everything except models' weights and the state's buckets. Given no weights transformers writes the rest."""
        with _own_state(self.backend.model):
            self.backend.model.save_pretrained(folder, state_dict=adapters)
        as_readable_as_its_config(folder)
        write_base(self.backend.model, folder, self.quantization)
        write_tokenizer(self._tokenizer_files, folder)
        if is_multimodal(self.backend.model.config):
            copy_processor(str(self.backend.model.name_or_path), folder)
        self._write_card(folder, step)
        if self.critic is not None:
            self.critic.model.save_pretrained(folder / CRITIC, state_dict={})
            write_tokenizer(self._tokenizer_files, folder / CRITIC)
        for name, one, shards in self._models:
            shards.write_index(folder / name)
            if shards.dtype is not None:
                config: Any = copy(one.model.config)
                config.dtype = shards.dtype
                config.save_pretrained(folder / name)
            write_older_rope(folder / name)
        if self.with_state:
            assert run is not None
            state = folder / STATE
            state.mkdir()
            run.write(state)
            write_tensors(state / f"{_RNG}.safetensors", rng)
            if round_tensors:
                write_tensors(state / f"{_ROUND}.safetensors", round_tensors)

    def _write_card(self, folder: Path, step: int) -> None:
        if self.model_card is None:
            return
        try:
            card = self.model_card(self.run_dir, step)
        except (OSError, ValueError, LookupError, TypeError) as error:
            # Files that somebody has damaged meanwhile: a checkpoint is worth more than its card.
            logger.warning(
                "checkpoint-%d has no model card (args.json, logging.jsonl): %s",
                step,
                describe(error),
            )
            return
        (folder / "README.md").write_text(card, encoding="utf-8")

    def _state(self) -> Iterator[tuple[str, Iterator[StateBucket]]]:
        """Yields what only a resumed run needs, by kind."""
        if self.with_state:
            if self.reference is not None:
                yield REFERENCE, self.reference.weight_buckets()
            yield OPTIMIZER, self.backend.training_state()
            if self.critic is not None:
                yield CRITIC_OPTIMIZER, self.critic.training_state()

    def _reported(self, items: Iterator[T]) -> Iterator[T]:
        for item in items:
            self.progress("a save")
            yield item
            del item  # before the next is gathered

    def _concluded(self, draft: Draft, best_step: int | None) -> str | None:
        """Says why there is no checkpoint, on rank 0; None where there is one, and elsewhere."""
        own = json.dumps([draft.fault, draft.hashed]).encode()
        everyones = self.ranks.gather(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        if everyones is None:
            return None
        for rank, one in enumerate(everyones):
            fault, entries = json.loads(one.numpy().tobytes())
            draft.hashed |= entries
            if draft.fault is None and fault is not None:
                draft.fault = f"rank {rank}: {fault}"
        draft.attempt(draft.publish)
        if draft.fault is not None:
            draft.drop()
            return (
                f"{draft.final} cannot be saved: {draft.fault}; earlier checkpoints are untouched"
            )
        remove_old_checkpoints(self.run_dir, self.keep, best_step)
        if self.links:
            link_checkpoints(self.run_dir, best_step)
        return None


@contextmanager
def _own_state(model: Any) -> Iterator[None]:
    """While this is open, transformers writes what it is given of a quantized model too, and not the model's own
    tensors, which may be parts."""
    quantizer = vars(model).pop("hf_quantizer", None)
    try:
        yield
    finally:
        if quantizer is not None:
            model.hf_quantizer = quantizer


def round_tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return SavedTensors(checkpoint / STATE, _ROUND).all()


def rng_of(checkpoint: Path, rank: int) -> dict[str, Tensor]:
    """A rank's generators; empty for a rank that the saved run did not have."""
    everyones = SavedTensors(checkpoint / STATE, _RNG).all()
    return {
        name.partition(":")[0]: state
        for name, state in everyones.items()
        if name.endswith(f":{rank}")
    }
