"""`swift replay`: recorded runs trained on again, bit for bit without a change, and what a change does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from pyarrow import parquet

from tests import forks
from tests.e2e.conftest import Run
from tests.e2e.live_run import flag, words_of
from tests.vision import write_tiny

HERE = Path(__file__).parent
RUN = {
    "log_tokens": "all",
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.2,
}


def replay(run: Path, folder: Path, processes: int | None = None, **flags) -> Run:
    """`swift replay run` into `folder`; what it prints is shown if a test fails."""
    words = [word for name, value in flags.items() for word in flag(name, value)]
    words = [
        "-m",
        "swift_r1",
        "replay",
        str(run),
        "--output_dir",
        str(folder),
        "--add_version",
        "false",
        *words,
    ]
    environ = {"OMP_NUM_THREADS": "1"} | (
        {} if processes is None else {"NPROC_PER_NODE": str(processes)}
    )
    done = forks.run(words, cwd=folder.parent, environ=environ, timeout=280)
    print(done.stdout, done.stderr)
    return Run(done.returncode, done.stderr, folder)


def weights(folder: Path, step: int, name: str = "model.safetensors") -> bytes:
    return (folder / f"checkpoint-{step}" / name).read_bytes()


def learned(run: Run) -> list[dict]:
    """What is logged, without times and what only a replay measures."""

    def same(name: str) -> bool:
        measured = name.startswith("rollout/") and name not in (
            "rollout/logp_diff",
            "rollout/weight_version",
        )
        return not measured and not name.startswith(("time/", "memory/")) and "second" not in name

    return [{name: value for name, value in line.items() if same(name)} for line in run.steps]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, tiny_model):
    """A run of three rounds of four optimizer steps, the last cut in two by --max_steps."""
    folder = tmp_path_factory.mktemp("recorded")
    return make(folder, tiny_model)


def make(folder: Path, model: Path, processes: int = 1, **flags) -> Run:
    values = {
        "lr_scheduler_type": [],
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_steps": 10,
        "save_steps": 3,
        "beta": 0.05,
    }
    words = words_of(model, folder / "run", **values | RUN | flags)
    environ = {"OMP_NUM_THREADS": "1", "NPROC_PER_NODE": str(processes)}
    done = forks.run(["-m", "swift_r1", "rlhf", *words], cwd=folder, environ=environ, timeout=280)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    return Run(done.returncode, done.stderr, folder / "run")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A run of two rounds, the last cut in two, whose prompts have images."""
    folder = tmp_path_factory.mktemp("seeing")
    return make(
        folder,
        write_tiny("qwen2_5_vl", folder / "model"),
        external_plugins=[HERE / "digits_plugin.py", HERE / "pictures_plugin.py"],
        dataset="pictures",
        use_vllm="false",
        freeze_vit="false",
        max_steps=6,
    )


@pytest.mark.long
def test_a_run_with_images_is_trained_on_again(seeing, tmp_path):
    again = replay(seeing.folder, tmp_path / "again")
    assert again.code == 0 and weights(again.folder, 6) == weights(seeing.folder, 6)
    assert again.lines("completions.jsonl") == seeing.lines("completions.jsonl")
    assert {len(row.get("images", [])) for row in again.lines("completions.jsonl")} == {0, 1, 2}


@pytest.mark.long
def test_a_replay_needs_the_images_as_they_were(seeing, tmp_path):
    image, *_ = next(row["images"] for row in seeing.lines("completions.jsonl") if "images" in row)
    path = Path(image["path"])
    content = path.read_bytes()
    path.write_bytes(b"another")
    try:
        again = replay(seeing.folder, tmp_path / "again")
    finally:
        path.write_bytes(content)
    assert again.code == 5 and f"the image {path} of a row has changed" in again.errors


