"""The catalogue of files says what the code writes."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from swift_r1.record.events import Kind
from swift_r1.record.recorded import FIELDS
from swift_r1.record.token_record import _COMPLETION, _TOKENS
from swift_r1.training.checkpoint.resume import RunSummary
from tests.lab.runs.entries import RUN

OF = {one["path"]: one.get("fields", {}) for one in RUN}


def test_fields_are_those_that_are_written() -> None:
    placeholders = {"rewards/<reward>", "<column>"}
    assert OF["completions.jsonl"].keys() - placeholders == FIELDS
    assert OF["summary.json"].keys() == {one.name for one in fields(RunSummary)}
    columns = ["step", *_COMPLETION, "prompt_token_ids", *_TOKENS, "routes"]
    assert [*OF["tokens/step-<N>.parquet"]] == columns
    assert OF["events.jsonl"]["kind"] == ", ".join(f"`{kind}`" for kind in get_args(Kind))
