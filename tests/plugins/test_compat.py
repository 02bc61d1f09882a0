"""The import names of ms-swift: what they give, to whom, and how one that is missing or only a name fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_r1.plugins.import_names import IMPORT_NAMES
from tests import forks

REPO = Path(__file__).resolve().parents[2]

# From issue 5: what plugin files for v3 and v4 import.
PROMISED = {
    "swift.plugin": "ORM AsyncORM orms PRM prms rm_plugins MultiTurnScheduler multi_turns Env envs ContextManager "
    "context_managers orm prm multi_turn env rm_plugin",
    "swift.llm": "register_dataset DatasetMeta SubsetDataset RowPreprocessor ResponsePreprocessor MessagesPreprocessor "
    "AlpacaPreprocessor AutoPreprocessor load_dataset InferRequest RequestConfig Template to_device",
    "swift.utils": "get_logger to_device",
    "swift.rewards": "ORM AsyncORM orms PRM prms rm_plugins orm prm rm_plugin",
    "swift.rewards.rm_plugin": "DefaultRMPlugin GenRMPlugin",
    "swift.dataset": "register_dataset DatasetMeta SubsetDataset ResponsePreprocessor load_dataset",
    "swift.rollout.multi_turn": "RolloutScheduler MultiTurnScheduler multi_turns",
    "swift.rollout.gym_env": "Env envs",
    "swift.template": "Template TemplateMeta register_template",
    "swift.infer_engine": "RequestConfig InferRequest TransformersEngine",
    "swift.infer_engine.protocol": "RolloutInferRequest RolloutOutput ChatCompletionResponse "
    "ChatCompletionResponseChoice",
}


def run(
    folder: Path, plugin: str, after: str = "", before: str = "", cold: bool = False
) -> subprocess.CompletedProcess[str]:
    """Loads a plugin with the given text in a process of its own; a fault of it is the last line on stderr."""
    (folder / "plugin.py").write_text(plugin)
    (folder / "main.py").write_text(
        f"{before}\nfrom swift_r1.plugins import load_plugins\nload_plugins(['plugin.py'])\n{after}"
    )
    if not cold:
        return forks.run(["main.py"], cwd=folder, timeout=60)
    return subprocess.run(
        [sys.executable, "main.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )


def test_every_promised_name_imports_and_nothing_heavy_comes_with_it(tmp_path: Path) -> None:
    names = {module: {*text.split(), *IMPORT_NAMES[module]} for module, text in PROMISED.items()}
    names |= {module: set(table) for module, table in IMPORT_NAMES.items() if module not in names}
    imports = "\n".join(
        f"from {module} import {name}" for module, all_ in names.items() for name in sorted(all_)
    )
    plugin = f"""
{imports}
import sys, swift_r1, swift.rewards, swift.plugin, swift.dataset, swift.llm, swift.rollout
assert swift.rewards.orms is swift.plugin.orms is swift.rewards.orm.orms is swift_r1.orms
assert swift.dataset.DatasetMeta is swift.llm.DatasetMeta is swift_r1.DatasetMeta
assert swift.plugin.env.Env is swift.rollout.gym_env.Env
assert not {{"torch", "transformers", "vllm", "datasets", "numpy"}} & set(sys.modules), "something heavy was imported"
swift.utils.get_logger().info("fine")
assert swift.utils.to_device({{"a": [1, (2,)]}}, "cpu") == {{"a": [1, (2,)]}}
"""
    plugin = plugin.replace("import sys, swift_r1,", "import sys, swift_r1, swift.utils,")
    done = run(tmp_path, plugin, cold=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("statement", "parts"),
    [
        (
            "from swift.rewards import MathAccuracy",
            [
                "ImportError: swift-r1 has no swift.rewards.MathAccuracy of ms-swift",
                "leave the import out",
                "ORM",
            ],
        ),
        (
            "from swift.trainers import X",
            ["swift-r1 has no module swift.trainers of ms-swift", "swift.llm.dataset"],
        ),
        ("import swift.megatron", ["swift-r1 has no module swift.megatron"]),
        ("from swift import Swift", ["swift-r1 has no swift.Swift"]),
    ],
)
def test_a_name_we_lack_fails_with_the_line_and_what_to_do(
    tmp_path: Path, statement: str, parts: list[str]
) -> None:
    done = run(tmp_path, f"x = 1\n{statement}\n")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    for part in ["plugin plugin.py:2: ", *parts]:
        assert part in last


USES = """
from typing import Optional
from swift.template import Template, TemplateMeta, register_template, TEMPLATE_MAPPING
from swift.infer_engine import TransformersEngine
class Mine(Template):
    def encode(self, x: Optional[Template]) -> "TransformersEngine | None":
        return None
