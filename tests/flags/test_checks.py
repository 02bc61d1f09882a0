"""Faults of arguments taken together: each with the flag that causes it and what to change."""

import json

import pytest

from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, parse_arguments
from swift_r1.flags.distillation import read_teachers
from swift_r1.flags.training import seconds_of

BASE = ["--rlhf_type", "grpo", "--model", "m", "--dataset", "d", "--reward_funcs", "a", "b"]
BATCH = ["--per_device_train_batch_size", "8"]
SERVER = ["--use_vllm", "true", "--vllm_server_host", "127.0.0.1"]
TWO = {"NPROC_PER_NODE": "2"}


def faults(
    words: str | list[str], environ: dict[str, str] | None = None, batch: list[str] = BATCH
) -> tuple[str, ...]:
    given = words.split() if isinstance(words, str) else words
    try:
        parse_arguments(RlhfArguments, [*BASE, *batch, *given], environ or {})
    except UsageError as error:
        return error.faults
    return ()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            "--vllm_server_host h --vllm_server_port 1",
            ["--vllm_server_host, --vllm_server_port have no effect"],
        ),
        ("--vllm_mode server", ["--vllm_mode has no effect without --use_vllm true"]),
        ("--use_vllm true", ["needs --vllm_server_host"]),
        (
            "--async_generate true",
            ["--async_generate true needs a `swift rollout` server (--use_vllm true)"],
        ),
        (
            "--use_vllm true --vllm_server_host h --async_generate true --max_staleness -1",
            ["max_staleness"],
        ),
        ("--use_vllm true --vllm_server_base_url h:1", ["must begin with http://"]),
        ("--use_vllm true --vllm_server_base_url http://h --vllm_server_port 1", ["not both"]),
        (
            "--use_vllm true --vllm_server_host h --sleep_level 2 --async_generate true",
            [
                "--sleep_level with --async_generate true: the engine generates while the trainer trains"
            ],
        ),
        (
            "--use_vllm true --vllm_mode colocate --sleep_level 1 --offload_optimizer true --optim paged_adamw_8bit",
            ["whose moments move between GPU and host by themselves"],
        ),
        ("--top_p 0", ["--top_p", "0"]),
        (
            ["--tools", "shell", "--sandbox_limits", '{"cpu_second": 3}'],
            ["--sandbox_limits there is no limit cpu_second: did you mean cpu_seconds?"],
        ),
        (
            ["--tools", "shell", "--sandbox_limits", '{"memory_bytes": 1e9}'],
            ["--sandbox_limits memory_bytes must be a whole number above 0, got 1000000000.0"],
        ),
        ("--tools shell --sandbox_network proxy", ["is HOST:PORT of a proxy, got 'proxy'"]),
        (
            ["--lr_scheduler_kwargs", '{"a":' * 100_000],
            ["--lr_scheduler_kwargs must be a JSON object, and is nested too deep"],
        ),
        ("--top_k 0", ["--top_k 0 leaves no token"]),
        ("--top_p 0.9 --rollout_importance_sampling_mode sequence_mask", ["use token_truncate"]),
        ("--structured_outputs_regex a+", ["--structured_outputs_regex needs vLLM"]),
        ("--loss_scale all", ["all is written default"]),
        (
            "--use_vllm true --vllm_server_host a b c --vllm_server_port 1 2",
            ["3 values and --vllm_server_port 2"],
        ),
        (
            "--use_vllm true --vllm_server_host a b --weight_transport nccl",
            ["nccl takes one server"],
        ),
        (
            "--use_vllm true --vllm_server_host a --weight_delta true --weight_transport shm",
            ["sends changes by http"],
        ),
        (
            "--use_vllm true --vllm_server_host a --weight_fanout 2 --weight_transport nccl",
            ["is for weights by http"],
        ),
        (
            "--use_vllm true --vllm_server_file f --weight_transport nccl",
            ["servers of --vllm_server_file come and go"],
        ),
        (
            "--use_vllm true --vllm_server_file f --sleep_level 1",
            ["with it give --vllm_server_base_url"],
        ),
        ("--reward_weights 1", ["--reward_weights has 1 values for 2 reward functions"]),
        (
            "--multi_objective_aggregation normalize_then_sum --truncated_reward -1",
            ["--truncated_reward is on the scale of the rewards"],
        ),
        ("--max_steps 0", ["--max_steps 0 trains nothing"]),
        (["--lr_scheduler_kwargs", '{"power": 2}'], ["cosine does not take 'power'"]),
        ("--optim muon --train_type lora", ["--train_type lora trains factors of theirs"]),
        ("--deepspeed zero4", ["zero0, zero1", "not 'zero4'"]),
        (["--deepspeed", "{bad"], ["JSON that is not valid"]),
        ("--ddp_bucket_cap_mb 50", ["gradients are sent in buckets of 25 MiB"]),
        ("--streaming true", ["--streaming true needs --max_steps"]),
        (
            "--streaming true --max_steps 2 --eval_steps 1 --split_dataset_ratio 0.1",
            ["cannot split rows off: give --val_dataset"],
        ),
        (
            "--prompt_template r2",
            ["--prompt_template r2: write r1, qwen_math, no, or the path of a Jinja file"],
        ),
        (
            ["--chat_template_kwargs", '{"messages": []}'],
            ["--chat_template_kwargs has 'messages', which is not an argument of a chat template"],
        ),
        (
            "--deterministic true --use_vllm true --vllm_server_host h",
            ["--deterministic true cannot be promised with --use_vllm true"],
        ),
        ("--report_to none wandb", ["none cannot be combined"]),
        ("--loss_type sapo --delta 2 --epsilon_high 1", ["--epsilon_high", "sapo"]),
        (
            "--teacher_model m --advantage_reweight rlsd --loss_type real",
            ["--loss_type real compares completions"],
        ),
        ("--loss_type real --scale_rewards group", ["only the sign of advantages counts"]),
        ("--loss_type real --importance_sampling_level sequence", ["it has the sequence's mean"]),
        (
            "--loss_type real --num_generations 16 --steps_per_generation 2",
            [
                "an optimizer step of 8 (--per_device_train_batch_size 8 x 1 processes x 1 accumulation steps) splits"
            ],
        ),
        (
            "--router_replay_mode R2",
            ["acts from a round's second optimizer step on, and rounds have one"],
        ),
        (
            "--router_replay_mode R2 --num_iterations 2 --sequence_parallel_size 2",
            ["the experts of a row's parts are not gathered"],
        ),
        ("--router_replay_mode r3", ["--router_replay_mode"]),
        (
            "--chord_sft_dataset a.jsonl --chord_mu_peak 0.5 --chord_mu_valley 0",
            [
                "needs --chord_sft_per_device_train_batch_size, --chord_mu_warmup_steps, --chord_mu_decay_steps"
            ],
        ),
        ("--beta 0.1 --ref_model_sync_steps 5", ["no effect without --sync_ref_model true"]),
        (
            "--train_type lora --init_weights pissa",
            ["pissa: adapters begin as the identity over the model as it is"],
        ),
        (
            "--train_type lora --adapters tests",
            ["--adapters tests holds no adapters (adapter_config.json"],
        ),
        ("--resume_from_checkpoint last --resume_only_model true", ["name its folder, not last"]),
        ("--beta 0.1 --ref_model_mixup_alpha 0.5", ["no effect without --sync_ref_model true"]),
        (
            "--rollout_importance_sampling_threshold 3",
            ["without --rollout_importance_sampling_mode"],
        ),
        ("--max_resample_times 2", ["no effect without --dynamic_sample true"]),
        ("--dynamic_sample true --advantage_estimator reinforce_plus_plus", ["makes no sense"]),
        ("--stop_words=", ["empty string"]),
    ],
)
def test_refused(words: str | list[str], parts: list[str]) -> None:
    found = faults(words)
    assert found, "nothing was refused"
    assert all("\n" not in fault for fault in found)
    for part in parts:
        assert part in found[0]


