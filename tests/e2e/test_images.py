"""Runs whose rows have images: what their checkpoints hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swift_r1.cli.main import main
from swift_r1.models.multimodal import part_of_model
from tests.conftest import KillableServer, ServerProcess, start_tiny_server
from tests.e2e.live_run import steps_of, train_to_the_end, words_of
from tests.vision import picture, write_tiny

HERE = Path(__file__).parent
RUN = {
    "external_plugins": [HERE / "digits_plugin.py", HERE / "pictures_plugin.py"],
    "dataset": "pictures",
    "use_vllm": "false",
    "torch_dtype": "float32",
    "learning_rate": 1e-3,
    "max_steps": 2,
    "save_steps": 2,
    "log_tokens": "none",
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return write_tiny("qwen2_5_vl", tmp_path_factory.mktemp("models") / "qwen2_5_vl")


def changed(before: Path, after: Path) -> set[str]:
    """The parts of a model whose weights differ."""
    first, second = (load_file(one / "model.safetensors") for one in (before, after))
    assert first.keys() == second.keys()
    return {part_of_model(name) for name in first if not torch.equal(first[name], second[name])}


def test_a_frozen_tower_is_in_the_checkpoint_as_it_was(rlhf, seeing):
    run = rlhf(seeing, **RUN)
    assert run.code == 0
    assert max(line["rollout/logp_diff"] for line in run.steps) < 1e-4
    assert changed(seeing, run.folder / "checkpoint-2") == {"llm"}
    rows = run.lines("completions.jsonl")
    image = next(row["images"][0] for row in rows if "images" in row)
    assert image.keys() == {"path", "sha256", "width", "height"}
    assert Path(image["path"]).stem == image["sha256"]


@pytest.mark.long
def test_adapters_of_a_tower_are_merged_into_it(rlhf, seeing, tmp_path):
    run = rlhf(seeing, **RUN, train_type="lora", freeze_vit="false", target_modules="all-linear")
    adapters = run.folder / "checkpoint-2"
    assert {one.name for one in adapters.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert {part_of_model(name) for name in load_file(adapters / "adapter_model.safetensors")} == {
        "llm",
        "vit",
    }
    merged = tmp_path / "merged"
    assert main(["merge-lora", "--adapters", str(adapters), "--output_dir", str(merged)]) == 0
    assert changed(seeing, merged) == {"llm", "vit"}


def test_streamed_rows_with_images_are_trained(rlhf, seeing, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    rows = [{"query": "what?", "images": ["a.png"]}, {"query": "why?"}] * 8
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = rlhf(seeing, **RUN | {"dataset": str(data)}, streaming="true")
    assert run.code == 0
    assert any("images" in row for row in run.lines("completions.jsonl"))


@pytest.mark.long
def test_a_streamed_row_with_images_behind_rows_without_ends_the_run(rlhf, seeing, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    rows = [*[{"query": "why?"}] * 4, {"query": "what?", "images": ["a.png"]}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = RUN | {"dataset": str(data), "max_steps": 3, "dataset_shuffle": "false"}
    run = rlhf(seeing, **flags, streaming="true")
    assert run.code == 5
    assert "has images, and this engine was started without" in run.errors
    assert len(run.steps) == 2


@pytest.mark.long
def test_a_killed_server_gets_tower_and_images_again(seeing, tmp_path):
    def start(model: Path, port: int | None) -> ServerProcess:
        images = {"image": 2}
        return start_tiny_server(tmp_path / "server", model, port, vllm_limit_mm_per_prompt=images)

    server = KillableServer(start, seeing)

    def kill(step: int) -> None:
        if step == 2:
            server.kill()
            server.start()

    # one pass is two rounds, so that every image comes twice
    flags = RUN | {
        "dataset": "pictures#8",
        "max_steps": 4,
        "save_steps": 4,
        "use_vllm": "true",
        "vllm_server_base_url": server.url,
        "vllm_server_timeout": 200,
        "freeze_vit": "false",
        "dataset_shuffle": "false",
    }
    try:
        server.wait()
        said = train_to_the_end(words_of(seeing, tmp_path / "run", **flags), kill, within_s=280)
    finally:
        server.kill()
    assert "was started again and holds weight version 0" in said
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 4 and max(step["rollout/logp_diff"] for step in steps) < 1e-4
    lines = (tmp_path / "run" / "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    shown = [
        {image["sha256"] for row in rows if row["step"] in half for image in row.get("images", ())}
        for half in ((1, 2), (3, 4))
    ]
    assert shown[0] == shown[1] != set()
