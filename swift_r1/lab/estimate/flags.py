"""The flags of `swift estimate`: those of the run, the hardware, and what is known of such runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from swift_r1.flags.fields import flag
from swift_r1.flags.reward import NO_REWARD
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.rollout import NO_SERVER
from swift_r1.flags.world import World


@dataclass(frozen=True, kw_only=True)
class EstimateArguments(RlhfArguments):
    """Estimate."""

    command: ClassVar[str] = "estimate"
    rlhf_type: str = flag("grpo", "as for swift rlhf", choices=("grpo", "ppo"))
    dataset: list[str] = flag([], "as for swift rlhf; not read")
    chip: str | None = flag(
        None,
        "what the devices are: a name of the table in docs/estimate.md, or a YAML file with a chip's figures (default: "
        "h100; cpu for a run file without GPUs)",
    )
    gpus: int | None = flag(
        None, "GPUs to divide: which split is best (default: the layout that is given)", at_least=1
    )
    gpus_per_node: int = flag(8, "GPUs of a machine", at_least=1)
    measured: str | None = flag(
        None,
        "folder of a recorded run: its lengths are taken, and on the same kind of device its efficiency",
    )
    mean_prompt_length: float | None = flag(
        None,
        "tokens of a prompt (default: those of --measured, else a quarter of --max_length, else 256)",
        at_least=1,
    )
    mean_completion_length: float | None = flag(
        None,
        "tokens of a completion (default: those of --measured, else half of --max_completion_length)",
        at_least=1,
    )
    mean_image_pixels: int = flag(
        0,
        "pixels of a prompt's images as the model sees them, together (`swift check` says both); their tokens are part of "
        "--mean_prompt_length (0: rows have no images)",
        at_least=0,
    )
    json: str | None = flag(None, "file for all that was found")

    def faults(self, given: frozenset[str], world: World) -> Iterator[str]:
        """Yields the faults of the run, except those of what an estimate does not need: rewards, and servers'
        addresses."""
        needless = {NO_REWARD, NO_SERVER}
        yield from (fault for fault in super().faults(given, world) if fault not in needless)
        if self.vllm_server_file is not None:
            from swift_r1.wire.server_file import server_file_faults

            yield from server_file_faults(self.vllm_server_file)
        if self.estimate:
            yield "--estimate true belongs to swift rlhf; this command says what memory is needed too"
        if self.mean_completion_length and self.mean_completion_length > self.max_completion_length:
            yield (
                f"--mean_completion_length {self.mean_completion_length:g} is above --max_completion_length "
                f"{self.max_completion_length}"
            )
        if (
            self.mean_prompt_length
            and self.max_length
            and self.mean_prompt_length > self.max_length
        ):
            yield f"--mean_prompt_length {self.mean_prompt_length:g} is above --max_length {self.max_length}"
