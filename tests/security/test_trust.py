"""What is not trusted runs nothing: code, pickles and templates that come with a model, and what a completion says."""

from __future__ import annotations

import ast
import contextlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift_r1.cli.main import main
from swift_r1.errors import UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.server import RolloutArguments
from swift_r1.launch.checks.model_folder import model_faults
from swift_r1.models.loading import load_critic, load_judging_model, load_model, load_tokenizer
from swift_r1.rewards.orm import orms
from tests.conftest import REPO

LOADERS: list[Callable[[Path], Any]] = [
    lambda path: load_model(path, None, False),
    lambda path: load_critic(path, None, False),
    lambda path: load_judging_model(str(path), None, None),
    lambda path: load_tokenizer(str(path)),
]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What an attack makes."""
    return tmp_path / "taken"


@pytest.fixture
def with_code(tiny_model: Path, tmp_path: Path, mark: Path) -> Path:
    """A model whose classes come with it."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    own = f"open({str(mark)!r}, 'w')\nfrom transformers import *\nclass C(LlamaConfig): model_type = 'own'\n"
    (folder / "own.py").write_text(
        own + "class M(LlamaForCausalLM): config_class = C\nT = PreTrainedTokenizerFast\n"
    )
    autos = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {name: f"own.{'C' if name == autos[0] else 'M'}" for name in autos},
    }
    (folder / "config.json").write_text(json.dumps(config))
    about = json.loads((folder / "tokenizer_config.json").read_text())
    about |= {"auto_map": {"AutoTokenizer": ["own.T", "own.T"]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def test_code_that_comes_with_a_model_is_not_run(
    with_code: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers would ask at a terminal
    monkeypatch.setattr("builtins.input", lambda _asked="": "y")
    [fault] = model_faults(str(with_code), {})
    assert "brings its own code, which is never run" in fault
    for load in LOADERS[:3]:
        with pytest.raises(UsageError, match="cannot load"):
            load(with_code)
    with contextlib.suppress(UsageError):  # either is well: transformers' own class, or none
        load_tokenizer(str(with_code))
    assert not mark.exists()


def test_a_pickle_is_not_read(tiny_model: Path, tmp_path: Path, mark: Path) -> None:
    from peft import LoraConfig

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(mark), "w")

    folder = Path(
        shutil.copytree(
            tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
        )
    )
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Attack()))
    assert "lacks weights (*.safetensors)" in model_faults(str(folder), {})[0]
    for load in LOADERS[:3]:
        with pytest.raises(UsageError, match="cannot load"):
            load(folder)
    adapters = tmp_path / "adapters"
    LoraConfig(r=2, task_type="CAUSAL_LM").save_pretrained(adapters)
    (adapters / "adapter_model.bin").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(UsageError, match="holds no adapters"):
        load_judging_model(str(tiny_model), None, str(adapters))
    assert not mark.exists()


def test_a_chat_template_reaches_nothing(
    tiny_model: Path, tmp_path: Path, mark: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    attack = f"{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}{{{{ messages }}}}"
    (folder / "chat_template.jinja").write_text(attack)
    about = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": attack}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    plugin = REPO / "tests" / "e2e" / "digits_plugin.py"
    words = [
        "--external_plugins",
        str(plugin),
        "--dataset",
        "counting#3",
        "--reward_funcs",
        "digits",
    ]
    assert main(["check", "--model", str(folder), *words]) != 0
    assert not mark.exists() and "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "name", ["accuracy", "math", "math_tag", "math_tag_strict", "gsm8k", "countdown", "format"]
)
@pytest.mark.parametrize("verifier", ["fast", "math_verify"])
def test_a_completion_is_not_evaluated(name: str, verifier: str, mark: Path) -> None:
    code = f"__import__('os').system('touch {mark}')"
    forms = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}", "$1+{}$", "#### 1*({})", "1+({})")
    texts = [form.format(code) for form in forms]
    args = type("Args", (), {"verifier": verifier})()
    numbers: dict[str, Any] = {"nums": [[1, 2]] * len(texts), "target": [3] * len(texts)}
    try:
        reward = orms[name](args=args)
    except TypeError:
        reward = orms[name]()
    for solution in ("1", code):
        with contextlib.suppress(ValueError):  # a solution that is no number
            assert len(reward(texts, **numbers, solution=[solution] * len(texts))) == len(texts)
    assert not mark.exists()


def test_no_flag_turns_it_on() -> None:
    with pytest.raises(UsageError, match="code that comes with a model is never run"):
        parse_arguments(
            RolloutArguments,
            ["--model", "m", "--vllm_engine_kwargs", '{"trust_remote_code": true}'],
            {},
        )


def test_every_call_says_so() -> None:
    """`from_pretrained` of transformers asks at a terminal unless it is told not to."""
    calls = 0
    for path in (REPO / "swift_r1").rglob("*.py"):
        text = path.read_text()
        if not any(word in text for word in ("from_pretrained", "from_config", "eval(")):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(
                node.func, ast.Attribute | ast.Name
            ):
                continue
            way = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            assert way != "eval" or isinstance(node.func, ast.Attribute), f"{path}:{node.lineno}"
            if way in ("from_pretrained", "from_config") and (told := ast.unparse(node)).startswith(
                ("Auto", "kind.")
            ):
                assert "trust_remote_code=False" in told or "**SAFE" in told, (
                    f"{path}:{node.lineno}"
                )
                calls += 1
    assert calls > 8  # it has found them
