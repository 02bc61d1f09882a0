"""A checkpoint of a run: the policy for its users, and `state/` to go on from. Every rank writes a share of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from swift_r1.errors import RunFailed
from swift_r1.models.lora import checkpoint_weights, has_adapters, policy_weights
from swift_r1.models.merging import write_base
from swift_r1.models.quantization import Quantization
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.base import Backend, CriticBackend, ReferencePolicy, Training
from swift_r1.training.backends.optimizer_state import StateBucket
from swift_r1.training.checkpoint.folder import Draft, remove_old_checkpoints
from swift_r1.training.checkpoint.model_shards import ModelShards
from swift_r1.training.checkpoint.rng import rng_state
from swift_r1.training.checkpoint.run_state import STATE, RunState
from swift_r1.training.checkpoint.tensor_files import Entry, write_tensors

logger = logging.getLogger("swift_r1.training")

T = TypeVar("T")

FAILURES = 3
"""Saves that may fail one after another before the run ends."""
_OPTIMIZER, _REFERENCE, _CRITIC, _ROUND, _RNG = "optimizer", "reference", "critic", "round", "rng"
CRITIC = "critic"
"""Folder of the critic in a checkpoint, for `--critic_model`."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What the loop gives to a checkpoint beside the policy.

    Attributes:
        run: None on all but the main rank.
        round: tensors of a round in the middle, by name; empty between rounds and on all but the main rank.
    """

    run: RunState | None
    round: Mapping[str, Tensor]


class Saver:
    """Writes checkpoints and forgives a full disk for a while. All methods are collective.

    Every rank writes a share: of the weights a file, of the state every so many buckets. Only what is being written is
    in memory twice.

    Args:
        reference: one whose weights move and must be saved, or None.
        keep: `--save_total_limit`.
        with_state: false for `--save_only_model true`.
        quantization: of the weights under adapters.
        critic: of PPO: its model is saved too, in a folder of its own.
        progress: hears of each bucket.
    """

    def __init__(
        self,
        run_dir: Path,
        backend: Backend,
        reference: ReferencePolicy | None,
        tokenizer: Any,
        ranks: Ranks,
        keep: int | None,
        with_state: bool,
        quantization: Quantization | None = None,
        critic: CriticBackend | None = None,
        progress: Callable[[str], None] = lambda _doing: None,
    ) -> None:
        self.run_dir, self.backend, self.reference, self.tokenizer = run_dir, backend, reference, tokenizer
        self.ranks, self.keep, self.with_state = ranks, keep, with_state
        self._failures = 0
        self._quantization, self._critic, self._progress = quantization, critic, progress
        self._models: list[tuple[str, Training, ModelShards]] = []
        if not has_adapters(backend.model):
            self._models.append((".", backend, ModelShards(backend.model, policy_weights(backend.model), ranks)))
        if critic is not None:
            self._models.append((CRITIC, critic, ModelShards(critic.model, policy_weights(critic.model), ranks)))

    def save(self, step: int, saved: Saved, last: bool, best_step: int | None = None) -> None:
        """Makes `checkpoint-<step>`. A failure is logged, unless it is the third in a row or `last`.

        The checkpoint of `best_step` stays, however old.

        Raises:
            RunFailed: then.
        """
        draft, main = Draft(self.run_dir, step), self.ranks.is_main
        with self.ranks.busy():
            small = self._gathered()
            share = _Share(draft.folder)
            if main:
                share.attempt(draft.open)
                share.attempt(lambda: self._write_small(draft.folder, saved, *small))
            self.ranks.barrier()
            for name, backend, shards in self._models:
                share.model(name, shards, self._told(shards.tensors(backend)))
            for kind, buckets in self._state():
                for number, bucket in enumerate(self._told(buckets)):
                    if bucket:
                        share.tensors(f"{STATE}/{kind}-{number:05}.safetensors", dict(bucket))
            fault = self._concluded(draft, share, best_step)
        self._failures = 0 if fault is None else self._failures + 1
        failures = int(self.ranks.max(float(self._failures)))
        if failures and (last or failures >= FAILURES):
            times = "" if failures == 1 else f" ({failures} saves in a row failed)"
            raise RunFailed(f"{fault or 'the main rank cannot save'}{times}")
        if fault is not None:
            logger.warning("%s; the run goes on and tries again at the next save", fault)

    def _gathered(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Adapters, and the ranks' random generators, on the main rank."""
        adapters: dict[str, Tensor] = {}
        if has_adapters(self.backend.model):
            for bucket in self.backend.weight_buckets(checkpoint_weights(self.backend.model)):
                adapters |= bucket
        rng = {}
        for name, tensor in rng_state().items():
            for rank, state in enumerate(self.ranks.gather(tensor) or ()):
                rng[f"{name}:{rank}"] = state
        return adapters, rng

    def _write_small(self, folder: Path, saved: Saved, adapters: dict[str, Tensor], rng: dict[str, Tensor]) -> None:
        """All but models' weights and the state's buckets. Without weights transformers writes all that is beside
        them."""
        self.backend.model.save_pretrained(folder, state_dict=adapters)
        write_base(self.backend.model, folder, self._quantization)
        self.tokenizer.save_pretrained(folder)
        if self._critic is not None:
            self._critic.model.save_pretrained(folder / CRITIC, state_dict={})
            self.tokenizer.save_pretrained(folder / CRITIC)
        for name, _, shards in self._models:
            shards.write_index(folder / name)
        if self.with_state:
            assert saved.run is not None
            state = folder / STATE
            state.mkdir()
            saved.run.write(state)
            write_tensors(state / f"{_RNG}.safetensors", rng)
            if saved.round:
                write_tensors(state / f"{_ROUND}.safetensors", saved.round)

    def _state(self) -> Iterator[tuple[str, Iterator[StateBucket]]]:
        """What only a resumed run needs, by kind."""
        if self.with_state:
            if self.reference is not None:
                yield _REFERENCE, self.reference.weight_buckets()
            yield _OPTIMIZER, self.backend.training_state()
            if self._critic is not None:
                yield _CRITIC, self._critic.training_state()

    def _told(self, items: Iterator[T]) -> Iterator[T]:
        for item in items:
            self._progress("a save")
            yield item

    def _concluded(self, draft: Draft, share: _Share, best_step: int | None) -> str | None:
        """Why there is no checkpoint, on the main rank; None where there is one, and elsewhere."""
        told = json.dumps([share.fault, share.hashed]).encode()
        everyones = self.ranks.gather(torch.frombuffer(bytearray(told), dtype=torch.uint8))
        if everyones is None:
            return None
        hashed: dict[str, Entry] = {}
        for rank, one in enumerate(everyones):
            fault, own = json.loads(bytes(one.tolist()))
            hashed |= own
            if share.fault is None and fault is not None:
                share.fault = f"rank {rank}: {fault}"
        share.attempt(lambda: draft.publish(hashed))
        if share.fault is not None:
            draft.drop()
            return f"{draft.final} cannot be saved: {share.fault}; earlier checkpoints are untouched"
        remove_old_checkpoints(self.run_dir, self.keep, best_step)
        return None


