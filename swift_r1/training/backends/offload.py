"""Weights and optimizer states that are in host memory while nothing needs them on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Home:
    """A frozen module and where it lives: on the device for good, or with `offload` on the host between its uses
    (`--offload_ref_model`).

    Where everything is on the host anyway nothing moves.
    """

    def __init__(self, module: nn.Module, offload: bool) -> None:
        self.module = module.cpu() if offload else module
        self._offload = offload

    @contextmanager
    def at_work(self, device: torch.device) -> Iterator[None]:
        """The weights are on `device` while this is open."""
        if self._offload:
            self.module.to(device)
        try:
            yield
        finally:
            if self._offload:
                self.module.cpu()


class Movable:
    """Tensors that can leave their device for host memory and come back (`--offload_model`, `--offload_optimizer`).

    What moves is their storage: all that shares it (tied weights, DeepSpeed's views into its flat buffers) goes along
    and is valid again afterwards, bit for bit. Meanwhile none of it may be read.

    Args:
        tensors: those there are now: an optimizer has no moments before its first step.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []

    def leave(self, device: torch.device) -> None:
        """Copies to the host what is on a device of this type, and frees it there; what is away stays away."""
        if self._away:
            return
        for storage in {one.data_ptr(): one for one in map(_storage, self._tensors())}.values():
            if storage.device.type != device.type or not storage.nbytes():
                continue
            on_host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
            on_host.copy_(_bytes_of(storage))
            storage.resize_(0)
            self._away.append((storage, on_host))

    def come_back(self) -> None:
        """Nothing to do where all of it is here."""
        for storage, on_host in self._away:
            storage.resize_(on_host.numel())
            _bytes_of(storage).copy_(on_host)
        self._away = []


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """Its parameters, and under ZeRO-3 this rank's parts of them."""
    for parameter in module.parameters():
        yield parameter
        if (part := getattr(parameter, "ds_tensor", None)) is not None:
            yield part


def states_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What an optimizer remembers of its parameters, single numbers left out."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
