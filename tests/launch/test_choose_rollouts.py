"""Where completions come from when nobody says: each reason once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.plan import Plan, make_plan
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.world import World
from swift_r1.launch import colocate
from swift_r1.launch.checks.model_folder import dtype_here
from swift_r1.launch.colocate import LEAST_MODEL_BYTES, attention_of, chosen, compiled

FLAGS = {
    "rlhf_type": "grpo",
    "dataset": "d",
    "reward_funcs": "format",
    "per_device_train_batch_size": 32,
    "max_completion_length": 512,
    "max_steps": 100,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose weights have the size of a small real model and take no room."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(LEAST_MODEL_BYTES)
    return tmp_path


def choose(
    model: Path | str, gpu: bool = False, nnodes: int = 1, **flags: Any
) -> tuple[RlhfArguments, str | None]:
    values = FLAGS | {"model": model} | flags
    args, plan = parse(values)
    return chosen(args, plan, replace(World(), nnodes=nnodes), gpu)


def parse(values: dict[str, Any]) -> tuple[RlhfArguments, Plan]:
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    args = parse_arguments(RlhfArguments, words)
    return args, make_plan(args, 1, None)


def test_a_long_run_of_a_real_model_gets_an_engine(model: Path) -> None:
    args, line = choose(model)
    assert args.use_vllm is True and args.colocates
    assert (
        line is not None
        and "at most 1,638,400 tokens are to be generated, which repays its start" in line
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"max_steps": 2}, "at most 32,768 tokens are to be generated"),
        ({"gpu": True}, "nvidia-smi does not tell this GPU's memory"),
        ({"gpu": True, "max_steps": 39}, "at most 638,976 tokens are to be generated"),
        ({"nnodes": 2}, "on several nodes only --use_vllm true starts"),
        ({"deterministic": "true"}, "--deterministic true"),
        ({"train_type": "qlora"}, "4-bit weights"),
        ({"model": "Qwen/Qwen2.5-3B-Instruct"}, "not a local folder"),
    ],
)
def test_why_not(model: Path, more: dict[str, Any], why: str) -> None:
    args, line = choose(**({"model": model} | more))
    assert args.use_vllm is False and line is not None and why in line


def test_a_small_model_and_a_missing_vllm(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "model.safetensors").write_bytes(b"0" * 1000)
    assert "the model is small" in str(choose(model)[1])
    monkeypatch.setattr(colocate, "find_spec", lambda _name: None)
    assert "vLLM is not installed" in str(choose(model)[1])


@pytest.mark.parametrize(
    "flags", [{"use_vllm": "false"}, {"use_vllm": "true", "vllm_server_host": "h"}]
)
def test_who_says_it_is_obeyed_without_a_word(model: Path, flags: dict[str, Any]) -> None:
    args, line = choose(model, **flags)
    assert line is None and args.use_vllm is (flags["use_vllm"] == "true")


@pytest.mark.parametrize(("steps", "eager"), [(18, True), (19, False)])
def test_an_engine_of_a_long_run_is_compiled(model: Path, steps: int, eager: bool) -> None:
    beside = FLAGS | {
        "model": model,
        "max_steps": steps,
        "use_vllm": "true",
        "vllm_mode": "colocate",
    }
    args, plan = parse(beside)
    args, line = compiled(args, plan, gpu=False)
    assert args.vllm_enforce_eager is eager
    assert line is not None and f"at most {steps * 32 * 512:,} tokens" in line
    assert ("does not repay" in line) is eager


def test_what_the_user_or_a_gpu_decides(model: Path) -> None:
    beside = FLAGS | {"model": model, "use_vllm": "true", "vllm_mode": "colocate"}
    for more, gpu, kept in (({"vllm_enforce_eager": "true"}, False, True), ({}, True, None)):
        args, plan = parse(beside | more)
        args, line = compiled(args, plan, gpu)
        assert args.vllm_enforce_eager is kept and line is None
    args, plan = parse(FLAGS | {"model": model, "use_vllm": "false"})
    assert compiled(args, plan, gpu=False) == (args, None)


@pytest.mark.parametrize(
    ("flags", "gpu", "found", "why"),
    [
        ({}, False, None, None),
        ({"attn_impl": "eager"}, False, "eager", None),
        ({"attn_impl": "flash_attn"}, False, "sdpa", "there is no GPU"),
        ({"attn_impl": "flex_attention"}, True, "flex_attention", None),
    ],
)
def test_attention_is_what_the_machine_can_do(
    flags: dict[str, Any], gpu: bool, found: str | None, why: str | None
) -> None:
    args, line = attention_of(parse(FLAGS | {"model": "m"} | flags)[0], gpu)
    assert args.attn_impl == found
    assert line == (
        why and f"--attn_impl flash_attention_2: attention is PyTorch's SDPA here, since {why}"
    )


def test_flash_attention_on_a_gpu() -> None:
    """Its package must be there; rows that are spread over ranks do without."""
    args, _ = parse(FLAGS | {"model": "m", "attn_impl": "flash_attention_3"})
    with pytest.raises(
        UsageError, match=r"--attn_impl flash_attention_3 needs the package flash_attn_interface: "
    ):
        attention_of(args, gpu=True)
    args, line = attention_of(replace(args, sequence_parallel_size=2), gpu=True)
    assert (
        args.attn_impl == "sdpa" and line is not None and "rows that are spread over ranks" in line
    )


@pytest.mark.parametrize(
    ("own", "given", "instructions", "gpu", "found", "said"),
    [
        ("bfloat16", None, "avx512f", False, "float32", "the model computes in float32"),
        ("bfloat16", None, "avx512f avx512_bf16", False, None, ""),
        ("bfloat16", None, "avx512f", True, None, ""),
        ("float16", None, "avx512_bf16", False, "float32", "the model computes in float32"),
        (None, None, "avx512f", False, "float32", "the model computes in float32"),
        ("float32", None, "avx512f", False, None, ""),
        ("bfloat16", "bfloat16", "avx512f", False, "bfloat16", "--torch_dtype bfloat16: this CPU"),
        ("float32", "float16", "avx512_fp16", False, "float16", ""),
    ],
)
def test_the_dtype_is_one_that_the_cpu_multiplies(
    tmp_path: Path,
    own: str | None,
    given: str | None,
    instructions: str,
    gpu: bool,
    found: str | None,
    said: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": own} if own else {}))
    (tmp_path / "cpuinfo").write_text(f"model name : C\nflags\t\t: fpu {instructions}\n")
    dtype, line = dtype_here(str(tmp_path), given, gpu, str(tmp_path / "cpuinfo"))
    assert dtype == found
    assert (line or "").startswith(said) and bool(line) == bool(said)
