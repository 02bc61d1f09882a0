"""`swift rlhf` on two processes with a real vLLM server: the engine holds exactly the trainer's weights."""

import json
import shutil

import pytest

LOGP_NOISE = 2e-3  # float32 on both sides: other kernels, the same numbers


@pytest.fixture(scope="module")
def url(rollout_server, tiny_model):
    return rollout_server(tiny_model, torch_dtype="float32")


@pytest.mark.parametrize(
    ("backend", "learning_rate"),
    [
        # the one through the real launcher
        pytest.param({"deepspeed": "zero3"}, 0, id="no learning", marks=pytest.mark.long),
        pytest.param({"deepspeed": "zero3"}, 1e-2, id="large learning rate"),
        pytest.param({"fsdp": "fsdp2"}, 1e-2, id="FSDP2", marks=pytest.mark.long),
        pytest.param({"ddp_backend": "gloo"}, 1e-2, id="DDP", marks=pytest.mark.long),
    ],
)
def test_two_ranks_keep_the_engine_on_the_trainers_weights(
    rlhf, tiny_model, url, backend, learning_rate
):
    run = rlhf(
        tiny_model,
        processes=2,
        cold=learning_rate == 0,
        use_vllm="true",
        vllm_mode="server",
        vllm_server_base_url=url,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=learning_rate,
        beta=0.01,
        max_steps=4,
        eval_steps=2,
        num_generations_eval=1,
        val_dataset="counting#4",
        eval_datasets='{"name": "again", "dataset": "counting#3", "temperature": 0, "num_generations": 2}',
        save_steps=4,
        weight_check_steps=2,
        **backend,
    )
    assert run.code == 0
    assert len(run.steps) == 4
    for line in run.steps:
        assert line["rollout/logp_diff"] < LOGP_NOISE
    # The first update and every second one, those after a step included.
    checked = [line["step"] for line in run.steps if "rollout/weight_check" in line]
    assert checked == [1, 3]
    assert all(line.get("rollout/weight_check", 0) < LOGP_NOISE for line in run.steps)
    evaluations = [line for line in run.lines("logging.jsonl") if "eval/counting/accuracy" in line]
    assert [line["step"] for line in evaluations] == [2, 4]
    assert all(
        (line["eval/counting/completions"], line["eval/again/completions"]) == (4, 6)
        for line in evaluations
    )
    versions = [line["rollout/weight_version"] for line in run.steps]
    assert versions == [versions[0] + i for i in range(4)]
    if learning_rate == 0:
        assert run.steps[-1]["kl"] == pytest.approx(0, abs=1e-6)
    else:
        # Far enough from the first weights that an engine that had kept them would show.
        assert run.steps[-1]["kl"] > 100 * LOGP_NOISE**2 and run.steps[-1]["kl"] > 0.01
    assert list((run.folder / "checkpoint-4").glob("model*.safetensors"))


def test_the_checkpoint_is_what_the_server_serves(rlhf, tiny_model, url):
    """After a run the server's log-probs are those of the saved checkpoint, tied head included."""
    import torch
    from transformers import AutoModelForCausalLM

    from swift_r1.wire.client import RolloutClient

    run = rlhf(
        tiny_model, use_vllm="true", vllm_server_base_url=url, max_steps=2, learning_rate=1e-2
    )
    assert run.code == 0
    sequence = list(range(5, 45))
    model = AutoModelForCausalLM.from_pretrained(run.folder / "checkpoint-2")
    ids = torch.tensor([sequence])
    with torch.no_grad():
        expected = (
            model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        )
        base = AutoModelForCausalLM.from_pretrained(tiny_model)(ids).logits[0, :-1].log_softmax(-1)
    with RolloutClient(url) as client:
        served = torch.tensor(client.score([sequence]).logprobs[0])
    torch.testing.assert_close(served, expected, rtol=0, atol=LOGP_NOISE)
    assert (base.gather(-1, ids[0, 1:, None]).squeeze(-1) - expected).abs().max() > 10 * LOGP_NOISE


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_adapter_alone_and_then_whole_weights_on_one_server(
    rlhf, rollout_server, tiny_model, tmp_path
):
    """vLLM wraps the layers that may get adapters: a full push must still reach what is under them."""
    url = rollout_server(
        tiny_model, torch_dtype="float32", vllm_enable_lora="true", vllm_max_lora_rank=8
    )
    settings = {
        "use_vllm": "true",
        "vllm_server_base_url": url,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "beta": 0.01,
        "max_steps": 4,
        "save_steps": 4,
        "weight_check_steps": 1,
    }
    runs = [
        rlhf(
            tiny_model, processes=2, deepspeed="zero3", train_type="lora", lora_rank=4, **settings
        ),
        rlhf(tiny_model, output_dir=tmp_path / "whole", **settings),
    ]
    for run in runs:
        assert run.code == 0
        assert all(
            line["rollout/logp_diff"] < LOGP_NOISE > line["rollout/weight_check"]
            for line in run.steps
        )
        assert run.steps[-1]["kl"] > 0.01
    assert "adapters alone go to the rollout server" in runs[0].errors
    refused = rlhf(
        tiny_model, train_type="lora", lora_rank=4, output_dir=tmp_path / "late", **settings
    )
    assert refused.code == 2 and "holds whole weights that another run has pushed" in refused.errors


def test_a_server_of_another_vocabulary_is_refused_before_a_model_loads(
    rlhf, tiny_model, tiny_server, tmp_path
):
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"vocab_size": config["vocab_size"] + 64})
    )
    run = rlhf(other, use_vllm="true", vllm_server_base_url=tiny_server.url)
    assert run.code == 2 and f"start it with `swift rollout --model {other}`" in run.errors
    assert not run.folder.exists()
