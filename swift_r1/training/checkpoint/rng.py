"""Random number generators of this process: seeded at the start, saved and restored as tensors.

Completions and the order of prompts have seeds of their own; these are for whatever else draws: dropout, plugin code
that runs in the trainer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Tensor]:
    """The states of Python's, numpy's and torch's generators, as 1-D tensors by name."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    assert version == 3 and kind == "MT19937"
    state = {
        "python": torch.tensor(numbers, dtype=torch.long),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.long),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Takes a state that `rng_state` gave. A GPU's is left out where there is none here or there was none then."""
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
