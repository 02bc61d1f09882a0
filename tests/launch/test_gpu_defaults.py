"""What the memory of a GPU decides where the user does not; the device is a value."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swift_r1.cli.memory import print_estimate
from swift_r1.errors import EXIT_OK, EXIT_USAGE
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.world import World
from swift_r1.launch.gpu_defaults import (
    as_it_began,
    engine_share,
    fits_on_gpu,
    for_gpu,
    reward_workers,
    step_cut,
    why_no_room,
)
from swift_r1.models.shape import shape_of
from swift_r1.runtime.hardware import GpuMemory, gpu_memory
from swift_r1.training.memory import GIB, estimated
from swift_r1.training.room import SPARE, divided
from tests.families import family_config

H200 = GpuMemory(140.0 * GIB, 139.0 * GIB)
FLAGS = {
    "rlhf_type": "grpo",
    "dataset": "d",
    "reward_funcs": "format",
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "max_length": 128,
    "max_completion_length": 512,
}
COLOCATED = {"use_vllm": "true", "vllm_mode": "colocate"}
QWEN = {"7b": (3584, 18_944, 28, 28, 4, 152_064), "0.5b": (896, 4864, 24, 14, 2, 151_936)}


def model_of(folder: Path, name: str) -> Path:
    hidden, inner, layers, heads, shared, words = QWEN[name]
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": words,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": name == "0.5b",
        "dtype": "bfloat16",
    }
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: model_of(folder, name) for name in QWEN}


def parse(model: Path, **flags: Any) -> RlhfArguments:
    values = FLAGS | {"model": model} | flags
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return parse_arguments(RlhfArguments, words, {})


def peak(args: RlhfArguments, memory: GpuMemory = H200) -> float:
    return estimated(args, shape_of(args.model), World(), memory.total).peak


def test_a_small_model_is_trained_whole_and_without_checkpointing(models: dict[str, Path]) -> None:
    args = parse(models["0.5b"])
    cut, lines = step_cut(args, 64, World(), H200)
    assert cut.max_tokens_per_micro_batch == 64 * 640 and cut.gradient_checkpointing is False
    tokens, checkpointing = lines
    assert tokens.startswith("--max_tokens_per_micro_batch 40960: at most ")
    assert f"{peak(cut) / GIB:.1f} GiB" in tokens and "of 134.8 GiB" in tokens
    assert checkpointing.startswith("--gradient_checkpointing false: ")
    assert peak(cut) <= H200.free - SPARE * H200.total


def test_less_memory_makes_smaller_micro_batches_and_then_checkpoints(
    models: dict[str, Path],
) -> None:
    args = parse(models["0.5b"])
    found = []
    for gib in (140, 40, 24, 16):
        memory = GpuMemory(gib * GIB, gib * GIB)
        cut, _ = step_cut(args, 64, World(), memory)
        assert peak(cut, memory) <= (1 - SPARE) * memory.total
        found.append((cut.max_tokens_per_micro_batch, cut.gradient_checkpointing))
    assert found[0] == (40_960, False)
    assert [one[1] for one in found] == sorted(one[1] for one in found) and found[-1][1]
    sizes = [size for size, checkpointing in found if not checkpointing]
    assert sizes == sorted(sizes, reverse=True) and min(sizes) >= 8192


def test_what_the_user_gives_stays(models: dict[str, Path]) -> None:
    both = parse(models["0.5b"], max_tokens_per_micro_batch=700, gradient_checkpointing="true")
    assert step_cut(both, 64, World(), H200) == (both, [])
    one = parse(models["0.5b"], gradient_checkpointing="true")
    cut, lines = step_cut(one, 64, World(), H200)
    assert cut.gradient_checkpointing is True and cut.max_tokens_per_micro_batch == 40_960
    assert len(lines) == 1
    own = parse(models["0.5b"], max_tokens_per_micro_batch=700)
    cut, [line] = step_cut(own, 64, World(), H200)
    assert (cut.max_tokens_per_micro_batch, cut.gradient_checkpointing) == (700, False)
    assert line.startswith("--gradient_checkpointing false")
    workers = parse(models["0.5b"], reward_num_workers=3)
    assert reward_workers(workers, 16) == (workers, None)
    share = parse(models["0.5b"], **COLOCATED, vllm_gpu_memory_utilization=0.5)
    assert engine_share(share, 64, World(), H200) == (share, None)


def test_what_is_not_known_or_does_not_fit_stays_and_is_said(models: dict[str, Path]) -> None:
    args = parse(models["7b"])
    cases: Sequence[tuple[World, GpuMemory | None, str]] = [
        (World(), None, "nvidia-smi does not tell"),
        (replace(World(), nnodes=2), H200, "on several nodes"),
        (World(), GpuMemory(24 * GIB, 23 * GIB), "nothing fits: the least is "),
    ]
    for world, memory, why in cases:
        cut, [line] = step_cut(args, 64, world, memory)
        assert cut == args and why in line
        assert line.startswith("--gradient_checkpointing and --max_tokens_per_micro_batch stay")


def test_the_engine_gets_what_a_round_needs(models: dict[str, Path]) -> None:
    """512 completions of 4,096 tokens and 64 prompts of 128, 12,288 bytes each; weights, engine and context."""
    long = parse(models["0.5b"], **COLOCATED, max_completion_length=4096)
    args, line = engine_share(long, 512, World(), H200)
    cache = (512 * 4096 + 64 * 128) * 2 * 24 * 128 * 2
    weights = shape_of(args.model).total * 2
    share = (cache + weights + 2.1 * GIB) / H200.total
    assert args.vllm_gpu_memory_utilization == pytest.approx(share, abs=1e-3)
    assert line is not None and line.startswith(
        f"--vllm_gpu_memory_utilization {args.vllm_gpu_memory_utilization:g}: "
    )
    assert "139.0 of 140.0 GiB are free" in line and "512 completions at once" in line
    # and the trainer the rest
    cut, [tokens, _] = step_cut(args, 512, World(), H200)
    left = H200.free - (SPARE + float(args.vllm_gpu_memory_utilization or 0)) * H200.total
    assert f"of {left / GIB:.1f} GiB" in tokens and peak(cut) <= left
    # a tenth of the GPU where that is more than enough, and half of what neither needs where it is not
    few, _ = engine_share(parse(models["0.5b"], **COLOCATED), 64, World(), H200)
    assert few.vllm_gpu_memory_utilization == 0.1
    small = GpuMemory(24 * GIB, 23 * GIB)
    found = divided(long, shape_of(long.model), World(), small, 512)
    assert found is not None and found.need.least < found.engine < found.need.wanted


def test_room_for_both(models: dict[str, Path]) -> None:
    """A 7B trains in full beside its engine on an H200 only if they take turns or its moments have 8 bits; on a card of
    24 GiB a 0.5B does."""
    small = GpuMemory(24 * GIB, 23.5 * GIB)
    assert why_no_room(parse(models["0.5b"]), 64, World(), small) is None
    big = parse(models["7b"])
    why = why_no_room(big, 64, World(), H200)
    assert why is not None and "139.0 of 140.0 GiB are free" in why
    assert "the trainer needs" in why and "vLLM" in why
    turns = parse(
        models["7b"], **COLOCATED, sleep_level=2, offload_model="true", offload_optimizer="true"
    )
    shape = shape_of(turns.model)
    assert divided(turns, shape, World(), H200, 64) is not None
    assert divided(replace(turns, sleep_level=0), shape, World(), H200, 64) is None
    share, line = engine_share(parse(models["7b"], **COLOCATED), 64, World(), H200)
    assert share.vllm_gpu_memory_utilization is None and "stays at its default" in str(line)
    assert "does not tell" in str(why_no_room(big, 64, World(), None))


def test_rewards_get_half_of_the_cores(models: dict[str, Path]) -> None:
    args = parse(models["0.5b"])
    found = [reward_workers(args, cores)[0].reward_num_workers for cores in (2, 8, 16, 64)]
    assert found == [2, 4, 8, 8]
    inline = parse(models["0.5b"], reward_isolation="inline")
    assert reward_workers(inline, 16) == (inline, None)
    assert for_gpu(args, 64, World(), H200, 16)[1][-1].startswith("--reward_num_workers 8: ")


def test_a_resumed_run_goes_on_as_it_began(models: dict[str, Path], tmp_path: Path) -> None:
    """With micro-batches of other sizes its last digits would differ."""
    chosen = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "max_tokens_per_micro_batch": 5120,
        "gradient_checkpointing": False,
    }
    run = tmp_path / "v0-20261126-000000"
    run.mkdir()
    first = replace(parse(models["0.5b"]), **chosen)
    (run / "args.json").write_text(json.dumps({"args": first.to_dict()}))
    resumed = {"output_dir": tmp_path, "resume_from_checkpoint": "last"}
    args = as_it_began(parse(models["0.5b"], **resumed))
    assert {name: getattr(args, name) for name in chosen} == chosen
    assert step_cut(args, 64, World(), GpuMemory(16 * GIB, 16 * GIB)) == (args, [])
    own = as_it_began(parse(models["0.5b"], **resumed, max_tokens_per_micro_batch=640))
    assert own.max_tokens_per_micro_batch == 640 and own.gradient_checkpointing is False
    fresh = parse(models["0.5b"])
    assert as_it_began(fresh) is fresh


def test_what_cannot_fit_is_refused_with_what_would(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags that are named make it fit, and no fewer do."""
    own = {"use_vllm": "false"}
    fits = parse(models["0.5b"], **own)
    assert print_estimate(fits, World(), gpu=True, memory=H200) == EXIT_OK
    said = capsys.readouterr().out
    assert "it fits" in said and "--max_tokens_per_micro_batch" in said

    full = parse(models["7b"], **own)
    card = GpuMemory(24 * GIB, 24 * GIB)
    assert print_estimate(full, World(), gpu=True, memory=card) == EXIT_USAGE
    [line] = [one for one in capsys.readouterr().out.splitlines() if "cannot fit" in one]
    flags = line.removeprefix("it cannot fit; ").removesuffix(" would make it fit").split(" and ")
    assert len(flags) in (1, 2)
    given = {flag.split()[0].removeprefix("--"): flag.split()[1] for flag in flags}
    assert fits_on_gpu(parse(models["7b"], **{**own, **given}), 64, World(), card)
    for name in given:
        fewer = {other: value for other, value in given.items() if other != name}
        assert not fits_on_gpu(parse(models["7b"], **{**own, **fewer}), 64, World(), card)

    tiny = GpuMemory(4 * GIB, 4 * GIB)
    assert print_estimate(full, World(), gpu=True, memory=tiny) == EXIT_USAGE
    assert "no two flags would make it fit" in capsys.readouterr().out


