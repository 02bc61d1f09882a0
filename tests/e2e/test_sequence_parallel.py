"""What `--sequence_parallel_size` refuses in `swift rlhf`; `test_token_record.py` trains with it."""

import pytest

from tests.families import save_family


@pytest.mark.parametrize(
    ("family", "more", "why"),
    [
        pytest.param("gemma2", {}, "attends by eager", marks=pytest.mark.long),
        ("llama", {"attn_impl": "eager"}, "attends by eager"),
        pytest.param("qwen3_next", {}, "linear_attention layers", marks=pytest.mark.long),
    ],
)
def test_attention_that_cannot_be_spread_is_refused(rlhf, tmp_path, family, more, why):
    flags = {"sequence_parallel_size": 2, "max_steps": 1, **more}
    run = rlhf(save_family(tmp_path / "model", family), 2, **flags)
    assert run.code == 2 and "--sequence_parallel_size 2: " in run.errors and why in run.errors