isinstance(3, Template)
"""


@pytest.mark.parametrize(
    ("use", "name"),
    [
        ("Mine()", "swift.template.Template (used through Mine)"),
        ("TEMPLATE_MAPPING['qwen']", "swift.template.TEMPLATE_MAPPING"),
        ("Template.from_tokenizer", "swift.template.Template"),
    ],
)
def test_a_name_that_only_ms_swift_means_says_so_at_its_use(
    tmp_path: Path, use: str, name: str
) -> None:
    assert run(tmp_path, USES).returncode == 0
    done = run(tmp_path, USES + use)
    assert f"plugin plugin.py:9: NotHere: {name} only means something in ms-swift: " in done.stderr


def test_an_import_inside_a_call_that_fails_is_the_plugins_line(tmp_path: Path) -> None:
    plugin = "from swift.rewards import orms\ndef late(completions):\n    from swift.rewards import Nope\norms['l'] = late"
    after = """
from swift_r1.errors import describe
from swift_r1.rewards.orm import build_reward
try:
    build_reward("l").call(["a"], {})
except ImportError as error:
    print(describe(error))
"""
    done = run(tmp_path, plugin, after)
    assert "swift-r1 has no swift.rewards.Nope" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("plugin.py:3)")


def test_an_optional_import_can_be_caught_and_looked_for(tmp_path: Path) -> None:
    plugin = """
try:
    from swift.plugin import extra_tuners
except ImportError:
    extra_tuners = None
import inspect, swift.rewards
assert not hasattr(swift.rewards, "__wrapped__")
assert "ORM" in dir(swift.rewards)
"""
    done = run(tmp_path, plugin)
    assert done.returncode == 0, done.stderr


def test_a_neighbour_is_plugin_code_and_other_code_is_not(tmp_path: Path) -> None:
    (tmp_path / "helper_of_mine.py").write_text("from swift.rewards import ORM\n")
    elsewhere = tmp_path / "site-packages"
    elsewhere.mkdir()
    (elsewhere / "other_code.py").write_text(
        "def probe():\n    try:\n        import swift\n    except ModuleNotFoundError as error:\n"
        "        return str(error)\n"
    )
    plugin = "import helper_of_mine, other_code\nfrom swift.rewards import ORM\nassert helper_of_mine.ORM is ORM\n"
    after = "import other_code; assert other_code.probe() == \"No module named 'swift'\", other_code.probe()"
    done = run(tmp_path, plugin, after, before="import sys; sys.path.append('site-packages')")
    assert done.returncode == 0, done.stderr


def test_another_swift_in_the_process_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "other" / "swift").mkdir(parents=True)
    (tmp_path / "other" / "swift" / "__init__.py").write_text("")
    done = run(
        tmp_path, "import swift", before="import sys; sys.path.insert(0, 'other'); import swift"
    )
    assert "another package named swift is imported in this process already" in done.stderr


def test_ours_come_first_where_another_package_has_the_name(tmp_path: Path) -> None:
    """OpenStack's client is one; only the distribution ms-swift counts as ms-swift."""
    (tmp_path / "other" / "swift").mkdir(parents=True)
    (tmp_path / "other" / "swift" / "__init__.py").write_text(
        "raise SystemExit('imported the other one')"
    )
    plugin = "from swift.rewards import orms\nimport swift_r1\nassert orms is swift_r1.orms"
    done = run(tmp_path, plugin, before="import sys; sys.path.insert(0, 'other')")
    assert done.returncode == 0, done.stderr
