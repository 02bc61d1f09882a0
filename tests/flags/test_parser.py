"""Command line and config file to arguments: syntax, types, faults reported together."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_r1.cli.view import ViewArguments
from swift_r1.errors import UsageError
from swift_r1.flags import RlhfArguments, RolloutArguments, make_plan, parse_arguments
from swift_r1.flags.fields import flag_specs, spellings
from swift_r1.flags.ms_swift_flags import meanings
from swift_r1.flags.parser import unknown_flag
from swift_r1.launch.run_folder import without_secrets

BASE = shlex.split(
    "--rlhf_type grpo --model m --dataset d --reward_funcs a --per_device_train_batch_size 8"
)


def parse(*words: str, environ: dict[str, str] | None = None) -> RlhfArguments:
    return parse_arguments(RlhfArguments, [*BASE, *words], environ or {})


def faults(*words: str, environ: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        parse(*words, environ=environ)
    return caught.value.faults


def test_every_way_to_write_a_flag() -> None:
    args = parse(
        "--learning-rate=5e-7",
        "--tuner_type=full",
        "--dtype",
        "bfloat16",
        "--max_steps",
        "-1",
        "--stop_words",
        "a b",
        "- c",
        "--add_version",
        "false",
        "--log_completions",
        "--columns",
        '{"q": "query"}',
        "--system=--begins with dashes",
    )
    assert args.learning_rate == 5e-7
    assert args.stop_words == ["a b", "- c"]
    assert args.torch_dtype == "bfloat16"
    assert args.max_steps == -1
    assert args.add_version is False
    assert args.log_completions is True
    assert args.columns == {"q": "query"}
    assert args.system == "--begins with dashes"


def test_folders_of_runs_may_stand_anywhere() -> None:
    for words in (
        "a b --trace t",
        "a --trace t b",
        "--trace=t a b",
        "--runs a b --trace t",
    ):
        args = parse_arguments(ViewArguments, words.split(), {})
        assert (args.runs, args.trace) == (["a", "b"], "t")
    assert parse_arguments(ViewArguments, ["a", "--runs", "b"], {}).runs == ["b"]


def test_of_a_flag_given_twice_the_last_counts(caplog: pytest.LogCaptureFixture) -> None:
    args = parse("--seed", "x", "--reward_weights", "1", "--seed=2", "--reward-weights", "0.5")
    assert (args.seed, args.reward_weights) == (2, [0.5])
    assert caplog.messages == [
        "--seed is given twice: the last one counts",
        "--reward-weights is given twice: the last one counts",
    ]


def test_one_dash_is_a_typo_unless_a_number_follows() -> None:
    assert parse("--max_steps", "-1").max_steps == -1
    assert faults("-max_steps", "1") == ("unknown flag -max_steps: did you mean --max_steps?",)


def test_all_faults_come_together_one_a_line() -> None:
    found = faults(
        "--lerning_rate",
        "1",
        "--center_rewards_coefficient",
        "1",
        "--use_galore",
        "true",
        "--beta",
        "-1",
    )
    assert found == (
        "unknown flag --lerning_rate: did you mean --learning_rate?",
        "--center_rewards_coefficient: reward models are only read here: ms-swift trains them (swift rlhf --rlhf_type "
        "rm)",
        "--use_galore must be false, not 'true': GaLore is not done here: --train_type lora or --optim adamw_8bit save "
        "memory too",
        "--beta must be at least 0, not -1.0",
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--max_steps", "x"], "--max_steps must be a whole number, not 'x'"),
        (["--max_steps", "1.5"], "--max_steps must be a whole number, not '1.5'"),
        (["--learning_rate", "nan"], "--learning_rate must be a finite number, not 'nan'"),
        (["--use_vllm", "maybe"], "--use_vllm must be true or false, not 'maybe'"),
        (["--seed"], "--seed needs a value"),
        (["--system", "a\udcff"], "--system is not valid UTF-8"),
        (["--seed", "1", "2"], "--seed takes one value but got 2"),
        (
            ["--dtype", "float32", "--torch_dtype", "float16"],
            "--torch_dtype is given twice, once as --dtype: keep one",
        ),
        (["--num_generations", "1"], "--num_generations 1 makes every advantage 0"),
        (["--image_size", "9"], "--image_size: video and audio are not done here"),
        (["--zzz"], "unknown flag --zzz: `swift rlhf --help` lists the flags"),
    ],
)
def test_one_fault_one_line(words: list[str], text: str) -> None:
    (found,) = faults(*words)
    assert found.startswith(text)
    assert "\n" not in found


def test_what_is_missing_is_named() -> None:
    with pytest.raises(UsageError) as caught:
        parse_arguments(RlhfArguments, [], {})
    assert [fault.split()[0] for fault in caught.value.faults] == [
        "--model",
        "--dataset",
        "--rlhf_type",
        "--reward_funcs",
    ]


def test_a_fault_in_a_flag_hides_its_consequences() -> None:
    """A batch size that is no number must not be reported as a round that does not divide too."""
    with pytest.raises(UsageError) as caught:
        parse_arguments(RlhfArguments, [*BASE[:-1], "eight"], {})
    assert caught.value.faults == (
        "--per_device_train_batch_size must be a whole number, not 'eight'",
    )


def test_config_file_and_flags_that_win(tmp_path: Path) -> None:
    config = tmp_path / "grpo.yaml"
    config.write_text(
        "rlhf_type: grpo\nmodel: m\ndataset: d\nreward_funcs: [a, b]\nreward_weights: [1, 0.5]\n"
        "learning_rate: 1e-6\nper-device-train-batch-size: 8\nadd_version: false\ncolumns: {q: query}\n"
        "deepspeed: {zero_optimization: {stage: 2}}\n"
    )
    args = parse_arguments(RlhfArguments, [str(config), "--learning_rate", "2e-6"], {})
    assert args.learning_rate == 2e-6
    assert args.reward_funcs == ["a", "b"]
    assert args.reward_weights == [1.0, 0.5]
    assert args.add_version is False
    assert args.columns == {"q": "query"}
    assert json.loads(args.deepspeed or "") == {"zero_optimization": {"stage": 2}}


def test_faults_of_a_config_file_name_the_file(tmp_path: Path) -> None:
    config = tmp_path / "grpo.yaml"
    config.write_text(
        "lerning_rate: 1\nmax_steps: many\ndtype: float32\ntorch_dtype: float32\nsystem: true\n"
    )
    with pytest.raises(UsageError) as caught:
        parse_arguments(RlhfArguments, [str(config), *BASE], {})
    assert caught.value.faults == (
        f"{config}: unknown flag --lerning_rate: did you mean --learning_rate?",
        f"{config}: max_steps must be a whole number, not 'many'",
        f"{config}: torch_dtype is given twice, once as dtype: keep one",
        f"{config}: system must be text, not a bool: put the value in quotes",
    )
    config.write_text("reward_weights: 1 0.2\n")
    with pytest.raises(UsageError, match=r"reward_weights is a list, in YAML \[1, 0.2\]"):
        parse_arguments(RlhfArguments, [str(config), *BASE], {})
    config.write_text("a: [\n")
    with pytest.raises(UsageError, match=r"not valid YAML .* in line 2"):
        parse_arguments(RlhfArguments, [str(config), *BASE], {})
    config.write_text("beta: 0\nlora_rank: 4\nbeta: 0.1\n")
    with pytest.raises(UsageError, match="beta stands twice in line 3"):
        parse_arguments(RlhfArguments, [str(config), *BASE], {})
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    )
    many = ", ".join(f"x{number}: 1" for number in range(100))
    merged = f"a: &a {{{many}}}\nb: {{<<: [{', '.join(['*a'] * 1000)}]}}\n"
    for text in (bomb, "a: &a [*a]\n", "a: &a {<<: *a}\n", merged):
        config.write_text(text)
        with pytest.raises(UsageError, match="aliases make it endless, or more than 100,000"):
            parse_arguments(RlhfArguments, [str(config), *BASE], {})
    for text in ("a: " + "[" * 1500, "a: " + "[" * 1500 + "]" * 1500, "- " * 1500):
        config.write_text(text)
        with pytest.raises(UsageError, match=r"not valid YAML .*nested too deep"):
            parse_arguments(RlhfArguments, [str(config), *BASE], {})
    # a key may replace one that `<<` adds
    config.write_text("_: &a {beta: 0.1}\n<<: *a\nbeta: 0.2\n")
    with pytest.raises(UsageError, match="unknown flag --_"):
        parse_arguments(RlhfArguments, [str(config), *BASE], {})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "\tmodel: m\n",
            "not valid YAML (found character '\\t' that cannot start any token in line 1)",
        ),
        ("- model\n", "must hold lines like `learning_rate: 1e-6`"),
        (None, "No such file or directory"),
    ],
)
def test_a_config_that_cannot_be_read_is_the_one_fault(
    content: str | None, said: str, tmp_path: Path
) -> None:
    """What is missing then stands in the file, and is not asked for."""
    config = tmp_path / "grpo.yaml"
    if content is not None:
        config.write_text(content)
    with pytest.raises(UsageError) as caught:
        parse_arguments(RlhfArguments, [str(config)], {})
    assert caught.value.faults == (f"config file {config}: {said}",)
    with pytest.raises(UsageError) as caught:
        parse_arguments(RlhfArguments, ["grpo.yml.txt", "--betta", "1"], {})
    assert [text[:20] for text in caught.value.faults] == [
        "'grpo.yml.txt' stand",
        "unknown flag --betta",
    ]


def test_arguments_survive_the_way_to_the_worker() -> None:
    args = parse("--epsilon_high", "0.3", "--columns", '{"a": "b"}', "--report_to", "none")
    assert RlhfArguments.from_dict(json.loads(json.dumps(args.to_dict()))) == args
    with pytest.raises(TypeError, match="zzz"):
        RlhfArguments.from_dict({"zzz": 1})


def test_the_api_key_travels_in_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ["--use_vllm", "true", "--vllm_server_host", "h"]
    args = parse(*server, "--api_key", "secret")
    assert args.api_key == "secret"
    assert "secret" not in json.dumps(args.to_dict())
    assert "secret" not in repr(args)
    monkeypatch.setenv("SWIFT_API_KEY", "secret")
    assert RlhfArguments.from_dict(args.to_dict()) == args
    assert parse(*server, environ={"SWIFT_API_KEY": "other"}).api_key == "other"
    assert (
        parse_arguments(RolloutArguments, ["--model", "m"], {"SWIFT_API_KEY": "k"}).api_key == "k"
    )


def test_defaults_that_are_ms_swifts() -> None:
    args = parse_arguments(RlhfArguments, BASE, {})
    assert (args.learning_rate, args.warmup_ratio) == (1e-5, 0)
    assert args.num_generations_eval == args.num_generations == 8 and (args.top_p, args.top_k) == (
        1,
        -1,
    )
    for kind in ("lora", "qlora"):
        assert (
            parse_arguments(RlhfArguments, [*BASE, "--train_type", kind], {}).learning_rate == 1e-4
        )
    evaluated = ["--eval_steps", "5", "--num_generations", "4", "--eval_datasets", "math500"]
    args = parse_arguments(RlhfArguments, [*BASE, *evaluated], {})
    assert args.num_generations_eval == 4 and args.eval_tasks()[0].num_generations == 4
    args = parse_arguments(
        RlhfArguments,
        [*BASE, *evaluated, "--learning_rate", "0", "--num_generations_eval", "1"],
        {},
    )
    assert (args.learning_rate, args.num_generations_eval) == (0, 1)


def test_ms_swifts_words_for_values(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    for word, ours in (("true", "group"), ("False", "none"), ("batch", "batch")):
        config.write_text(f"scale_rewards: {word}\n")
        assert (
            parse_arguments(RlhfArguments, [*BASE, "--scale_rewards", word], {}).scale_rewards
            == ours
        )
        assert parse_arguments(RlhfArguments, [str(config), *BASE], {}).scale_rewards == ours


@pytest.mark.parametrize(
    ("words", "processes", "accumulation", "round_size", "line"),
    [
        (
            "",
            1,
            16,
            16,
            "--gradient_accumulation_steps 16: a micro-batch of 1 has no whole groups of 8",
        ),
        (
            "--num_generations 2 --steps_per_generation 8 --gradient_accumulation_steps 4",
            1,
            4,
            8,
            None,
        ),
        ("--num_generations 1 --advantage_estimator reinforce_plus_plus", 1, 1, 1, None),
    ],
)
def test_the_batch_where_the_flags_leave_it_open(
    words, processes, accumulation, round_size, line
) -> None:
    bare = ["--rlhf_type", "grpo", "--model", "m", "--dataset", "d", "--reward_funcs", "a"]
    args = parse_arguments(
        RlhfArguments, [*bare, *words.split()], {"NPROC_PER_NODE": str(processes)}
    )
    assert (args.gradient_accumulation_steps, args.generation_batch_size) == (
        accumulation,
        round_size,
    )
    plan = make_plan(args, processes, 100)
    assert plan.completions_per_round == round_size == plan.prompts_per_round * args.num_generations
    assert [one for one in args.about_flags if line is not None and one.startswith(line)] == list(
        args.chosen
    )


@pytest.mark.parametrize(
    ("estimator", "scale"),
    [
        ("grpo", "group"),
        ("rloo", "none"),
        ("reinforce_plus_plus", "batch"),
        ("reinforce_plus_plus_baseline", "batch"),
    ],
)
def test_the_scale_of_rewards_follows_the_estimator_unless_given(
    estimator: str, scale: str
) -> None:
    assert parse("--advantage_estimator", estimator).scale_rewards == scale
    assert (
        parse("--advantage_estimator", estimator, "--scale_rewards", "none").scale_rewards == "none"
    )
    gdpo = (
        "--advantage_estimator",
        estimator,
        "--multi_objective_aggregation",
        "normalize_then_sum",
    )
    assert parse(*gdpo).scale_rewards == "batch"
    spelled = parse(*gdpo[:2], "--scale_rewards", "gdpo")
    assert (spelled.scale_rewards, spelled.multi_objective_aggregation) == (
        "batch",
        "normalize_then_sum",
    )


def test_every_flag_of_ms_swift_has_one_meaning_and_none_is_a_typo() -> None:
    named = (Path(__file__).parent / "ms_swift_flags.txt").read_text().split()
    ours = {name for cls in (RlhfArguments, RolloutArguments) for name in spellings(cls)}
    assert len(named) > 500
    assert [name for name in named if name not in ours | meanings().keys()] == []
    assert (
        sorted(
            meanings().keys() & spellings(RlhfArguments).keys() & spellings(RolloutArguments).keys()
        )
        == []
    )
    assert [
        name
        for name, meaning in meanings().items()
        if not all(meaning.accepts([value]) for value in meaning.so)
    ] == []


def test_a_flag_that_is_always_so_is_accepted_at_that_value_and_listed(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("safe_serialization: true\nimage_size:\nlabel_smoothing: 0.0\n")
    args = parse_arguments(
        RlhfArguments, [str(config), *BASE, "--use-galore", "False", "--do_train"], {}
    )
    assert args.always_so == (
        "--use_galore False",
        "--do_train",
        f"{config}: safe_serialization true",
        f"{config}: label_smoothing 0.0",
    )
    assert list(args.about_flags) == [f"always so here: {', '.join(args.always_so)}"]
    assert "always_so" not in args.to_dict() and not list(parse().about_flags)
    assert faults("--use_galore", "false", "--do_predict", "yes", "--use_galore") == (
        "--use_galore must be false, not 'true': " + meanings()["use_galore"].reason,
        "--do_predict must be false, not 'yes': " + meanings()["do_predict"].reason,
    )


def test_torchruns_flags_stand_for_its_variables() -> None:
    args = parse_arguments(
        RlhfArguments,
        [*BASE, "--nproc_per_node=2", "--deepspeed", "zero2"],
        {"NPROC_PER_NODE": "4"},
    )
    assert args.process_variables == {"NPROC_PER_NODE": "2"} and args.generation_batch_size == 16
    assert faults("--nnodes", "2", "--deepspeed", "zero2") == (
        "NNODES > 1 needs MASTER_ADDR (and MASTER_PORT): the address of node 0",
    )
    with pytest.raises(
        UsageError, match="torchrun is not needed: call `swift rlhf` once per machine"
    ):
        parse_arguments(RlhfArguments, BASE, {"TORCHELASTIC_RUN_ID": "none"})


def test_a_flag_of_another_command_is_said_to_be_its() -> None:
    said = "--lora_rank is a flag of `swift rlhf`, not of `swift rollout`: leave it out"
    assert unknown_flag(RolloutArguments, "--lora_rank") == said


def test_every_flag_has_help_and_a_default_among_its_choices() -> None:
    for cls in (RlhfArguments, RolloutArguments):
        for spec in flag_specs(cls).values():
            assert spec.info.help, spec.name
            values = spec.default if spec.is_list else [spec.default]
            if spec.info.choices and spec.default is not None:
                assert set(values) <= set(spec.info.choices), spec.name


@given(st.lists(st.text(min_size=1, max_size=12), max_size=8))
def test_no_input_crashes_the_parser(words: list[str]) -> None:
    """Whatever is typed, the answer is arguments or a UsageError with one line a fault."""
    try:
        parse_arguments(RlhfArguments, [*BASE, *words], {})
    except UsageError as error:
        assert error.faults


def test_secrets_travel_in_the_environment_alone() -> None:
    words = ["--push_to_hub", "true", "--hub_model_id", "me/model", "--hub_token", "s3cret"]
    args = parse(*words)
    assert args.secrets == {"SWIFT_HUB_TOKEN": "s3cret"} and "s3cret" not in repr(args) + str(
        args.to_dict()
    )
    assert RlhfArguments.from_dict(args.to_dict()).hub_token is None
    assert without_secrets([*words, "--hub-token=s3cret", "--api_key", "s3cret"]) == [
        *(*words[:-1], "***", "--hub-token=***", "--api_key", "***")
    ]
