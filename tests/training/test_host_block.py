"""What leaves a device: one piece of host memory for all of it, nothing for zeros, and no more than the host has."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from swift_r1.errors import RunFailed
from swift_r1.training.backends.base import Movable
from swift_r1.training.backends.host_block import HostBlock

CPU = torch.device("cpu")


def test_what_the_host_has_no_room_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert HostBlock(CPU).parts([1000 // 64 * 64])
    movable = Movable(lambda: [torch.zeros(2**20)])
    with pytest.raises(
        RunFailed, match=r"4\.0 GiB are to leave the device: leave out an --offload_"
    ):
        HostBlock(CPU).parts([2**32])
    with pytest.raises(RunFailed, match=r"host has 0\.0 GiB"):
        movable.leave(CPU)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values_come_back_and_zeros_are_not_kept(kind: str) -> None:
    device = torch.device(kind)
    flat = torch.arange(300.0, device=device)
    views, moments, gradient = list(flat.split([100, 200])), [], torch.zeros(500, device=device)
    movable = Movable(lambda: [*views, *moments], lambda: [gradient])
    blocks = []
    for turn in range(3):
        expected = [one.clone() for one in (*views, *moments)]
        movable.leave(device)
        movable.leave(device)
        assert all(one.untyped_storage().nbytes() == 0 for one in (flat, gradient, *moments))
        held = [part for *_, part in movable._away if part is not None]
        blocks += {part.untyped_storage().data_ptr() for part in held}
        assert sum(map(len, held)) == 4 * (300 + (turn > 0) * 7)
        assert all(part.is_pinned() for part in held) is (kind == "cuda")
        movable.come_back()
        assert (
            all(map(torch.equal, (*views, *moments), expected)) and gradient.tolist() == [0.0] * 500
        )
        if not turn:
            moments.append(torch.rand(7, device=device))  # an optimizer's first step
    assert len(blocks) == 3 and blocks[1] == blocks[2]
