"""The table of chips, and files like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.lab.estimate.chips import CHIPS, Chip, chip_of


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_a_row_is_plausible(chip: Chip) -> None:
    assert chip.source
    assert chip.inter_node < chip.intra_node < chip.bandwidth < chip.flops
    if not chip.is_cpu:
        assert 1e14 < chip.flops < 3e15 and 16e9 < chip.memory < 300e9
        # FLOP per byte: where decoding turns from memory to arithmetic
        assert 20 < chip.flops / chip.bandwidth < 500


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_the_page_has_the_row(chip: Chip) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "estimate.md").read_text()
    figures = (
        chip.flops / 1e12,
        chip.bandwidth / 1e12,
        chip.memory / 1e9,
        chip.intra_node / 1e9,
        chip.inter_node / 1e9,
    )
    assert f"| `{chip.name}` | {' | '.join(f'{one:g}' for one in figures)} |" in page


def test_names_and_files(tmp_path: Path) -> None:
    assert chip_of("H100") is CHIPS["h100"]
    file = tmp_path / "mine.yaml"
    file.write_text("like: h100\nmemory: 96e9\n")
    mine = chip_of(str(file))
    assert (mine.name, mine.memory, mine.flops) == ("mine", 96e9, CHIPS["h100"].flops)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("memry: 1", "did you mean memory"),
        ("memory: -1", "above 0"),
        ("like: mine.yaml", "known are a100-40"),
        ("memory: x", "above 0"),
        ("- 1", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_bad_files(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(UsageError, match=says):
        chip_of(str(file))
    with pytest.raises(UsageError):
        chip_of(str(tmp_path / "none.yaml"))


def test_an_unknown_chip_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean h100\?"):
        chip_of("h10")
