"""A checkpoint of a run: the policy for its users, and `state/` to go on from. All ranks give, the main one writes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from swift_r1.errors import RunFailed
from swift_r1.training.backends.base import Backend, CriticBackend, ReferencePolicy
from swift_r1.training.checkpoints import remove_old_checkpoints, save_checkpoint
from swift_r1.training.distributed import Ranks
from swift_r1.training.lora import checkpoint_weights, policy_weights
from swift_r1.training.merging import write_base
from swift_r1.training.quantization import Quantization
from swift_r1.training.rng import rng_state
from swift_r1.training.run_state import STATE, RunState

logger = logging.getLogger("swift_r1.training")

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

    Args:
        reference: one whose weights move and must be saved, or None.
        keep: `--save_total_limit`.
        with_state: false for `--save_only_model true`.
        quantization: of the weights under adapters.
        critic: of PPO: its model is saved too, in a folder of its own.
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
    ) -> None:
        self.run_dir, self.backend, self.reference, self.tokenizer = run_dir, backend, reference, tokenizer
        self.ranks, self.keep, self.with_state = ranks, keep, with_state
        self._weights = checkpoint_weights(backend.model)
        self._failures = 0
        self._quantization, self._critic = quantization, critic

    def save(self, step: int, saved: Saved, last: bool, best_step: int | None = None) -> None:
        """Makes `checkpoint-<step>`. A failure is logged, unless it is the third in a row or `last`.

        The checkpoint of `best_step` stays, however old.

        Raises:
            RunFailed: then.
        """
        weights = {name: tensor for bucket in self.backend.weight_buckets(self._weights) for name, tensor in bucket}
        critic_weights: dict[str, Tensor] = {}
        if self._critic is not None:
            buckets = self._critic.weight_buckets(policy_weights(self._critic.model))
            critic_weights = {name: tensor for bucket in buckets for name, tensor in bucket}
        rng = self._everyones_rng()
        # Gathered while they are written, so that only a part of the state is in memory twice.
        reference = iter(self.reference.weight_buckets() if self.reference and self.with_state else ())
        optimizer = iter(self.backend.training_state() if self.with_state else ())
        critic = iter(self._critic.training_state() if self._critic and self.with_state else ())

        def write(folder: Path) -> None:
            self.backend.model.save_pretrained(folder, state_dict=weights)
            write_base(self.backend.model, folder, self._quantization)
            self.tokenizer.save_pretrained(folder)
            if self._critic is not None:
                self._critic.model.save_pretrained(folder / CRITIC, state_dict=critic_weights)
                self.tokenizer.save_pretrained(folder / CRITIC)
            if not self.with_state:
                return
            assert saved.run is not None
            state = folder / STATE
            state.mkdir()
            saved.run.write(state)
            save_file(rng, state / f"{_RNG}.safetensors")
            if saved.round:
                save_file(dict(saved.round), state / f"{_ROUND}.safetensors")
            _write_buckets(reference, state, _REFERENCE)
            _write_buckets(optimizer, state, _OPTIMIZER)
            _write_buckets(critic, state, _CRITIC)

        failure = None
        if self.ranks.is_main:
            try:
                save_checkpoint(self.run_dir, step, write)
                remove_old_checkpoints(self.run_dir, self.keep, best_step)
                self._failures = 0
            except RunFailed as error:
                failure = error
                self._failures += 1
        # What is left of them: the other ranks' part, and the main one's where its disk refused.
        for _ in (*reference, *optimizer, *critic):
            pass
        failures = int(self.ranks.max(float(self._failures)))
        if failures and (last or failures >= FAILURES):
            times = "" if failures == 1 else f" ({failures} saves in a row failed)"
            raise RunFailed(f"{failure or 'the main rank cannot save'}{times}")
        if failure is not None:
            logger.warning("%s; the run goes on and tries again at the next save", failure)

    def _everyones_rng(self) -> dict[str, Tensor]:
        gathered = {}
        for name, tensor in rng_state().items():
            for rank, state in enumerate(self.ranks.gather(tensor) or ()):
                gathered[f"{name}:{rank}"] = state
        return gathered


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


def _write_buckets(buckets: Iterable[Sequence[tuple[str, Tensor]]], folder: Path, kind: str) -> None:
    for number, bucket in enumerate(buckets):
        save_file(dict(bucket), folder / f"{kind}-{number:05}.safetensors")
