"""A checkpoint is whole or not there."""

import hashlib
import json

import pytest

from swift_r1.errors import UsageError
from swift_r1.training.checkpoint.folder import (
    Draft,
    fault_of,
    list_checkpoints,
    remove_old_checkpoints,
)
from swift_r1.training.checkpoint.state import Fingerprint, PromptState, RunState


def save_checkpoint(run_dir, step, write):
    draft = Draft(run_dir, step)
    draft.open()
    write(draft.folder)
    draft.publish()
    return draft.final


def write_two_files(folder):
    (folder / "weights").write_bytes(b"w" * 3_000_000)
    (folder / "more").mkdir()
    (folder / "more" / "config.json").write_text("{}")


def test_manifest_names_every_file_with_its_hash(tmp_path):
    path = save_checkpoint(tmp_path, 7, write_two_files)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["step"] == 7 and set(manifest["files"]) == {"weights", "more/config.json"}
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def test_a_draft_that_is_dropped_leaves_no_checkpoint_and_keeps_the_old_one(tmp_path):
    old = save_checkpoint(tmp_path, 1, write_two_files)
    for step in (1, 2):
        draft = Draft(tmp_path, step)
        draft.open()
        write_two_files(draft.folder)
        draft.drop()
        assert list(tmp_path.iterdir()) == [old] and fault_of(old) is None


def test_leftovers_of_a_kill_are_no_checkpoints_and_are_replaced(tmp_path):
    (tmp_path / ".writing-checkpoint-3").mkdir()
    (tmp_path / ".writing-checkpoint-3" / "half").write_text("x")
    (tmp_path / ".removing-checkpoint-2").mkdir()
    assert list_checkpoints(tmp_path) == []
    path = save_checkpoint(tmp_path, 3, write_two_files)
    assert not (path / "half").exists() and list_checkpoints(tmp_path) == [path]


def test_only_the_newest_stay(tmp_path):
    for step in (2, 10, 9):
        save_checkpoint(tmp_path, step, write_two_files)
    remove_old_checkpoints(tmp_path, None)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "checkpoint-2",
        "checkpoint-9",
        "checkpoint-10",
    ]
    remove_old_checkpoints(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


def test_a_state_of_another_format_is_refused(tmp_path):
    prompts = {"": PromptState(8)}
    state = RunState(3, 1, prompts, 3, 1, "id", 0, {}, {}, {}, None, {}, Fingerprint({}, 1, "", 1))
    (tmp_path / "state").mkdir()
    state.write(tmp_path / "state")
    assert RunState.read(tmp_path) == state
    file = tmp_path / "state" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 1}))
    with pytest.raises(
        UsageError, match="of another version of swift-r1; --resume_only_model true"
    ):
        RunState.read(tmp_path)
    content = json.loads(file.read_text()) | {"format": 4}
    del content["window"]
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match="of another version"):
        RunState.read(tmp_path)
