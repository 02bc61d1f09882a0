"""The same dataset strings here and in the real ms-swift (`make test-ms-swift`): the rows agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swift_r1.plugins.ms_swift import is_installed

HERE = Path(__file__).parent
REPO = HERE.parents[1]

pytestmark = pytest.mark.skipif(
    not is_installed(), reason="ms-swift is not installed: make test-ms-swift"
)

STRINGS = [
    "rows.jsonl",
    "rows.json#5",
    "rows.csv#7",
    "rows.parquet#25",
    "repo:main",
    "repo:main/hard#4",
    "registered#6",
    "hf::org/sums:hard#3",
]
CARD = """---
configs:
- config_name: main
  default: true
  data_files: main.jsonl
- config_name: hard
  data_files: hard.jsonl
---
"""
INFO = [
    {"dataset_name": "registered", "dataset_path": "rows.jsonl", "columns": {"level": "response"}}
]
CODE = """
import json, os, sys, threading
sys.path.insert(0, {here!r})
from pathlib import Path
from hub_stand_in import Hub
hub = Hub(Path("hub"))
threading.Thread(target=hub.serve_forever, daemon=True).start()
os.environ |= {{"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1", "SWIFT_R1_CACHE": "own"}}
os.environ |= {{"HF_HOME": "hf", "MODELSCOPE_CACHE": "ms"}}

def shown(rows):
    found = []
    for row in rows:
        turns = [(turn["role"], str(turn["content"])) for turn in row["messages"]]
        while turns and turns[-1][0] == "assistant":  # the reference answer, which is no part of our prompts
            turns.pop()
        found.append([turns, str(row.get("solution")), row.get("grade")])
    return found

from swift.dataset import load_dataset as theirs, register_dataset_info as their_info
from swift_r1.data import load_dataset as ours
from swift_r1.data.registry import register_dataset_info as our_info
their_info("info.json")
our_info(["info.json"])
result = {{}}
for shuffle in (False, True):
    for string in {strings!r}:
        mine = shown(ours(string, seed=42, shuffle=shuffle)[0])
        other = shown(theirs(string, seed=42, shuffle=shuffle, remove_unused_columns=False)[0])
        result[f"{{string}} {{shuffle}}"] = [mine, other]
several = ["rows.jsonl#7", "rows.parquet#5", "rows.json#23"]
result["several True"] = [
    shown(ours(several, seed=7, shuffle=True)[0]),
    shown(theirs(several, seed=7, shuffle=True, remove_unused_columns=False)[0]),
]
columns = {{"solution": "response", "level": "solution"}}
result["columns False"] = [
    shown(ours("rows.jsonl", columns=columns)[0]),
    shown(theirs("rows.jsonl", columns=columns, remove_unused_columns=False)[0]),
]
split = [len(part) for part in ours("rows.jsonl", split_dataset_ratio=0.15)]
result["split False"] = [split, [len(part) for part in theirs("rows.jsonl", split_dataset_ratio=0.15)]]
Path("result.json").write_text(json.dumps(result))
os._exit(0)
"""


def test_eight_dataset_strings(tmp_path: Path) -> None:
    rows = [
        {"question": f"question {n}?", "solution": str(n * n), "level": n % 3, "grade": n % 4}
        for n in range(10)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.csv").write_text(
        "question,solution,level,grade\n"
        + "".join(f'"question {n}?",{n * n},{n % 3},{n % 4}\n' for n in range(10))
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for repo in (tmp_path / "repo", tmp_path / "hub" / "org" / "sums"):
        repo.mkdir(parents=True)
        (repo / "README.md").write_text(CARD)
        (repo / "main.jsonl").write_text(lines)
        (repo / "hard.jsonl").write_text(lines.replace("question ", "hard question "))
    (tmp_path / "info.json").write_text(json.dumps(INFO))
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(here=str(HERE), strings=STRINGS)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result) == 2 * len(STRINGS) + 3
    for name, (mine, other) in result.items():
        # theirs shuffles all rows once more, ours draws them anew each epoch
        if name.endswith("True"):
            mine, other = sorted(mine, key=json.dumps), sorted(other, key=json.dumps)
        assert mine == other, name