PPO = ["--rlhf_type", "ppo", *BASE[2:]]


def ppo_faults(words: str) -> tuple[str, ...]:
    try:
        parse_arguments(RlhfArguments, [*PPO, *BATCH, *words.split()], {})
    except UsageError as error:
        return error.faults
    return ()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--gkd_logits_topk 4", "has no effect without --teacher_model or --teacher_model_server"),
        ("--teacher_kl_in_reward true --gkd_logits_topk 4 --teacher_model t", "not both"),
        (
            "--teacher_model t --teacher_model_server http://h",
            "give either --teacher_model_server or --teacher_model",
        ),
        ("--teacher_model_server http://h http://i", "several teachers need tags"),
        (
            '--teacher_model_server [{"url":"http://h","tags":["a"]},{"url":"http://i","tags":["a"]}]',
            "two teachers",
        ),
        ("--teacher_model t --importance_sampling_level sequence", "is of whole completions"),
        (
            "--teacher_model t --teacher_kl_in_reward true --num_generations 1",
            "makes every advantage 0",
        ),
    ],
)
def test_what_a_teacher_needs(words: str, part: str) -> None:
    assert any(part in fault for fault in faults(words)), faults(words)


def test_tags_of_servers() -> None:
    words = ['{"url": "http://h", "tags": "math"}', '[{"url": "http://i", "tags": ["code", 3]}]']
    assert read_teachers(words) == {"math": "http://h", "code": "http://i", "3": "http://i"}


