"""The benchmarks' data is what it was, question by question, and none of it is in the training data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swift_r1.data.files import read_file
from swift_r1.data.resolve import DATA_FOLDER
from swift_r1.flags.eval_tasks import read_tasks
from swift_r1.training.evaluation.questions import load_questions, shared_questions

DATA = Path(os.environ.get("SWIFT_R1_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))

pytestmark = pytest.mark.data

# SHA-256 of questions and gold answers as they are asked and judged.
HASHES = {
    "gsm8k": (1319, "3615fe7b590e3d74b836cb9b3f51cc894990c19c6947c2477404e1af98c10446"),
    "math500": (500, "cdf0990963a9009d6693888b0a77cb620af92213c63497cea5ff352805612475"),
    "aime24": (30, "9d97699a587429f15ad6dfe357c84d29506c9a5e111fde342206ed06d38968cb"),
    "amc23": (83, "488149488970a7207c145798122b3adac2146461160ec7c1f1194dced4bed732"),
    "minerva": (272, "0b9a99e7e533b75fd20692feb0e9478be0c57c552f7a92340c20066f2baac57c"),
    "olympiad_bench": (675, "4b8fb59c070713f4fc0139bd9d5ea5d8d358f8bfcb1439c2ac7aa0572fc8abd9"),
    "asdiv": (1788, "63e4ca5fa7e65dd5779633729488fea77641a7a3f46c24f72e859c3e9a9f232c"),
}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no data sets in {DATA} (SWIFT_R1_DATA)")
    monkeypatch.setenv(DATA_FOLDER, str(DATA))


@pytest.mark.parametrize("name", HASHES)
def test_the_data_of_each_benchmark(name: str) -> None:
    (task,) = read_tasks("--benchmarks", [name], {})
    questions = load_questions(task)
    assert (len(questions.rows), questions.sha256) == HASHES[name]


def test_gsm8ks_test_set_shares_no_question_with_its_training_set() -> None:
    texts = [
        [" ".join(raw.row["question"].split()) for raw in read_file(DATA / f"gsm8k_{part}.jsonl")]
        for part in ("train", "test")
    ]
    (task,) = read_tasks("--benchmarks", ["gsm8k"], {})
    questions = load_questions(task)
    (training,) = read_tasks(
        "--benchmarks", [f"gsm8k={DATA / 'gsm8k_train.jsonl'}"], {"instruction": ""}
    )
    rows = load_questions(training).rows
    assert (len(questions.rows), len(rows)) == (1319, 7473)
    assert shared_questions(questions, rows) == 0
    # The comparison can see one: with a row of the test set among them it does.
    plain = {**questions.rows[7], "messages": [{"role": "user", "content": texts[1][7]}]}
    assert shared_questions(questions, [*rows, plain]) == 1
    assert not set(texts[0]) & set(texts[1])
