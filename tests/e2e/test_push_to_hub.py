"""A run that sends its checkpoints to a hub, which is a server of this test."""

from __future__ import annotations

import pytest

from tests.training.test_upload import Hub, hub

__all__ = ["hub"]


def test_the_model_and_its_card_are_on_the_hub(rlhf, tiny_model, hub: Hub) -> None:
    flags = {
        "push_to_hub": "true",
        "hub_model_id": "me/model",
        "hub_token": "s3cret",
        "use_hf": "true",
    }
    flags |= {"eval_steps": 2, "eval_limit": 2, "num_generations_eval": 1}
    run = rlhf(tiny_model, max_steps=3, save_steps=2, report_to="tensorboard", **flags)
    assert run.code == 0
    saved = {str(path.relative_to(run.folder)) for path in (run.folder / "checkpoint-3").rglob("*")}
    here = {name.removeprefix("checkpoint-3/") for name in saved}
    assert (
        {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
        <= hub.files.keys()
        <= here
    )
    assert not [name for name in hub.files if name.startswith("state")]
    assert (
        hub.files["model.safetensors"]
        == (run.folder / "checkpoint-3" / "model.safetensors").read_bytes()
    )
    card = hub.files["README.md"].decode()
    (evaluated, _) = [
        line["eval/counting/accuracy"] for line in run.lines("logging.jsonl") if "loss" not in line
    ]
    for part in (
        "library_name: transformers",
        "| data | counting#200 |",
        "| rewards | digits x 1 |",
        f"| 3 | {run.steps[2]['reward']:.3f} |",
        f"| 2 | {evaluated:.3f} |",
        "--hub_token '***'",
        "torch ",
    ):
        assert part in card
    assert not [
        path for path in run.folder.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()
    ]


@pytest.mark.long
def test_without_a_token_nothing_begins(rlhf, tiny_model, tmp_path, monkeypatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "SWIFT_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    run = rlhf(
        tiny_model,
        max_steps=1,
        push_to_hub="true",
        hub_model_id="me/model",
        use_hf="true",
        cold=True,
    )
    assert run.code == 2 and "--push_to_hub true needs a token: SWIFT_HUB_TOKEN" in run.errors
