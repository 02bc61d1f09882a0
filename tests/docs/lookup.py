"""Whether what a command names is there: its flags, files, targets, routes and extras, without running it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from swift_r1.cli.demo import DemoArguments
from swift_r1.cli.replay import ReplayArguments
from swift_r1.cli.view import ViewArguments
from swift_r1.cli.why import WhyArguments
from swift_r1.flags import RlhfArguments, RolloutArguments, preferences
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.fields import spellings
from swift_r1.flags.forecast import ForecastArguments
from swift_r1.flags.parser import Command, parse_arguments
from swift_r1.flags.rlhf import CheckArguments
from swift_r1.flags.sft import ALWAYS, SftArguments
from tests.docs.shown import ROOT, Shown
from tests.docs.ways import NOT_RUN, SHELL

STOCK = {
    "rlhf_type": ["grpo"],
    "model": ["models/smollm2-135m"],
    "external_plugins": ["plugins/countdown.py"],
    "dataset": ["countdown#64"],
    "reward_funcs": ["external_countdown", "format"],
    "per_device_train_batch_size": ["8"],
}
"""What `...` among the flags of a training stands for, where they do not say it themselves."""
_SERVERS = ("vllm_server_host", "vllm_server_base_url", "vllm_server_file", "vllm_mode")
COMMANDS: dict[str, type[Command]] = {
    "rlhf": RlhfArguments,
    "rollout": RolloutArguments,
    "check": CheckArguments,
    "demo": DemoArguments,
    "eval": EvalArguments,
    "forecast": ForecastArguments,
    "replay": ReplayArguments,
    "view": ViewArguments,
}


def filled(command: Shown) -> tuple[str, ...]:
    """The words of a `swift` command after its name, with the flags that `...` stands for."""
    words = tuple(word for word in command.words[2:] if word != "...")
    if "..." not in command.words or command.words[1] != "rlhf":
        return words
    given = {word.lstrip("-").partition("=")[0] for word in words}
    stock = STOCK | (
        {} if given & {*_SERVERS} or "use_vllm" not in given else {_SERVERS[0]: ["127.0.0.1"]}
    )
    return (
        *words,
        *(
            word
            for flag, values in stock.items()
            if flag not in given
            for word in (f"--{flag}", *values)
        ),
    )


def look_up(command: Shown) -> None:
    """Fails where something is not there. The current folder is one that has the page's files."""
    words = list(command.words)
    if words[0] == "sudo":
        words = words[1:]
    match words:
        case ["swift", "replay", _, *flags]:
            recorded = {
                "model": "models/smollm2-135m",
                "rlhf_type": "grpo",
                "dataset": ["countdown"],
                "reward_funcs": ["format"],
            }
            parse_arguments(ReplayArguments, flags, {}, recorded=recorded)
        case ["swift", "why", *flags]:
            known = spellings(WhyArguments).keys()
            assert {word[2:] for word in flags if word.startswith("--")} <= known
        case ["swift", "sft", *flags]:
            parse_arguments(SftArguments, flags, command.environ, recorded=ALWAYS)
        case ["swift", "rlhf", "--rlhf_type", kind, *_] if kind in preferences.PREFERENCE_TYPES:
            flags = words[2:]
            recorded = preferences.ALWAYS
            parse_arguments(
                preferences.PreferenceArguments, flags, command.environ, recorded=recorded
            )
        case ["swift", name, *_]:
            parse_arguments(COMMANDS[name], filled(command), command.environ)
        case ["make", *rest]:
            subprocess.run(
                ["make", "-n", *rest], cwd=ROOT, check=True, capture_output=True, timeout=60
            )
        case ["python" | "python3" | "python3.11", "-m", "pip", *_]:
            # looked for in this process, it takes setuptools' distutils away, which the import of vLLM needs
            pass
        case ["python" | "python3" | "python3.11", "-m", module, *_]:
            assert find_spec(module), module
        case ["python" | "python3", script, *flags]:
            _script(ROOT / script, flags)
        case ["pytest", *rest]:
            files = [word for word in rest if word.startswith("tests/")]
            assert files and all((ROOT / word.partition("::")[0]).exists() for word in files), files
        case ["pip", _, *rest]:
            _requirements(rest)
        case [script, *_] if "/" in script:
            assert (ROOT / script).stat().st_mode & 0o100, script
        case _:
            assert words[0] in {*SHELL, *NOT_RUN}, f"nobody looks up {words[0]}"


def _script(script: Path, flags: list[str]) -> None:
    """Flags that the script has, or hands to `swift rlhf`."""
    text = (script / "__main__.py" if script.is_dir() else script).read_text()
    known = set(re.findall(r"""["']--([\w-]+)["']""", text)) | spellings(RlhfArguments).keys()
    given = {word[2:].partition("=")[0] for word in flags if word.startswith("--")}
    assert given <= known, given - known


def _requirements(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for flag, value in pairwise(words):
        if flag == "-r":
            assert (ROOT / value).is_file(), value
    for extra in {
        name
        for word in words
        for names in re.findall(r"\[([\w,-]+)\]", word)
        for name in names.split(",")
    }:
        assert extra in project["optional-dependencies"], extra
