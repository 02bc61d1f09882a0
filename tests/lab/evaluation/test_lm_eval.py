"""Beside lm-eval (`make test-lm-eval`): the same model, prompts and greedy decoding give the same accuracy."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[3]
MODEL = REPO / os.environ.get("SMOLLM2", "models/smollm2-135m")
DATA = Path(os.environ.get("SWIFT_R1_DATA", REPO / ".." / "shared" / "data"))
TASK = Path(__file__).parent / "lm_eval_task" / "gsm8k_local.yaml"

INSTRUCTION = "Please reason step by step, and end with the number."
QUESTIONS, TOKENS = 100, 128

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="no lm-eval here: make test-lm-eval"
    ),
    pytest.mark.long,
    pytest.mark.timeout(5400),
]


def run(words: list[str], folder: Path) -> None:
    environ = os.environ | {
        "PYTHONPATH": str(REPO),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=5000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_accuracy_is_lm_evals(tmp_path: Path) -> None:
    if not (MODEL / "config.json").is_file():
        pytest.skip(f"no model in {MODEL}: make smollm2")
    if not DATA.is_dir():
        pytest.skip(f"no data sets in {DATA} (SWIFT_R1_DATA)")
    file = (DATA / "gsm8k_test.jsonl").resolve()
    task = TASK.read_text().replace("GSM8K_FILE", str(file)).replace("MAX_TOKENS", str(TOKENS))
    (tmp_path / "gsm8k_local.yaml").write_text(task.replace("INSTRUCTION", INSTRUCTION))
    run(
        [
            *(
                "lm_eval",
                "--model",
                "hf",
                "--model_args",
                f"pretrained={MODEL},dtype=float32",
                "--device",
                "cpu",
            ),
            *("--tasks", "gsm8k_local", "--include_path", str(tmp_path), "--limit", str(QUESTIONS)),
            *(
                "--apply_chat_template",
                "--batch_size",
                "16",
                "--output_path",
                str(tmp_path / "theirs"),
                "--log_samples",
            ),
        ],
        tmp_path,
    )
    run(
        [
            *(
                "swift_r1",
                "eval",
                "--model",
                str(MODEL),
                "--infer_backend",
                "transformers",
                "--torch_dtype",
                "float32",
            ),
            *(
                "--benchmarks",
                f"gsm8k={file}#{QUESTIONS}",
                "--instruction",
                INSTRUCTION,
                "--temperature",
                "0",
            ),
            *("--max_completion_length", str(TOKENS), "--output_dir", str(tmp_path / "ours")),
        ],
        tmp_path,
    )
    theirs, ours = their_samples(tmp_path / "theirs"), our_rows(tmp_path / "ours")
    assert len(theirs) == len(ours) == QUESTIONS
    pairs = list(zip(theirs, ours, strict=True))
    assert all(their["arguments"]["gen_args_0"]["arg_0"] == our["prompt"] for their, our in pairs)
    right = sum(int(their["exact_match"]) for their in theirs), sum(our["right"] for our in ours)
    same = sum(their["resps"][0][0].strip() == our["completion"].strip() for their, our in pairs)
    other = [
        number
        for number, (their, our) in enumerate(pairs)
        if bool(their["exact_match"]) != our["right"]
    ]
    print(
        f"of {QUESTIONS}: lm-eval {right[0]} right, swift eval {right[1]}; {same} texts alike; other verdict: {other}"
    )
    assert abs(right[0] - right[1]) <= QUESTIONS / 100


def their_samples(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("samples_gsm8k_local_*.jsonl")
    return sorted(
        map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"]
    )


def our_rows(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: int(row["prompt_id"].rpartition(":")[2]))