def test_unchanged_flags_give_the_same_weights(recorded, tmp_path):
    again = replay(recorded.folder, tmp_path / "again")
    assert again.code == 0 and "the weights become those of the run" in again.errors
    for step in (3, 6, 10):
        assert weights(again.folder, step) == weights(recorded.folder, step)
    assert learned(again) == learned(recorded)
    assert again.lines("completions.jsonl") == recorded.lines("completions.jsonl")
    for step in range(1, 11):
        tables = [
            parquet.read_table(one.folder / "tokens" / f"step-{step:06}.parquet")
            for one in (again, recorded)
        ]
        assert tables[0] == tables[1]
    first, fourth = again.steps[0], again.steps[3]  # of the same round
    assert (first["rollout/ess_token"], first["rollout/ess_seq"]) == pytest.approx((1, 1), abs=1e-6)
    assert first["rollout/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert fourth["rollout/ess_token"] < first["rollout/ess_token"]
    content = json.loads((again.folder / "args.json").read_text())
    assert content["command"][:3] == ["swift", "replay", str(recorded.folder)]
    assert content["replay"]["run"] == str(recorded.folder)


def test_from_a_checkpoint_and_up_to_a_step(recorded, tmp_path):
    """Also from the middle of a round, and to another one; the learning rate is the run's."""
    for first, last in ((3, 6), (6, 9)):
        checkpoint = recorded.folder / f"checkpoint-{first}"
        part = replay(
            recorded.folder,
            tmp_path / f"{first}",
            resume_from_checkpoint=checkpoint,
            max_steps=last,
        )
        assert part.code == 0 and f"after checkpoint-{first}" in part.errors
        assert weights(part.folder, last) == weights(recorded.folder, last)
        assert learned(part) == learned(recorded)[first:last]


def test_changed_flags(recorded, tmp_path):
    """Steps are taken otherwise, and how far off-policy they are is measured."""
    changed = replay(
        recorded.folder, tmp_path / "rate", learning_rate=3e-3, loss_type="dr_grpo", epsilon=0.05
    )
    assert changed.code == 0 and "--learning_rate 0.0003 became 0.003" in changed.errors
    assert "off-policy" in changed.errors
    was, now = recorded.steps, changed.steps
    assert [line["reward"] for line in now] == [line["reward"] for line in was]
    assert [line["learning_rate"] for line in now] == pytest.approx(
        [10 * line["learning_rate"] for line in was]
    )
    assert now[0]["loss"] != was[0]["loss"]
    assert now[-1]["rollout/ess_seq"] < 0.99 and now[-1]["rollout/ratio_max"] > 1.05
    assert now[-1]["rollout/ess_seq"] <= now[0]["rollout/ess_seq"]
    # One step a round where there were four: another count of steps over the same rounds.
    more = {"num_iterations": 1, "per_device_train_batch_size": 16, "advantage_estimator": "rloo"}
    fewer = replay(recorded.folder, tmp_path / "fewer", **more)
    assert fewer.code == 0 and len(fewer.steps) == 3
    assert [line["reward"] for line in fewer.steps] == [was[step]["reward"] for step in (0, 4, 8)]


def test_rewards(recorded, tmp_path):
    """Recorded ones weighed otherwise; and scored anew, by the plugin or a built-in function."""
    twice = replay(recorded.folder, tmp_path / "twice", reward_weights=2, max_steps=2)
    anew = replay(
        recorded.folder, tmp_path / "anew", reward_funcs=["digits", "format"], max_steps=2
    )
    assert twice.code == anew.code == 0
    for was, one, two in zip(
        *(each.lines("completions.jsonl")[:16] for each in (recorded, twice, anew)), strict=True
    ):
        assert one["reward"] == 2 * was["reward"] and one["rewards/digits"] == was["rewards/digits"]
        assert two["rewards/digits"] == was["rewards/digits"] and two["rewards/format"] in (0, 1)
        assert was["start"] == one["start"] == two["start"]
    # The same functions may have become others.
    same = replay(recorded.folder, tmp_path / "same", reward_funcs="digits", max_steps=1)
    assert (
        same.code == 0 and "off-policy" in same.errors and "the weights become" not in same.errors
    )


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        pytest.param(
            2,
            {"per_device_train_batch_size": 4, "max_steps": 5, "deepspeed": "zero3"},
            marks=pytest.mark.long,
        ),
        (
            1,
            {
                "rlhf_type": "ppo",
                "steps_per_generation": [],
                "num_mini_batches": 2,
                "kl_coef": 0.1,
                "beta": [],
            },
        ),
        pytest.param(1, {"dynamic_sample": "true", "temperature": 0.2}, marks=pytest.mark.long),
    ],
    ids=["zero3", "ppo", "dynamic"],
)
def test_other_layouts(tmp_path, tiny_model, processes, flags):
    """As many processes as the run had, without being told; of the last round a part alone."""
    steps = flags.get("max_steps", 4)
    run = make(tmp_path, tiny_model, processes, **flags | {"max_steps": steps})
    again = replay(run.folder, tmp_path / "again")
    assert again.code == 0
    assert weights(again.folder, steps) == weights(run.folder, steps)


