"""Every page of completions and tokens answers, whatever became of the run's files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lab.runs.made import make_run

PATHS = (
    *(
        "/completions?run={}&sort=reward&desc=1&where=nums contains 3",
        "/completions?run={}&of=eval",
        "/group?run={}",
    ),
    *(
        "/group?run={}&step=3&group=1",
        "/group?run={}&step=nan&group=1e400",
        "/tokens?run={}",
        "/tokens?run={}&step=3",
    ),
    *(
        "/?run={}",
        "/time?run={}",
        "/completions?run={}&step=1-1" + 40 * "0",
    ),
    *(
        "/prompt?run={}",
        "/prompt?run={}&prompt=countdown:1",
    ),
)
VALUES: list[Any] = [None, "x", 3.5, [1], {"a": 1}, True, -1, 1e300, "", "\ud800"]


def damage(path: Path, chance: random.Random) -> None:
    """Cuts the file, changes some of its bytes, or leaves it."""
    content = bytearray(path.read_bytes())
    how = chance.random()
    if how < 0.4:
        content = content[: chance.randrange(len(content) + 1)]
    elif how < 0.8 and content:
        for _ in range(5):
            content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content)


@pytest.mark.long
def test_every_page_answers(viewer: Any, tmp_path: Path) -> None:
    names = ["types", *(f"damaged-{seed}" for seed in range(4))]
    for seed, name in enumerate(names):
        run, chance = make_run(tmp_path / "runs" / name, steps=4), random.Random(seed)
        if name != "types":
            for path in [*run.glob("*.json*"), *(run / "tokens").iterdir()]:
                damage(path, chance)
            continue
        rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
        (run / "completions.jsonl").unlink()
        columns = [name for name in rows[0] if name != "step"]
        changes = [
            {name: chance.choice(VALUES) for name in columns if chance.random() < 0.25}
            for _ in rows
        ]
        content = json.loads((run / "args.json").read_text())
        content["args"] |= {"temperature": "hot", "max_completion_length": [1], "model": "\ud800"}
        (run / "args.json").write_text(json.dumps(content))
        damaged = [json.dumps(row | change) for row, change in zip(rows, changes, strict=True)]
        (run / "completions.jsonl").write_text("\n".join([*damaged, ""]))
    url = viewer(tmp_path / "runs").url
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        for name in names:
            for path in PATHS:
                assert http.get(path.format(name)).status_code == 200, path.format(name)