def test_the_driver_is_asked_for_the_gpus_that_train(tmp_path: Path) -> None:
    """By its own program, which prints a line for each GPU; what it does not say is not known."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\necho "$@" > "$0.words"\necho "143771, 143158"\necho "143771, 9"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    found = gpu_memory({}, 1, str(program))
    assert found == GpuMemory(143_771 * 2.0**20, 143_158 * 2.0**20)
    assert gpu_memory({}, 2, str(program)) == GpuMemory(143_771 * 2.0**20, 9 * 2.0**20)
    assert "memory.total,memory.free" in (tmp_path / "nvidia-smi.words").read_text()
    program.write_text('#!/bin/sh\necho "[N/A], [N/A]"\n')
    assert gpu_memory({}, 1, str(program)) is None
    assert gpu_memory({}, 1, str(tmp_path / "none")) is None


def test_what_reads_images_takes_memory_where_rows_have_some(tmp_path: Path) -> None:
    config = family_config("qwen2_5_vl", 103)
    config.vision_config.hidden_size = 4096
    config.vision_config.intermediate_size = 16_384
    config.vision_config.depth = 24
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    args = parse(tmp_path, use_vllm="false")
    card = GpuMemory(16 * GIB, 16 * GIB)
    assert fits_on_gpu(args, 64, World(), card)
    assert not fits_on_gpu(args, 64, World(), card, images=True)
    beside = why_no_room(args, 64, World(), card), why_no_room(args, 64, World(), card, images=True)
    assert beside[0] is None and "has no room for both" in str(beside[1])
    lines = for_gpu(args, 64, World(), card, 4, images=True)[1]
    assert any("by the memory estimate nothing fits" in line for line in lines)
