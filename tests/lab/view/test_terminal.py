"""`swift view --text`: what the terminal shows is what the files say, in 80 columns, and nothing in it can act."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.lab.view.text import show_text
from swift_r1.record.folder import find_runs
from tests.lab.diagnosis.recorded import run_folder
from tests.lab.runs.made import make_run, write_rows

pytest.importorskip("duckdb")


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys, *paths: Path, step: int | None = None) -> list[str]:
    assert show_text(find_runs(paths), step) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    return lines


def spread(rows):
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return max(rewards) - min(rewards)


def test_an_overview_and_the_last_groups(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=8)
    lines = shown(capsys, run)
    assert {"status               ended", "progress             step 8 of 8, 100 %"} <= set(lines)
    assert "countdown: accuracy  0.5 [0.2, 0.8]" in lines
    assert "command              swift rlhf --model 'tiny model' --seed 0" in lines
    assert ["entropy", "█▄▃▂▂▁▁▁", "2", "0.25"] in [line.split() for line in lines]
    assert ["eval/countdown/accuracy", "▁", "0.5", "0.5"] in [line.split() for line in lines]
    assert [line.split()[2:] for line in lines if line.startswith("2026-")] == [
        ["0", "started", "from", "the", "beginning"],
        ["8", "saved", "checkpoint-8"],
        ["8", "ended", "after", "step", "8"],
    ]
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_bytes().splitlines()]
    of_last = [
        [row for row in rows if (row["step"], row["group"]) == (7, group)] for group in range(4)
    ]
    places = []
    for own in sorted(of_last, key=spread, reverse=True)[:3]:
        group = own[0]["group"]
        place = lines.index(
            f"step 7, group {group}, {own[0]['prompt_id']}: {own[0]['prompt'].strip()}"
        )
        places.append(place)
        for row, line in zip(own, lines[place + 2 :], strict=False):
            reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
            assert line.split()[:2] == [str(row["number"]), reward]
            assert row["completion"][:20] in line
    assert places == sorted(places) and lines[-1] == "1 more groups: --step 7"


def test_an_agents_calls_are_shown(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=2)
    args = json.loads((run / "args.json").read_text())
    args["args"] |= {"env": "trl:game.py", "env_args": {"size": 4}, "agent": "trl:game.py"}
    (run / "args.json").write_text(json.dumps(args))
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"to": 2}'}}
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "assistant", "content": "so 3"},
    ]
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_bytes().splitlines()]
    write_rows(
        run / "completions.jsonl", [row | {"turns": 2, "messages": messages} for row in rows]
    )
    lines = shown(capsys, run)
    assert 'environment          trl:game.py {"size": 4}' in lines
    assert any('[assistant] add({"to": 2}) [tool] 3 [assista' in line for line in lines)


def test_a_step(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=8)
    assert [
        line.split(",")[1] for line in shown(capsys, run, step=3) if line.startswith("step 3")
    ] == [f" group {group}" for group in range(4)]
    with pytest.raises(
        UsageError, match="--step 4: no completions at this step; recorded steps: 1, 3, 5, 7"
    ):
        show_text(find_runs([run]), 4)
    assert capsys.readouterr().out == ""


def test_several_runs(tmp_path, capsys):
    for seed, code in enumerate((0, None)):
        make_run(tmp_path / f"run{seed}", seed=seed, exit_code=code)
    lines = shown(capsys, tmp_path)
    assert lines[0].split() == ["run", "verdict", "status", "progress", "time", "reward"]
    assert [line.split()[:4] for line in lines[1:3]] == [
        ["run0", "too", "early", "ended"],
        ["run1", "too", "early", "killed"],
    ]
    assert lines[4] == "run1"
    assert [line.split()[3] for line in lines if line.startswith("2026-")] == [
        "started",
        "saved",
        "killed",
    ]


def test_the_verdict_is_first(tmp_path, capsys):
    run = run_folder(tmp_path / "silent", "impossible problems")
    text = " ".join(" ".join(shown(capsys, run)).split())
    assert text.startswith("verdict reward is flat: 0 to 0, ")
    assert " why no signal: 100% of the groups" in text and " try easier prompts, " in text
    lines = shown(capsys, run_folder(tmp_path / "young", "demo, seed 0", lines=1))
    assert lines[0].split(None, 1)[1] == "no verdict: it takes the rewards of two rounds"


def test_nothing_acts_on_the_terminal(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=2)
    row = json.loads((run / "completions.jsonl").read_bytes().splitlines()[0])
    hostile = "\x1b]0;title\x07\x1b[31m[bold]\u202e\n\n\0 :smile: \U0001f600"
    write_rows(
        run / "completions.jsonl",
        [row | {"prompt_id": "x\x1b[2J", "prompt": hostile, "completion": hostile, "step": 5}],
    )
    text = "\n".join(shown(capsys, run))
    assert not set(text) & {"\x1b", "\x07", "\0", "\u202e"}
    assert "␛]0;title␇␛[31m[bold]U+202E ␀ :smile:" in text


def test_piped_without_colours_and_closed_early(tmp_path):
    run = make_run(tmp_path / "run")
    for more in ({}, {"PYTHONIOENCODING": "ascii"}):
        command = [sys.executable, "-m", "swift_r1", "view", "--text", str(run)]
        done = subprocess.run(command, capture_output=True, timeout=120, env=os.environ | more)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"\x1b" not in done.stdout
    command = [sys.executable, "-m", "swift_r1", "view", "--text", str(tmp_path / "no")]
    done = subprocess.run(command, capture_output=True, timeout=120, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"swift view: {tmp_path}/no: there is no such folder\n"
