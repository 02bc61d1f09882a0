"""`swift eval` and its server: one that runs, one of its own, and what becomes of failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from swift_r1.errors import ServerUnreachable
from tests.lab.evaluation.conftest import rows_of
from tests.vision import picture, write_tiny

Evaluate = Callable[..., Path]


def test_nobody_there_is_waited_for_no_longer_than_said(
    swift_eval: Evaluate, gsm8k_file: Path
) -> None:
    with pytest.raises(
        ServerUnreachable, match=r"server at http://127\.0\.0\.1:9 was not ready within 1 s"
    ):
        swift_eval("http://127.0.0.1:9", benchmarks=[f"gsm8k={gsm8k_file}"], vllm_server_timeout=1)


def test_images_are_asked_about(
    swift_eval: Evaluate, served: Callable[..., str], tmp_path: Path
) -> None:
    seeing = write_tiny("qwen2_5_vl", tmp_path / "qwen2_5_vl")
    url = served(seeing, vllm_limit_mm_per_prompt={"image": 2})
    (tmp_path / "a.png").write_bytes(picture())
    rows = [
        {"query": "<image>and <image>what is 1", "images": ["a.png", "a.png"], "solution": "2"},
        {"query": "what is 2", "solution": "3"},
    ]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answered = rows_of(swift_eval(url, benchmarks=[file], reward_func="accuracy", n=1))
    assert len(answered) == 2 and all(row["tokens"] for row in answered)