def test_a_run_of_several_turns(tmp_path, tiny_model):
    turns = {
        "external_plugins": HERE / "turns_plugin.py",
        "dataset": "starts#50",
        "reward_funcs": "seen",
    }
    turns |= {
        "multi_turn_scheduler": "again",
        "max_turns": 3,
        "max_completion_length": 6,
        "max_steps": 4,
    }
    run = make(tmp_path, tiny_model, **turns)
    again = replay(run.folder, tmp_path / "again")
    assert again.code == 0 and weights(again.folder, 4) == weights(run.folder, 4)
    assert again.lines("completions.jsonl") == run.lines("completions.jsonl")
    assert again.steps[0]["multi_turn/trained_tokens"] == run.steps[0]["multi_turn/trained_tokens"]
    refused = replay(run.folder, tmp_path / "anew", reward_funcs="seen")
    assert refused.code == 2 and "several turns" in refused.errors


@pytest.mark.long
def test_a_run_with_a_server(tmp_path, tiny_model, tiny_server):
    """Without the server. Completions of rounds ahead are of older weights."""
    server = {
        "use_vllm": "true",
        "vllm_server_base_url": tiny_server.url,
        "max_steps": 4,
        "learning_rate": 1e-3,
    }
    ahead = {"async_generate": "true", "max_staleness": 2, "steps_per_generation": 1}
    run = make(tmp_path, tiny_model, **server | ahead)
    tiny_server.kill()
    again = replay(run.folder, tmp_path / "again")
    assert again.code == 0 and weights(again.folder, 4) == weights(run.folder, 4)


def test_a_killed_run_is_replayed_up_to_its_last_step(recorded, tmp_path):
    folder = copied(recorded, tmp_path)
    (folder / "summary.json").unlink()
    for step in (8, 9, 10):
        (folder / "tokens" / f"step-{step:06}.parquet").unlink()
    (folder / "tokens" / ".writing-step-000008.parquet").write_bytes(b"PAR1")
    text = (folder / "completions.jsonl").read_bytes()
    (folder / "completions.jsonl").write_bytes(text[: text.index(b'\n{"step": 9') + 40])
    again = replay(folder, tmp_path / "again")
    # Step 8 goes over completions that the first pass recorded.
    assert again.code == 0 and again.steps[-1]["step"] == 8
    assert learned(again) == learned(recorded)[:8] and weights(again.folder, 6) == weights(
        recorded.folder, 6
    )


@pytest.mark.long
def test_a_killed_replay_goes_on(recorded, tmp_path):
    """It is resumed as a run is; the weights are no longer the recorded run's, which is no fault."""
    flags = {"learning_rate": 1e-3, "save_steps": 3}
    whole = replay(recorded.folder, tmp_path / "whole", **flags)
    part = tmp_path / "part"
    shutil.copytree(
        whole.folder,
        part,
        ignore=shutil.ignore_patterns("checkpoint-9", "checkpoint-10", "summary.json"),
    )
    resumed = replay(recorded.folder, part, resume_from_checkpoint="last", **flags)
    assert resumed.code == 0 and "resuming from" in resumed.errors
    assert weights(part, 10) == weights(whole.folder, 10) and learned(resumed) == learned(whole)


def copied(run: Run, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(
            run.folder, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoint-*")
        )
    )


def remove(name):
    return lambda folder: (
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    )


def without(column, step):
    def drop(folder):
        path = folder / "tokens" / f"step-{step:06}.parquet"
        parquet.write_table(parquet.read_table(path).drop_columns([column]), path)

    return drop


