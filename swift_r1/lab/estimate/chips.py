"""Figures of chips, per device: dense bf16 arithmetic, memory, and the links to the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from swift_r1.errors import UsageError, no_such, read_yaml, yaml_fault

GB = 1e9
TB = 1e12
TFLOP = 1e12


@dataclass(frozen=True, slots=True)
class Chip:
    """One device: a GPU, or the cores of one process.

    Attributes:
        flops: dense bf16 FLOP/s (of `cpu`, float32).
        bandwidth: bytes/s from its own memory.
        memory: bytes.
        intra_node: bytes/s per device and direction to the others of its machine.
        inter_node: bytes/s per device and direction to other machines.
        source: where the figures are published.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    intra_node: float
    inter_node: float
    source: str

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")

    @property
    def most_at_once(self) -> int:
        """Returns how many completions vLLM decodes at once unless `--vllm_max_num_seqs` says: its own default, which
        `swift rollout` takes on a CPU as for nobody in particular and on a GPU as for offline generation."""
        if self.is_cpu:
            return 128
        return 1024 if self.memory >= 70 * 2**30 and not self.name.startswith("a100") else 256


def _gpu(
    name: str, tflops: float, tb_s: float, gb: float, intra: float, inter: float, source: str
) -> Chip:
    return Chip(name, tflops * TFLOP, tb_s * TB, gb * GB, intra * GB, inter * GB, source)


_DGX_A100 = "NVIDIA A100 and DGX A100 datasheets (HDR InfiniBand, 200 Gbit/s per GPU)"
_HOPPER = "datasheet (dense: half of the figure with sparsity); 400 Gbit/s per GPU as in a DGX H100"
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        _gpu("a100-40", 312, 1.555, 40, 300, 25, _DGX_A100),
        _gpu("a100", 312, 2.039, 80, 300, 25, _DGX_A100),
        _gpu(
            "a800",
            312,
            2.039,
            80,
            200,
            25,
            "NVIDIA A800 datasheet: an A100 with NVLink of 400 GB/s",
        ),
        _gpu("h100", 989.4, 3.35, 80, 450, 50, f"NVIDIA H100 SXM {_HOPPER}"),
        _gpu("h200", 989.4, 4.8, 141, 450, 50, f"NVIDIA H200 SXM {_HOPPER}"),
        _gpu(
            "h800",
            989.4,
            3.35,
            80,
            200,
            50,
            "DeepSeek-V3 report (arXiv 2412.19437): an H100 with NVLink of 400 GB/s",
        ),
        _gpu("h20", 148, 4.0, 96, 450, 50, "NVIDIA H20 datasheet"),
        _gpu(
            "b200", 2250, 8.0, 180, 900, 50, "NVIDIA DGX B200 datasheet, divided by its eight GPUs"
        ),
        _gpu("l4", 121, 0.3, 24, 32, 12.5, "NVIDIA L4 datasheet (dense); PCIe 4 x16, 100 Gbit/s"),
        _gpu(
            "l40s", 362, 0.864, 48, 32, 25, "NVIDIA L40S datasheet (dense); PCIe 4 x16, 200 Gbit/s"
        ),
        _gpu(
            "rtx4090",
            165.2,
            1.008,
            24,
            32,
            3.125,
            "NVIDIA Ada architecture paper; PCIe 4 x16, 25 Gbit/s",
        ),
        _gpu(
            "mi300x", 1307.4, 5.3, 192, 448, 50, "AMD MI300X datasheet (dense); 400 Gbit/s per GPU"
        ),
        _gpu(
            "mi325x", 1307.4, 6.0, 256, 448, 50, "AMD MI325X datasheet (dense); 400 Gbit/s per GPU"
        ),
        Chip(
            "cpu",
            75e9,
            8e9,
            8 * GB,
            5e9,
            0.125e9,
            "one core: two 256-bit FMA a cycle at 2.35 GHz, a share of DDR",
        ),
    )
}
DEFAULT_CHIP = "h100"


def chip_of(name: str) -> Chip:
    """Returns a row of `CHIPS`, or a YAML file with the fields of a `Chip`, of which those left out are those of the
    chip that `like` names. Raises UsageError: no such chip, or a file that cannot be read as one."""
    if name.lower().endswith((".yaml", ".yml")):
        return _read(Path(name).expanduser())
    found = CHIPS.get(name.lower())
    if found is not None:
        return found
    raise UsageError(f"--chip: {no_such('chip', name.lower(), CHIPS, ', or give a YAML file')}")


def _read(path: Path) -> Chip:
    import yaml

    try:
        content: Any = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--chip {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--chip {path}: not valid YAML ({yaml_fault(error)})") from error
    if not isinstance(content, dict):
        raise UsageError(f"--chip {path}: must be a mapping like {{like: h100, memory: 96e9}}")
    if (like := CHIPS.get(name := str(content.pop("like", DEFAULT_CHIP)))) is None:
        raise UsageError(f"--chip {path}: like: {no_such('chip', name, CHIPS)}")
    numbers = {one.name for one in fields(Chip)} - {"name", "source"}
    values: dict[str, Any] = {"name": path.stem, "source": str(path)}
    for key, value in content.items():
        if key not in (*numbers, "name", "source"):
            raise UsageError(f"--chip {path}: {no_such('field', str(key), sorted(numbers))}")
        values[key] = str(value) if key in ("name", "source") else _number(path, key, value)
    return replace(like, **values)


def _number(path: Path, key: str, value: Any) -> float:
    try:
        number = float(value)  # YAML reads 96e9 as text
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"--chip {path}: {key} must be a number above 0, not {value!r}")
    return number