def test_a_teacher_alone() -> None:
    base = ["--rlhf_type", "grpo", "--model", "m", "--dataset", "d", *BATCH, "--teacher_model", "t"]
    assert (
        parse_arguments(RlhfArguments, [*base, "--num_generations", "1"], {}).distillation.name
        == "advantage"
    )
    of_tokens = parse_arguments(
        RlhfArguments, [*base, "--importance_sampling_level", "sequence_token"], {}
    )
    assert of_tokens.distillation.name == "advantage"
    with pytest.raises(UsageError, match="a teacher alone gives none") as raised:
        parse_arguments(RlhfArguments, [*base, "--dynamic_sample", "true", "--eval_steps", "2"], {})
    assert len(raised.value.faults) == 2
    with pytest.raises(UsageError, match="a teacher needs --rlhf_type grpo"):
        parse_arguments(RlhfArguments, ["--rlhf_type", "ppo", *base[2:]], {})


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--critic_model m", "--critic_model has no effect with --rlhf_type grpo"),
        ("--critic_learning_rate 1e-5", "--critic_learning_rate has no effect"),
        ("--critic_warmup_steps 3", "--critic_warmup_steps has no effect"),
        (
            "--num_generations 1",
            "--num_generations 1 makes every advantage 0 with --advantage_estimator grpo",
        ),
        (
            "--num_generations 1 --advantage_estimator rloo",
            "or --advantage_estimator reinforce_plus_plus",
        ),
        ("--offload_ref_model true", "--offload_ref_model has no effect without a KL: give --beta"),
        (
            "--offload_ref_model true --beta 1 --train_type lora",
            "--offload_ref_model has no effect with --train_type lora: the reference is the model",
        ),
    ],
)
def test_ppo_flags_are_refused_with_grpo(words: str, part: str) -> None:
    assert part in faults(words)[0]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            "--beta 0.1",
            "--beta has no effect with --rlhf_type ppo: the KL is in the reward: --kl_coef",
        ),
        ("--kl_in_reward true", "--kl_in_reward has no effect"),
        ("--advantage_estimator rloo", "advantages come from the critic"),
        ("--scale_rewards none", "--scale_rewards has no effect"),
        ("--multi_objective_aggregation normalize_then_sum", "rewards are not compared in groups"),
        ("--importance_sampling_level sequence", "ratios, are of tokens"),
        ("--critic_warmup_steps 5 --max_steps 5", "leaves the policy no step of --max_steps 5"),
        (
            "--lr_scheduler_type polynomial --critic_learning_rate 1e-8",
            "--critic_learning_rate 1e-08 is not above the end",
        ),
    ],
)
def test_flags_of_groups_are_refused_with_ppo(words: str, part: str) -> None:
    assert any(part in fault for fault in ppo_faults(words))


