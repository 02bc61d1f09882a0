"""A bucket in GPU memory that another process on the host opens (CUDA IPC): what an engine beside the trainer loads
without the way through the host. torch would pickle the handle; here its fields go over the wire, one by one."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from swift_r1.sync.buckets import Tensors
from swift_r1.wire.protocol import DeviceMemory

_ALIGNMENT = 256  # bytes; of each tensor's place


def gpu_id(device: torch.device | int) -> str:
    """Returns the id of a GPU, the same in every process of the host."""
    return str(torch.cuda.get_device_properties(device).uuid)


def own_gpu() -> str | None:
    """Returns the id of this process's current GPU."""
    return gpu_id(torch.cuda.current_device()) if torch.cuda.is_available() else None


def packed(bucket: Tensors) -> Tensor:
    """A copy of the bucket as one block of bytes, on its device."""
    kinds = [(tensor.dtype, tensor.shape) for _, tensor in bucket]
    block = torch.empty(sum(map(_room, kinds)), dtype=torch.uint8, device=bucket[0][1].device)
    for place, (_, tensor) in zip(tensors_in(block, kinds), bucket, strict=True):
        place.copy_(tensor.detach())
    return block


def tensors_in(block: Tensor, kinds: Iterable[tuple[torch.dtype, Sequence[int]]]) -> Iterator[Tensor]:
    """The tensors of these dtypes and shapes that `packed` has put there; views. Raises RuntimeError where the block
    is too small."""
    start = 0
    for kind in kinds:
        dtype, shape = kind
        yield block[start : start + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        start += _room(kind)


def _room(kind: tuple[torch.dtype, Sequence[int]]) -> int:
    dtype, shape = kind
    return -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def shared(block: Tensor) -> DeviceMemory:
    """Returns what another process opens it by, once all that was to write to it has; it must live on until that is
    done."""
    torch.cuda.current_stream(block.device).synchronize()
    storage: Any = block.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return DeviceMemory(
        gpu=gpu_id(block.device),
        handle=base64.b64encode(handle).decode(),
        size=size,
        offset=offset,
        counter=counter.decode(),
        counter_offset=counter_offset,
        event=base64.b64encode(event).decode(),
        waits=waits,
    )


def opened(memory: DeviceMemory) -> Tensor:
    """Another process's block. Raises RuntimeError where this one does not see that GPU, or CUDA does not open it."""
    found = [index for index in range(torch.cuda.device_count()) if gpu_id(index) == memory.gpu]
    if not found:
        raise RuntimeError(f"the weights are on GPU {memory.gpu}, which this process does not see")
    handle = base64.b64decode(memory.handle)
    event = base64.b64decode(memory.event)
    counter = memory.counter.encode(), memory.counter_offset
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_cuda(found[0], handle, memory.size, memory.offset, *counter, event, memory.waits)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
