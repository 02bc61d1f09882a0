"""The plan: what the batch flags come to."""

import shlex
from dataclasses import replace

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, make_plan, parse_arguments
from swift_r1.flags.plan import plan_table, rollouts_from

ISSUE = shlex.split("""
    --rlhf_type grpo --model models/smollm2-135m --external_plugins plugins/countdown.py --reward_funcs
    external_countdown format --use_vllm true --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port
    8000 --train_type full --torch_dtype bfloat16 --dataset countdown#50000 --max_length 2048
    --max_completion_length 256 --num_train_epochs 1 --max_steps 20 --per_device_train_batch_size 8
    --per_device_eval_batch_size 8 --learning_rate 5e-7 --gradient_accumulation_steps 2 --eval_steps 10
    --save_steps 10 --save_total_limit 2 --logging_steps 1 --output_dir output/GRPO_COUNTDOWN --warmup_ratio
    0.01 --dataloader_num_workers 4 --num_generations 8 --temperature 1.0 --deepspeed zero3 --log_completions
    true --report_to wandb --beta 0.001 --num_iterations 1
""")


def arguments(*words: str, processes: int = 1) -> RlhfArguments:
    base = ["--rlhf_type", "grpo", "--model", "m", "--dataset", "d", "--reward_funcs", "a"]
    return parse_arguments(RlhfArguments, [*base, *words], {"NPROC_PER_NODE": str(processes)})


def test_the_main_command_parses_and_its_plan_is_right() -> None:
    args = parse_arguments(
        RlhfArguments, [*ISSUE, "--system", "You are a helpful assistant."], {"NPROC_PER_NODE": "2"}
    )
    plan = make_plan(args, world_size=2, dataset_size=50_000)
    assert plan.completions_per_round == 8 * 2 * 2
    assert plan.prompts_per_round == 4
    assert plan.completions_per_optimizer_step == 32
    assert plan.optimizer_steps_per_round == 1
    assert (plan.rounds, plan.total_steps) == (20, 20)
    assert plan.warmup_steps == 1
    assert plan.max_tokens_per_round == 32 * 256
    assert plan.max_tokens_per_micro_batch == 8 * (2048 + 256)
    assert rollouts_from(args) == "vLLM server at http://127.0.0.1:8000"


def test_several_optimizer_steps_a_round() -> None:
    args = arguments(
        *[
            "--per_device_train_batch_size",
            "4",
            "--steps_per_generation",
            "6",
            "--gradient_accumulation_steps",
            "3",
        ]
    )
    args = replace(args, num_iterations=2)
    plan = make_plan(args, world_size=1, dataset_size=10)
    assert plan.completions_per_round == 24
    assert plan.prompts_per_round == 3
    assert plan.optimizer_steps_per_round == 6 // 3 * 2
    assert plan.rounds == 4  # ceil(10 / 3)
    assert plan.total_steps == 16
    assert plan.epochs == pytest.approx(12 / 10)


def test_max_steps_cut_the_last_round_short() -> None:
    args = arguments(
        *["--per_device_train_batch_size", "8", "--steps_per_generation", "4", "--max_steps", "6"]
    )
    plan = make_plan(args, world_size=1, dataset_size=100)
    assert plan.optimizer_steps_per_round == 4
    assert (plan.rounds, plan.total_steps) == (2, 6)


def test_ppo_mini_batches_and_epochs() -> None:
    words = "--num_mini_batches 4 --num_ppo_epochs 2 --gradient_accumulation_steps 2 --per_device_train_batch_size 8"
    base = "--rlhf_type ppo --model m --dataset d --reward_funcs a --num_generations 1 --critic_warmup_steps 5"
    args = parse_arguments(
        RlhfArguments, f"{base} {words} --critic_model c --kl_coef 0.05".split(), {}
    )
    plan = make_plan(args, 1, 640)
    assert (plan.completions_per_round, plan.prompts_per_round) == (64, 64)
    assert (plan.completions_per_optimizer_step, plan.optimizer_steps_per_round) == (16, 8)
    assert plan.total_steps == 80


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("--warmup_ratio 0.05", 1),
        ("--warmup_steps 3", 3),
        ("--warmup_steps 99", 10),
        ("--warmup_ratio 0", 0),
    ],
)
def test_warmup(words: str, steps: int) -> None:
    args = arguments("--per_device_train_batch_size", "8", "--max_steps", "10", *words.split())
    assert make_plan(args, 1, 100).warmup_steps == steps
    assert make_plan(replace(args, lr_scheduler_type="constant"), 1, 100).warmup_steps == 0


@pytest.mark.parametrize(
    ("words", "steps", "epoch"),
    [
        ("", 13, 100),  # of 8 prompts
        ("--dataloader_drop_last true", 12, 96),
        ("--dataloader_drop_last true --num_train_epochs 2", 24, 96),
        ("--max_steps 50 --max_epochs 2", 25, 100),
        ("--max_steps 20 --max_epochs 2", 20, 100),
        ("--num_train_epochs 3 --max_epochs 1", 13, 100),
    ],
)
def test_passes_over_the_prompts(words: str, steps: int, epoch: int) -> None:
    plan = make_plan(arguments("--per_device_train_batch_size", "64", *words.split()), 1, 100)
    assert (plan.total_steps, plan.rounds, plan.prompts_per_epoch) == (steps, steps, epoch)


def test_a_pass_without_a_whole_round_is_none() -> None:
    with pytest.raises(UsageError, match="leaves none of 7 prompts: a round takes 8"):
        make_plan(
            arguments("--per_device_train_batch_size", "64", "--dataloader_drop_last", "true"), 1, 7
        )


def test_the_table_shows_the_numbers() -> None:
    from swift_r1.runtime.terminal import Terminal

    args = arguments("--per_device_train_batch_size", "8")
    console = Terminal(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    args = replace(args, model="models/a[/b] :smile: [red]c", output_dir="out/[/]")
    console.print(plan_table(make_plan(args, 1, 1234), args))
    text = console.export_text()
    assert "models/a[/b] :smile: [red]c" in text  # nothing in it is markup
    assert "1,234 prompts" in text
    assert "1 prompt x 8 completions = 8" in text
    assert "this process" in text
