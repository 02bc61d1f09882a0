"""Bytes between the roles: a push of weights, a completion; and the seconds of a push."""

from __future__ import annotations

from swift_r1.lab.estimate.chips import Chip
from swift_r1.lab.estimate.phases import TrainerRoofline, bus
from swift_r1.lab.estimate.work import Efficiency, Round
from swift_r1.sync.writer import levels_of

BYTES_PER_TOKEN = 28.0
"""A completion's bytes as JSON: a token id of up to six digits, a log-prob of about nineteen, and the commas
(`tests/lab/estimate/test_phases.py` encodes some)."""
BYTES_PER_ID = 7.0
# of a push, at most, before changes are taken out (training/backends/base.py)
BUCKET_BYTES = 64 * 2**20
_ENVELOPE = 400.0  # headers, request id, sampling parameters, of a request and its answer


def completion_bytes(round_: Round) -> float:
    """Returns the bytes of one completion: its tokens with log-probs, and its share of the request, which is its
    group's."""
    request = _ENVELOPE + round_.prompt_tokens * BYTES_PER_ID + 20.0 * round_.group
    return round_.completion_tokens * BYTES_PER_TOKEN + request / round_.group


def whole_bytes(numbers: float, width: float) -> float:
    """Returns the bytes of a push of all weights to one server."""
    return numbers * width


def delta_bytes(numbers: float, width: float, use: Efficiency) -> float:
    """Returns the bytes of a push of what one step has changed to one server (docs/server.md: up to 4 bytes a changed
    weight)."""
    return min(whole_bytes(numbers, width) * use.changed, whole_bytes(numbers, width))


def push_seconds(
    numbers: float,
    width: float,
    chip: Chip,
    trainer: TrainerRoofline,
    use: Efficiency,
    servers: int,
    devices: int,
    transport: str,
    delta: bool,
    fanout: int = 0,
) -> float:
    """Returns the seconds from the end of training until all servers serve the new weights: gathering them (ZeRO-3),
    sending, loading.

    `shm`: one copy that all servers of the host map. `http`: compared and hashed once, then sent to each server from
    rank 0, or with a `fanout` to so many, which pass each bucket on as it comes: each level of the tree takes the time
    of one bucket more. `nccl`: a broadcast of whole weights. `ipc`: out of the trainer's own memory. Each of a server's
    `devices` loads its part.
    """
    whole = whole_bytes(numbers, width)
    seconds = whole / bus(chip, trainer, use) if trainer.stage == 3 and trainer.ranks > 1 else 0.0
    link = chip.inter_node * use.network
    if transport == "nccl":
        seconds += whole / min(link, chip.intra_node * use.network)
    elif transport == "http":
        each = delta_bytes(numbers, width, use) if delta else whole
        bucket = each * min(1.0, BUCKET_BYTES / whole)
        sent = (fanout or servers) * (each + (levels_of(servers, fanout) - 1) * bucket)
        seconds += whole / use.http + sent / min(link, 1.5 * use.http)
    elif transport == "shm":
        seconds += whole / use.shm
    return (seconds + use.push_seconds + whole / devices / use.load) * use.push_factor