class _Share:
    """What this rank writes of a checkpoint. Once the disk has refused it writes nothing more, but takes part in what
    is collective to its end.

    Attributes:
        hashed: entries of the files that it has written.
        fault: what the disk said.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hashed: dict[str, Entry] = {}
        self.fault: str | None = None

    def attempt(self, work: Callable[[], None]) -> None:
        if self.fault is None:
            try:
                work()
            except (OSError, SafetensorError) as error:
                self.fault = str(error)

    def tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        def write() -> None:
            self.hashed[name] = write_tensors(self.folder / name, tensors)

        self.attempt(write)

    def model(self, name: str, shards: ModelShards, tensors: Iterator[tuple[str, Tensor]]) -> None:
        def write() -> None:
            path = str(Path(name, shards.file or ""))
            self.hashed[path] = shards.write(self.folder / name, tensors)

        if shards.file is not None:
            self.attempt(write)
        for _ in tensors:
            pass


class SavedTensors:
    """The tensors of one kind in a checkpoint's `state/`, by name; each is read when it is asked for."""

    def __init__(self, checkpoint: Path, kind: str) -> None:
        self._where: dict[str, Any] = {}
        for path in sorted((checkpoint / STATE).glob(f"{kind}*.safetensors")):
            file = safe_open(path, "pt")
            self._where |= dict.fromkeys(file.keys(), file)

    def __call__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def all(self) -> dict[str, Tensor]:
        return {name: self(name) for name in self._where}


def optimizer_tensors(checkpoint: Path) -> SavedTensors:
    return SavedTensors(checkpoint, _OPTIMIZER)


def critic_tensors(checkpoint: Path) -> SavedTensors:
    return SavedTensors(checkpoint, _CRITIC)


def reference_tensors(checkpoint: Path) -> SavedTensors:
    return SavedTensors(checkpoint, _REFERENCE)


def round_tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return SavedTensors(checkpoint, _ROUND).all()


def rng_of(checkpoint: Path, rank: int) -> dict[str, Tensor]:
    """A rank's generators; empty for a rank that the saved run did not have."""
    everyones = SavedTensors(checkpoint, _RNG).all()
    return {name.partition(":")[0]: state for name, state in everyones.items() if name.endswith(f":{rank}")}
