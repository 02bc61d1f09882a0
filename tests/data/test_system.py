"""`--system`: a file's text or the value's, as ms-swift reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.rlhf import CheckArguments

TRAIN = [
    "--rlhf_type",
    "grpo",
    "--model",
    "m",
    "--dataset",
    "d",
    "--reward_funcs",
    "a",
    "--num_generations",
    "2",
]
TRAIN += ["--per_device_train_batch_size", "2"]
COMMANDS = [
    (RlhfArguments, TRAIN),
    (CheckArguments, []),
    (EvalArguments, ["--model", "m", "--benchmarks", "math500"]),
]


@pytest.mark.parametrize(("command", "words"), COMMANDS)
def test_files_and_newlines(
    command: type, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def system(*more: str) -> tuple[str | None, str]:
        args = parse_arguments(command, [*words, *more], {})
        return args.system, args.response_prefix

    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_bytes("\ufeffThink.\nKeep \\n as it is. Grüße\n".encode())
    assert system("--system", "prompt.txt") == ("Think.\nKeep \\n as it is. Grüße\n", "")
    assert system("--system", r"one\ntwo", "--response_prefix", r"<think>\n") == (
        "one\ntwo",
        "<think>\n",
    )
    lines = 'Show it in <think> </think>, then:\nFor example:\n<think>\\n... </think>\n#### 42 \\boxed{}"'
    assert system("--system", lines) == (lines.replace("\\n", "\n"), "")
    assert system("--system", "\nAction Input:\n- a\n--b c") == ("\nAction Input:\n- a\n--b c", "")
    assert system("--system", "about notes.txt here") == (
        "about notes.txt here",
        "",
    ) and system() == (None, "")
    Path("latin.txt").write_bytes(b"a\xff")
    for name, cause in (
        ("gone.txt", "No such file or directory .*path of a file"),
        ("latin.txt", "not UTF-8 at byte"),
    ):
        with pytest.raises(UsageError, match=f"--system {name}: {cause}") as caught:
            system("--system", name)
        assert len(caught.value.faults) == 1
    # Read once: another process of the run gets the text, whatever becomes of the file.
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"system": "prompt.txt"}))
    args = parse_arguments(command, [str(config), *words], {})
    Path("prompt.txt").unlink()
    assert args.to_dict()["system"].startswith("Think.")


def test_the_system_of_one_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Be brief.")
    words = ["--model", "m", "--system", r"a\nb", "--benchmarks"]
    own = json.dumps({"dataset": "math500", "system": str(file)})
    first, second = parse_arguments(EvalArguments, [*words, own, "gsm8k"], {}).tasks()
    assert (first.system, second.system) == ("Be brief.", "a\nb")
    with pytest.raises(UsageError, match=r"--system .*gone.txt: No such file"):
        parse_arguments(EvalArguments, [*words, own.replace("prompt.txt", "gone.txt")], {})
