"""A checkpoint is whole or not there."""

import hashlib
import json

import pytest
from safetensors import SafetensorError

from swift_r1.errors import RunFailed
from swift_r1.training.checkpoints import list_checkpoints, remove_old_checkpoints, save_checkpoint


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


def write_text_to_a_full_disk(folder):
    write_two_files(folder)
    (folder / "full").symlink_to("/dev/full")
    (folder / "full").write_text("x")


def write_tensors_to_a_full_disk(folder):
    write_two_files(folder)
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("full_disk", [write_text_to_a_full_disk, write_tensors_to_a_full_disk])
def test_a_failed_write_leaves_no_checkpoint_and_keeps_the_old_one(tmp_path, full_disk):
    old = save_checkpoint(tmp_path, 1, write_two_files)

    with pytest.raises(RunFailed, match=r"checkpoint-2 cannot be saved: .*No space left"):
        save_checkpoint(tmp_path, 2, full_disk)
    assert list(tmp_path.iterdir()) == [old]
    with pytest.raises(RunFailed, match="No space left"):
        save_checkpoint(tmp_path, 1, full_disk)
    assert (old / "weights").exists()


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
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-9", "checkpoint-10"]
    remove_old_checkpoints(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