def test_ppo_resolves_its_defaults() -> None:
    words = "--num_generations 1 --num_mini_batches 4 --num_ppo_epochs 2 --cliprange 0.1 --gradient_accumulation_steps 3"
    args = parse_arguments(RlhfArguments, [*PPO, *BATCH, *words.split()], {})
    assert (args.critic_model, args.critic_learning_rate) == ("m", args.learning_rate)
    assert (args.steps_per_generation, args.generation_batch_size) == (12, 96)
    assert (args.num_iterations, args.epsilon) == (2, 0.1)
    assert not args.wants_reference
    args = parse_arguments(
        RlhfArguments, [*PPO, *BATCH, *["--critic_model", "c", "--kl_coef", "0.1"]], {}
    )
    assert args.critic_model == "c" and args.wants_reference
    grpo = parse_arguments(RlhfArguments, [*BASE, *BATCH], {})
    assert grpo.critic_model is None and grpo.critic_learning_rate is None


@pytest.mark.parametrize(
    "words",
    [
        " ".join(SERVER) + " --vllm_mode server --vllm_server_port 8001",
        "--use_vllm true --vllm_server_base_url http://h:1",
        "--use_vllm true --vllm_server_base_url http://h:1 https://h:2 --weight_delta true",
        "--top_p 1.0 --top_k -1",
        "--top_p 0.9 --top_k 50 --rollout_importance_sampling_mode token_truncate",
        "--reward_weights 1 0.5",
        "--eval_on_start true --eval_limit 3",
        "--deepspeed zero2_offload --ddp_timeout 60",
        "--deepspeed ds.json",
        "--loss_type cispo --epsilon_high 4",
        "--loss_type sapo --tau_pos 2 --tau_neg 1",
        "--importance_sampling_level sequence_token",
        "--delta 1.5 --epsilon_high 0.28",
        "--beta 0.1 --ref_model m --offload_ref_model true",
        "--beta 0.1 --kl_in_reward true --sync_ref_model true --ref_model_sync_steps 5 --ref_model_mixup_alpha 1",
        "--rollout_importance_sampling_mode sequence_mask --rollout_importance_sampling_threshold 3",
        "--dynamic_sample true --max_resample_times 1 --overlong_filter true --top_entropy_quantile 0.2",
        "--freeze_parameters model.embed --freeze_parameters_ratio 0.5 --trainable_parameters model.layers.0",
        '--lr_scheduler_type cosine_with_restarts --lr_scheduler_kwargs {"num_cycles":2}',
        '--lr_scheduler_type polynomial --lr_scheduler_kwargs {"power":2}',
    ],
)
def test_accepted(words: str) -> None:
    assert faults(words) == ()


@pytest.mark.parametrize(
    ("batch", "words", "environ", "part"),
    [
        (
            ["--per_device_train_batch_size", "6"],
            "--gradient_accumulation_steps 1",
            {},
            "a round of 6 completions",
        ),
        (
            ["--per_device_train_batch_size", "3"],
            "--deepspeed zero2 --gradient_accumulation_steps 1",
            TWO,
            "3 x 2 processes x 1 micro-batches",
        ),
        (
            BATCH,
            "--generation_batch_size 12",
            {},
            "not a multiple of 8 (--per_device_train_batch_size 8 x 1 processes): use 8 or 16",
        ),
        (BATCH, "--steps_per_generation 3 --gradient_accumulation_steps 2", {}, "use 2 or 4"),
    ],
)
def test_a_round_must_divide(
    batch: list[str], words: str, environ: dict[str, str], part: str
) -> None:
    (found,) = faults(words, environ, batch)
    assert part in found


