"""What `swift estimate` says of the kit's own work on this chip, under the names of what the parts measure: the page sets
one beside the other, so that it is seen at once where the estimate is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.lab.estimate.chips import CHIPS, Chip
from swift_r1.lab.estimate.job import assumed, with_cores
from swift_r1.lab.estimate.model import model_of
from swift_r1.lab.estimate.phases import (
    ServerRoofline,
    TrainerRoofline,
    decode_seconds,
    launches,
    least_train_seconds,
    train_seconds,
)
from swift_r1.lab.estimate.wire import push_seconds
from swift_r1.lab.estimate.work import Round
from swift_r1.training.memory import GIB, WIDTHS, estimate

MARK = "estimated: "  # report.py finds them by it


def chip_here() -> Chip | None:
    """Returns the figures of this machine's GPU; None where they are not known."""
    if not torch.cuda.is_available():
        return with_cores(CHIPS["cpu"], len(os.sched_getaffinity(0)))
    about = torch.cuda.get_device_properties(0)
    return chip_named(about.name, about.total_memory)


def chip_named(name: str, memory: float) -> Chip | None:
    """Returns the chip that the driver calls so and that has about so much memory; None where it is not known."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    found = [chip for key, chip in CHIPS.items() if key.split("-")[0] in plain]
    return min(found, key=lambda chip: abs(chip.memory - memory), default=None)


def of_step(
    folder: Path, dtype: str, sizes: tuple[int, int, int, int], micro: int
) -> dict[str, float]:
    """Returns the figures of a training step of `sizes` prompts, completions of each, tokens of a prompt and of a
    completion, in micro-batches of `micro` completions."""
    chip = chip_here()
    if chip is None:
        return {}
    prompts, group, prompt, new = sizes
    model = model_of(str(folder))
    use = assumed(chip)
    round_ = Round(prompts, group, prompt, new, new)
    micro_batches = -(-prompts * group // micro)
    trainer = TrainerRoofline(1, 1, None, micro_batches, WIDTHS[dtype], 0, False, model.total)
    seconds = train_seconds(model, chip, trainer, use, round_)
    found = {"train s": seconds, "peak GiB": _held(folder, dtype, sizes, micro, chip)}
    least = least_train_seconds(model, chip, trainer, use, round_)
    if least:
        found |= {"GPU s": least["products"] + least["memory"]}
        found |= {"kernels per step": launches(model, trainer, round_)}
    return {MARK + name: value for name, value in found.items()}


def _held(
    folder: Path, dtype: str, sizes: tuple[int, int, int, int], micro: int, chip: Chip
) -> float:
    """Returns the GiB of tensors at the peak of a step: torch's own figure has neither the context nor what its
    allocator holds in addition."""
    _, group, prompt, new = sizes
    args = RlhfArguments(
        torch_dtype=dtype,
        per_device_train_batch_size=micro,
        num_generations=group,
        max_length=prompt,
        max_completion_length=new,
        gradient_checkpointing=False,
        share_prompt="false",
        use_vllm=True,
    )
    card = None if chip.is_cpu else chip.memory
    most = estimate(args, model_of(str(folder)).shape, 1, 0.0, None, card=card)
    phase = most.phases["training"]
    return (sum(most.parts.values()) + phase["activations"] + phase["logits"]) / GIB


def of_engine(
    folder: Path, dtype: str, loads: Sequence[int], prompt: int, new: int, transports: Sequence[str]
) -> dict[str, float]:
    """Returns tokens per second of an engine that decodes so many completions at once, and seconds of an update."""
    chip = chip_here()
    if chip is None:
        return {}
    model = model_of(str(folder))
    use = assumed(chip)
    width = WIDTHS[dtype]
    server = ServerRoofline(1, width, width, 1e9, 1024)
    trainer = TrainerRoofline(1, 1, None, 1, width, 0, False, model.total)
    found = {}
    for load in loads:
        step = decode_seconds(model, chip, server, use, load, prompt + new / 2)
        found[f"{load} at once: tokens/s"] = load / step
    for transport in transports:
        seconds = push_seconds(model.total, width, chip, trainer, use, 1, 1, transport, False)
        found[f"push {transport}: s"] = seconds
    return {MARK + name: value for name, value in found.items()}
