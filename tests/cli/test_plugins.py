"""`swift plugins`: what is registered, with one line of help each."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FILES = REPO / "tests" / "plugins" / "files"


def plugins(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swift_r1", "plugins", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )


def test_the_built_in_ones(tmp_path: Path) -> None:
    done = plugins(cwd=tmp_path)
    assert done.returncode == 0
    lines = {
        line.split()[0]: line.split(maxsplit=1)[1]
        for line in done.stdout.splitlines()
        if line.startswith("  ")
    }
    assert {"format", "react_format", "cosine", "repetition", "soft_overlong"} <= set(lines)
    assert all(len(text) > 20 for text in lines.values())
    assert not any(text.endswith((" the", " those", " more", "Dr.")) for text in lines.values())
    assert lines["soft_overlong"].endswith(" and beyond.")
    assert lines["gym_scheduler"].startswith("Plays one episode of an environment")
    assert {
        "math_tip_trick",
        "thinking_tips_scheduler",
        "math_env",
        "difficulty",
        "replay_failures",
    } <= set(lines)


def test_those_of_plugin_files(tmp_path: Path) -> None:
    done = plugins(*map(str, sorted(FILES.glob("*.py"))), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name, text in (
        ("v3_boxed", "1 where the last boxed number is the solution."),
        ("mentions", "1 where the row's word is in the completion."),
        ("half", "The same for all."),
        ("reach", "reach a number"),
        ("ask_again", 'Says "again" until the model writes an answer tag.'),
        ("guess", "Guess the row's number."),
    ):
        assert f"  {name:<24} {text}" in lines


def test_the_flag_of_the_other_commands_does_the_same(tmp_path: Path) -> None:
    first, second, *_ = map(str, sorted(FILES.glob("*.py")))
    plain = plugins(first, second, cwd=tmp_path).stdout
    assert plain
    for words in (("--external_plugins", first, second), (f"--external_plugins={first}", second)):
        done = plugins(*words, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout == plain, done.stderr
    assert (
        "--external_plugins needs a plugin file"
        in plugins("--external_plugins", cwd=tmp_path).stderr
    )


def test_what_is_wrong(tmp_path: Path) -> None:
    said = plugins("--json", cwd=tmp_path).stderr
    assert (
        said
        == "swift plugins: unknown flag --json: only plugin files can be given, also after --external_plugins\n"
    )
    assert plugins("gone.py", cwd=tmp_path).returncode == 2