def test_half_a_group_a_process_is_fine() -> None:
    assert faults("--deepspeed zero2", TWO, ["--per_device_train_batch_size", "4"]) == ()


def test_a_micro_batch_holds_at_least_one_completion() -> None:
    lengths = "--max_length 100 --max_completion_length 50"
    (found,) = faults(f"{lengths} --max_tokens_per_micro_batch 149")
    assert "149 is less than" in found and "150 tokens" in found
    assert not faults(f"{lengths} --max_tokens_per_micro_batch 150")


@pytest.mark.parametrize("backend", ["", "--deepspeed zero3", "--fsdp fsdp2"])
def test_several_processes_take_any_backend(backend: str) -> None:
    assert faults(f"{backend} --ddp_timeout 60 --ddp_backend gloo", TWO) == ()


def test_rows_are_spread_over_whole_groups_of_processes() -> None:
    assert faults("--deepspeed zero2 --sequence_parallel_size 2", TWO) == ()
    (found,) = faults("--deepspeed zero2 --sequence_parallel_size 3", TWO)
    assert "--sequence_parallel_size 3 does not divide the number of processes, 2" in found


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        (
            {"NPROC_PER_NODE": "two"},
            "NPROC_PER_NODE must be a whole number of at least 1, not 'two'",
        ),
        ({"NNODES": "2"}, "needs MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "ranks count from 0"),
    ],
)
def test_the_environment_is_checked_too(environ: dict[str, str], part: str) -> None:
    assert part in faults("--deepspeed zero2", environ)[0]


def test_the_reward_api_and_its_url_go_together() -> None:
    def found(*words: str) -> tuple[str, ...]:
        base = [*BASE[:-2], "a", "api", *BATCH, *words]
        try:
            parse_arguments(RlhfArguments, base, {})
        except UsageError as error:
            return error.faults
        return ()

    assert found("--reward_api", "http://127.0.0.1:8100/rewards") == ()
    assert found() == ("--reward_funcs api needs --reward_api URL",)
    assert "must begin with http://" in found("--reward_api", "h:1")[0]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("45m", 2700), ("1.5h", 5400), ("1d", 86400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds
    assert faults(f"--max_runtime {text}") == ()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--metric_for_best_model accuracy", "--save_steps 500 must be a multiple of --eval_steps"),
        ("--metric_for_best_model accuracy --eval_steps 3", "must be a multiple of --eval_steps 3"),
        (
            "--metric_for_best_model loss --eval_steps 5",
            "it must be one of accuracy, reward, rewards/",
        ),
        (
            "--greater_is_better false",
            "--greater_is_better has no effect without --metric_for_best_model",
        ),
        (
            "--metric_for_best_model reward --save_strategy epoch --eval_steps 5",
            "needs --eval_strategy epoch",
        ),
        (
            "--metric_for_best_model reward --save_strategy no",
            "with --save_strategy no there is one",
        ),
        (
            "--save_strategy epoch --streaming true --max_steps 5",
            "--save_strategy epoch with --streaming true",
        ),
        ("--eval_steps 5 --split_dataset_ratio 0", "leaves no row to evaluate"),
        ("--interleave_prob 0.5 0.5", "--interleave_prob has 2 values for 1 data sets"),
        ("--interleave_prob 0.5", "--interleave_prob 0.5 must add up to 1"),
        ("--interleave_prob 1 --dataset_shuffle false", "mixes loaded rows by shuffling them"),
        ("--max_epochs 2 --streaming true --max_steps 5", "--max_epochs with --streaming true"),
    ],
)
def test_the_best_checkpoint_needs_its_metric(words: str, part: str) -> None:
    (found,) = faults(words)
    assert part in found
    assert faults("--metric_for_best_model reward --eval_steps 250 --greater_is_better false") == ()
    assert faults("--eval_steps 5 --val_dataset v --split_dataset_ratio 0") == ()
    assert (
        faults("--metric_for_best_model reward --eval_strategy steps --save_strategy steps") == ()
    )
    assert (
        faults("--metric_for_best_model reward --eval_strategy epoch --save_strategy epoch") == ()
    )