def sampled(folder):
    for path in (folder / "tokens").glob("step-*.parquet"):
        parquet.write_table(parquet.read_table(path).slice(0, 4), path)
    content = json.loads((folder / "args.json").read_text())
    content["args"]["log_tokens"] = "sample"
    (folder / "args.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "flags", "why"),
    [
        (remove("args.json"), {}, "args.json is missing"),
        (
            remove("tokens"),
            {},
            "has no token record (--log_tokens all): a run with --log_tokens all has one",
        ),
        (sampled, {}, "4 of the 8 completions of step 1 are recorded (--log_tokens sample)"),
        (
            remove("tokens/step-000001.parquet"),
            {},
            "step 1 is not in the token record: it was left out",
        ),
        (None, {"max_steps": 11}, "its record ends with step 10"),
        (
            remove("tokens/step-000010.parquet"),
            {"scale_rewards": "batch", "max_steps": 9},
            "need whole rounds of 4 steps, and the last one",
        ),
        (None, {"temperature": 0.5}, "--temperature is of what was sampled"),
        (None, {"eval_steps": 2}, "measure its checkpoints with `swift eval`"),
        (
            None,
            {"gradient_accumulation_steps": 4},
            "has 16 completions, and these flags make it 32",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(recorded, tmp_path, damage, flags, why):
    folder = copied(recorded, tmp_path)
    if damage is not None:
        damage(folder)
    refused = replay(folder, tmp_path / "again", **flags)
    assert refused.code == 2 and why in refused.errors and "Traceback" not in refused.errors
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (remove("completions.jsonl"), "No such file"),
        (
            lambda folder: (folder / "completions.jsonl").write_text('{"step": 1}\n'),
            "line 1 is damaged",
        ),
        (without("logps", 5), "its token record has no column logps"),
    ],
)
def test_what_is_found_only_when_it_is_read(recorded, tmp_path, damage, why):
    folder = copied(recorded, tmp_path)
    damage(folder)
    ended = replay(folder, tmp_path / "again")
    assert ended.code == 2 and why in ended.errors and "Traceback" not in ended.errors


def test_a_replay_does_not_go_on_in_the_recorded_run(recorded, tmp_path):
    """Which would remove what is to be replayed."""
    folder = tmp_path / "copy"
    shutil.copytree(
        recorded.folder,
        folder,
        ignore=shutil.ignore_patterns("checkpoint-6", "checkpoint-9", "*-10"),
    )
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    refused = replay(folder, folder, resume_from_checkpoint="last")
    assert refused.code == 2 and "is not a replay of" in refused.errors
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_another_model_is_refused(recorded, tmp_path, save_model, tiny_model_untied):
    """One of the same tokens by its log-probs; one of other tokens before it is loaded."""
    other = save_model(tmp_path / "other", seed=7)
    refused = replay(recorded.folder, tmp_path / "again", model=other)
    assert refused.code == 2 and "is not the model of the record" in refused.errors
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {
        f"{key}!": number for key, number in tokenizer["model"]["vocab"].items()
    }
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused = replay(recorded.folder, tmp_path / "more", model=other)
    assert refused.code == 2 and "has another tokenizer" in refused.errors


def test_a_policy_that_does_not_move_is_said_to_rise_nowhere(recorded: Run, tmp_path: Path) -> None:
    again = replay(recorded.folder, tmp_path / "again", learning_rate=0)
    assert again.code == 0
    assert "policy: moved 0; swift why" in again.errors
    steps = re.findall(r"^step .*", again.errors, re.MULTILINE)
    assert len(steps) == 10 and all(" · recorded reward " in line for line in steps)
    assert not re.search(r"reward \d\.\d+ \([+-]", again.errors) and " · moved 0 · " in steps[-1]
    resumed = replay(  # it goes on from its own checkpoint
        recorded.folder,
        tmp_path / "again",
        learning_rate=0,
        resume_from_checkpoint=tmp_path / "again" / "checkpoint-9",
    )
    assert resumed.code == 0 and "policy: moved 0; swift why" in resumed.errors
