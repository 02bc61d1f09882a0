"""The flags of `swift merge-lora`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from swift_r1.arguments.fields import flag
from swift_r1.arguments.model import DTYPES
from swift_r1.arguments.parser import Fault, to_dict
from swift_r1.arguments.world import World


@dataclass(frozen=True, kw_only=True)
class MergeArguments:
    """Merge."""

    command: ClassVar[str] = "merge-lora"
    adapters: str = flag("", "folder of the adapters: a checkpoint of --train_type lora or qlora", required=True)
    model: str | None = flag(None, "the model under them (default: the one that adapter_config.json names)")
    output_dir: str | None = flag(None, "folder of the merged model (default: that of the adapters with -merged)")
    torch_dtype: str | None = flag(
        None, "dtype of the merged weights (default: the one they were trained in)", choices=DTYPES, aliases=("dtype",)
    )

    def faults(self, given: frozenset[str], world: World) -> Iterator[Fault]:
        """Nothing that two values could say against each other."""
        return iter(())

    def resolved(self, given: frozenset[str], world: World, environ: Mapping[str, str]) -> MergeArguments:
        """Defaults that depend on other flags, filled in."""
        adapters = self.adapters.rstrip("/")
        return replace(self, adapters=adapters, output_dir=self.output_dir or f"{adapters}-merged")

    def to_dict(self) -> dict[str, Any]:
        """All flags as JSON-able values."""
        return to_dict(self)