def test_an_episode_may_take_its_time() -> None:
    """Longer than a run may be without progress it cannot."""
    (found,) = faults("--agent a --agent_timeout 60 --step_timeout 60")
    assert "--agent_timeout 60 is not below --step_timeout 60" in found
    assert faults("--agent a --agent_timeout 60 --step_timeout 61") == ()
    assert faults("--agent a --agent_timeout 60 --step_timeout 0") == ()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            "--max_turns 3",
            "--max_turns has no effect without --multi_turn_scheduler, --tools, --use_gym_env",
        ),
        ("--use_gym_env false --gym_env a", "--gym_env has no effect without --use_gym_env true"),
        (
            "--use_gym_env true --reward_weights 1 2",
            "--reward_weights has 2 values for 3 reward functions",
        ),
    ],
)
def test_flags_of_several_turns(words: str, part: str) -> None:
    (found,) = faults(words)
    assert part in found
    assert (
        faults("--multi_turn_scheduler a --max_turns 3 --completion_length_limit_scope total") == ()
    )
    assert faults("--use_gym_env true --gym_env a --reward_weights 1 2 3") == ()
    # an environment that is named is played
    assert faults("--gym_env a --reward_weights 1 2 3") == ()


@pytest.mark.parametrize(
    ("words", "urls"),
    [
        ("--vllm_server_host a", ("http://a:8000",)),
        ("--vllm_server_host a ::1 --vllm_server_port 1 2", ("http://a:1", "http://[::1]:2")),
        ("--vllm_server_host a b", ("http://a:8000", "http://b:8000")),
        ("--vllm_server_host a --vllm_server_port 1 2", ("http://a:1", "http://a:2")),
        ("--vllm_server_base_url http://a:1/ https://b", ("http://a:1", "https://b")),
    ],
)
def test_servers_by_host_port_and_url(words: str, urls: tuple[str, ...]) -> None:
    args = parse_arguments(RlhfArguments, [*BASE, *BATCH, "--use_vllm", "true", *words.split()], {})
    assert args.rollout_base_urls == urls


@pytest.mark.parametrize(
    ("scheme", "refused"), [("fp8_per_tensor", False), ("fp8_per_block", False), ("awq", True)]
)
def test_an_engine_may_keep_the_weights_in_fp8(scheme: str, refused: bool) -> None:
    """What needs a checkpoint of its own cannot take a trainer's weights."""
    kwargs = json.dumps({"quantization": scheme})
    found = faults(
        ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_engine_kwargs", kwargs]
    )
    assert any("holds 'quantization', which is ours" in line for line in found) == refused, found


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ('{"image": 2, "video": 1}', None),
        ('{"image": -1}', "a whole number"),
        ('{"image": true}', "a whole number"),
        ('{"picture": 1}', "'picture' is none of image, video, audio"),
    ],
)
def test_how_many_images_an_engine_takes(limits: str, said: str | None) -> None:
    own = ["--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_limit_mm_per_prompt", limits]
    found = faults(own)
    assert (said in found[0]) if said else not found
    elsewhere = faults(["--vllm_limit_mm_per_prompt", limits])
    assert (said or "give it to `swift rollout`") in elsewhere[0]
