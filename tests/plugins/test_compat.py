"""The import names of ms-swift, in processes of their own: what they give, and how a missing one fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from swift_r1.plugins.compat import IMPORT_NAMES

REPO = Path(__file__).resolve().parents[2]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO, timeout=60, check=False
    )


INSTALL = "from swift_r1.plugins import install_import_names; install_import_names(); install_import_names()\n"


def test_every_offered_name_is_ours() -> None:
    imports = "\n".join(f"from {module} import {name}" for module, names in IMPORT_NAMES.items() for name in names)
    check = """
import sys, swift_r1, swift.rewards, swift.plugin, swift.dataset, swift.llm
assert swift.rewards.orms is swift.plugin.orms is swift_r1.orms
assert swift.dataset.DatasetMeta is swift.llm.DatasetMeta is swift_r1.DatasetMeta
assert not {"torch", "transformers", "vllm", "datasets"} & set(sys.modules), "something heavy was imported"
get_logger().info("fine")
"""
    done = run(INSTALL + imports + check)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("statement", "parts"),
    [
        (
            "from swift.rewards import MathAccuracy",
            ["swift-r1 has no swift.rewards.MathAccuracy", "ORM", "leave the import"],
        ),
        ("from swift.llm.infer import X", ["swift-r1 has no module swift.llm.infer", "swift.llm.dataset"]),
        ("import swift.megatron", ["swift-r1 has no module swift.megatron"]),
        ("from swift import Swift", ["swift-r1 has no swift.Swift"]),
    ],
)
def test_a_name_we_lack_fails_by_name(statement: str, parts: list[str]) -> None:
    done = run(INSTALL + statement)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    for part in parts:
        assert part in last


def test_an_optional_import_can_be_caught_and_looked_for() -> None:
    code = """
try:
    from swift.plugin import rm_plugins
except ImportError:
    rm_plugins = None
import inspect, swift.rewards
assert not hasattr(swift.rewards, "__wrapped__")
assert "ORM" in dir(swift.rewards)
"""
    done = run(INSTALL + code)
    assert done.returncode == 0, done.stderr


def test_another_swift_in_the_process_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "swift").mkdir()
    (tmp_path / "swift" / "__init__.py").write_text("")
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import swift\n" + INSTALL)
    assert "another package named swift is imported in this process already" in done.stderr


def test_ours_come_first_even_where_ms_swift_is_installed(tmp_path: Path) -> None:
    """Its registries are not ours, and importing it takes many seconds."""
    (tmp_path / "swift" / "rewards").mkdir(parents=True)
    (tmp_path / "swift" / "__init__.py").write_text("raise SystemExit('imported the real one')")
    done = run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        + INSTALL
        + "from swift.rewards import orms; import swift_r1; assert orms is swift_r1.orms"
    )
    assert done.returncode == 0, done.stderr
