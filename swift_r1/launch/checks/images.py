"""Whether a run can train on rows that have images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from swift_r1.data.hubs import is_hub_id
from swift_r1.data.loading import have_images
from swift_r1.data.preprocessors import Row
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.launch.checks.model_folder import config_of, is_local

_KEEP = 'leave them out, or rename the column to keep it for the rewards (--columns \'{"images": "..."}\')'


def image_faults(args: RlhfArguments, *parts: Sequence[Row]) -> list[str]:
    """Returns what does not go with the images of some rows; [] where no row has any."""
    if not have_images(*parts):
        return []
    return [f"rows have images, and {fault}: {_KEEP}" for fault in _faults(args)]


def _faults(args: RlhfArguments) -> Iterator[str]:
    if args.plays_agent:
        yield "an agent or environment shows the model texts alone"
    elif args.multi_turn_scheduler:
        yield "several turns, and tools, show the model texts alone"
    if args.distillation is not None:
        yield "a teacher reads texts alone"
    if args.rlhf_type == "ppo":
        yield "a critic (--rlhf_type ppo) reads texts alone"
    if args.reward_model:
        yield "--reward_model reads texts alone"
    if args.model and reads_images(args.model) is False:
        yield f"--model {args.model} reads texts alone"


def reads_images(model: str) -> bool | None:
    """Returns whether a model has a tower for images; None where its config is not on this machine."""
    folder = Path(model).expanduser()
    if not is_local(model) and is_hub_id(model):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
        folder = Path(found).parent if isinstance(found, str) else folder
    config = config_of(folder)
    return "vision_config" in config if config else None
