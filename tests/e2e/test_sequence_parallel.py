"""`--sequence_parallel_size` through `swift rlhf`."""

import pytest

from tests.families import save_family


def test_a_run_is_the_same_run(rlhf, tiny_model, tmp_path):
    """The same completions in a round and an optimizer step, however many ranks share a row."""
    found = []
    for name, processes, flags in (
        ("one", 1, {"per_device_train_batch_size": 16}),
        (
            "two",
            2,
            {
                "per_device_train_batch_size": 8,
                "sequence_parallel_size": 2,
                "attn_impl": "flash_attn",
            },
        ),
    ):
        run = rlhf(
            tiny_model, processes, max_steps=2, beta=0.1, output_dir=tmp_path / name, **flags
        )
        assert run.code == 0
        assert (name == "two") == (
            "--attn_impl flash_attention_2: attention is PyTorch's SDPA here" in run.errors
        )
        found.append(run.steps)
    for one, two in zip(*found, strict=True):
        for name in ("reward", "loss", "grad_norm", "kl", "entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize(
    ("family", "more", "why"),
    [
        ("gemma2", {}, "attends by eager"),
        ("llama", {"attn_impl": "eager"}, "attends by eager"),
        ("qwen3_next", {}, "linear_attention layers"),
    ],
)
def test_attention_that_cannot_be_spread_is_refused(rlhf, tmp_path, family, more, why):
    flags = {"sequence_parallel_size": 2, "max_steps": 1, **more}
    run = rlhf(save_family(tmp_path / "model", family), 2, **flags)
    assert run.code == 2 and "--sequence_parallel_size 2: " in run.errors and why in run.errors
