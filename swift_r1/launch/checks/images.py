"""Whether a run can train on rows that have images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_r1.data.hubs import is_hub_id
from swift_r1.data.loading import have_images
from swift_r1.data.preprocessors import Row
from swift_r1.flags.faults import image_faults
from swift_r1.flags.run import RunFlags
from swift_r1.launch.checks.model_folder import config_of, is_local


def row_faults(args: RunFlags, *parts: Sequence[Row]) -> list[str]:
    """Returns what does not go with the images of some rows; [] where no row has any."""
    if not have_images(*parts):
        return []
    blind = args.model and reads_images(args.model) is False
    more = [f"--model {args.model} reads texts alone"] if blind else []
    return image_faults(args, *more)


def reads_images(model: str) -> bool | None:
    """Returns whether a model has a tower for images; None where its config is not on this machine."""
    folder = Path(model).expanduser()
    if not is_local(model) and is_hub_id(model):
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
        folder = Path(found).parent if isinstance(found, str) else folder
    config = config_of(folder)
    return "vision_config" in config if config else None
