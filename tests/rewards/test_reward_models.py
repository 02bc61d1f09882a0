"""Reward models (`--reward_model`): what plugins are built with and called with, and what becomes of their answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from swift_r1.errors import UsageError
from swift_r1.flags.reward import RewardArguments, RewardModel
from swift_r1.launch.checks.names import reward_model_faults
from swift_r1.plugins import load_plugins
from swift_r1.plugins.compat import NotHere
from swift_r1.plugins.protocol import RequestConfig
from swift_r1.record.episodes import EpisodeCall, steps_of
from swift_r1.rewards.types import RewardBatch, RewardColumn
from swift_r1.rollout.reward_models import ModelReward, rewards_and_models
from swift_r1.rollout.rm_plugins import GenRMPlugin, RewardTemplate, TransformersEngine
from tests.conftest import ServerProcess, wait_until_serving
from tests.ms_swift.scripts import NO_SOURCE, SOURCES
from tests.rewards.reward_model_makers import save_scorer, save_speaker

TASK = {"role": "user", "content": "Count to three."}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_scorer(tmp_path_factory.mktemp("models") / "scorer")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(says: str) -> Path:
        if says not in made:
            made[says] = save_speaker(tmp_path_factory.mktemp("models") / "speaker", says)
        return made[says]

    return make


def arguments(
    models: list[Path], plugins: Sequence[str] = (), isolation: str = "process", **more: Any
) -> Any:
    own = RewardArguments(
        reward_model=[str(one) for one in models], reward_model_plugin=list(plugins), **more
    )
    args = SimpleNamespace(reward_models=own.reward_models, torch_dtype=None, offload_model=True)
    args.reward_num_workers, args.reward_memory_limit, args.reward_env, args.reward_timeout = (
        1,
        4.0,
        [],
        20.0,
    )
    args.reward_isolation, args.external_plugins = isolation, own.external_plugins
    return args


def score(
    args: Any, names: list[str], completions: list[str], size: int, **columns: list[Any]
) -> list[RewardColumn]:
    messages = [[TASK, {"role": "assistant", "content": text}] for text in completions]
    batch = RewardBatch(completions, {"messages": messages, **columns}, size, {"global_step": 1})
    load = partial(load_plugins, args.external_plugins)
    with rewards_and_models(args, names, load, None, torch.device("cpu")) as caller:
        opened = caller.open(batch.trainer_state)
        opened.add(0, batch)
        return opened.result()[1]


def scores(folder: Path, completions: list[str]) -> list[float]:
    """One by one, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in completions:
        ids = tokenizer.apply_chat_template(
            [TASK, {"role": "assistant", "content": text}], return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            found.append(model(**ids).logits.item())
    return found


@pytest.mark.parametrize("isolation", ["process", "inline"])
def test_functions_and_models_in_one_batch(scorer: Path, isolation: str) -> None:
    completions = ["1 2 3", "1", "<think>" + "so " * 40, "3 2 1", "", "two"]
    args = arguments([scorer], isolation=isolation)
    right, own = score(args, ["format", "scorer"], completions, 2)
    assert right.values == (0.0,) * 6
    assert own.name == "scorer" and own.values == pytest.approx(
        scores(scorer, completions), abs=1e-5
    )
    assert not own.invalid


def test_names_of_models_are_different() -> None:
    models = RewardArguments(reward_model=["x/a", "y/a", "z/a_2", "a/"]).reward_models
    assert [one.name for one in models] == ["a", "a_2", "a_2_2", "a_3"]


def test_a_model_alone_and_two_of_one_name(scorer: Path, tmp_path: Path) -> None:
    other = save_scorer(tmp_path / "scorer", seed=1)
    args = arguments([scorer, other])
    assert [one.name for one in args.reward_models] == ["scorer", "scorer_2"]
    first, second = score(args, ["scorer", "scorer_2"], ["a", "b"], 2)
    assert first.values == pytest.approx(scores(scorer, ["a", "b"]), abs=1e-5)
    assert second.values == pytest.approx(scores(other, ["a", "b"]), abs=1e-5)


def test_a_language_model_is_asked(speaker: Callable[[str], Path]) -> None:
    args = arguments([speaker("Reward: 1")], ["genrm"])
    (column,) = score(args, [args.reward_models[0].name], ["a", "b", "c", "d"], 2)
    assert column.values == (1.0,) * 4
    args = arguments([speaker("Rewa")], ["genrm"])
    (column,) = score(args, [args.reward_models[0].name], ["a", "b"], 2)
    assert [bad.index for bad in column.invalid] == [0, 1]
    assert (
        column.invalid[0].cause
        == "ValueError: the reward model's answer has no `Reward:` and a number: 'Rewa'"
    )
    assert column.invalid[0].kind == "exception"


def test_what_an_answer_says() -> None:
    found = {
        "Reward: 0.85": 0.85,
        "so\nReward:-1e-2.": -0.01,
        "Reward: .5 of 1": 0.5,
        "Reward: 1.2.3": None,
        "Reward: 7x": None,
        "Reward: 1e999": None,
        "reward 1": None,
    }
    assert {text: GenRMPlugin.extract_reward(text) for text in found} == found
    turns = [
        {"role": "user", "content": "q"},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "a"},
    ]
    assert GenRMPlugin.messages_to_query(turns) == "User: q\nAssistant: a"


def test_a_language_model_reads_the_whole_episode() -> None:
    calls = [
        EpisodeCall("new", None, 0, 1, 3, 2, "stop"),
        EpisodeCall("new", None, 1, 1, 3, 2, "stop"),
    ]
    talks = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": q.upper()}] for q in "ab"
    ]
    plugin = GenRMPlugin(None, RewardTemplate(None, 0))
    row = {"messages": talks[1], "episode_steps": steps_of(calls, talks)}
    [asked] = plugin.prepare_rm_inputs([row])
    note = "Note: turn 2 begins another conversation"
    assert (
        asked["messages"][1]["content"] == f"User: a\nAssistant: A\n{note}\nUser: b\nAssistant: B"
    )
    plugin.longest_episode = 20
    [asked] = plugin.prepare_rm_inputs([row])
    assert asked["messages"][1]["content"].startswith("User: a\nAs\n[... ")
    [asked] = plugin.prepare_rm_inputs([{"messages": talks[1]}])
    assert asked["messages"][1]["content"] == "User: b\nAssistant: B"


def test_the_engine_of_plugins(speaker: Callable[[str], Path], tiny_model: Path) -> None:
    reward = ModelReward(
        RewardModel("x", str(tiny_model), "genrm", None, None), None, torch.device("cpu"), True
    )
    engine, asked = reward.plugin.engine, [{"messages": [TASK]}, {"messages": [TASK]}]
    config = RequestConfig(max_tokens=8, temperature=1.0, n=3)
    first, again = engine.infer(asked, config, use_tqdm=False)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1 and texts == [choice.message.content for choice in again.choices]
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert {choice.finish_reason for choice in first.choices} <= {"stop", "length"}
    other = engine.infer(asked[:1], RequestConfig(max_tokens=8, temperature=1.0, n=3, seed=1))[0]
    assert texts != [choice.message.content for choice in other.choices]
    with pytest.raises(ValueError, match="fills the reward model's length"):
        engine.infer([{"messages": [{"role": "user", "content": "x" * 1100}]}])
    with pytest.raises(NotHere, match="another model is behind --judge"):
        TransformersEngine("model")


PLUGIN = """
from swift.rewards import rm_plugins
from swift.rewards.rm_plugin import DefaultRMPlugin
class Careless(DefaultRMPlugin):
    def __call__(self, inputs, solution, trainer_state, **kwargs):
        assert [one["solution"] for one in inputs] == solution and trainer_state.global_step == 1
        values = super().__call__(inputs)
        if "bad" in [one["messages"][-1]["content"] for one in inputs]:
            raise KeyError("bad")
        return [None if one["solution"] == "none" else value for one, value in zip(inputs, values)]
rm_plugins["careless"] = Careless
"""


def test_a_plugins_own_fault_is_one_completions(scorer: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "careless.py"
    plugin.write_text(PLUGIN)
    args = arguments([scorer], ["careless"], external_plugins=[str(plugin)])
    completions = ["a", "b", "bad", "c"]
    (column,) = score(args, ["scorer"], completions, 2, solution=["s", "none", "s", "s"])
    wanted = scores(scorer, completions)
    assert column.values[0] == pytest.approx(wanted[0], abs=1e-5) and column.values[1] is None
    assert column.values[3] == pytest.approx(wanted[3], abs=1e-5)
    assert [bad.index for bad in column.invalid] == [2] and column.invalid[0].cause.startswith(
        "KeyError: 'bad' ("
    )


def test_adapters_bring_their_head(tiny_model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    adapted = get_peft_model(model, LoraConfig(r=2, task_type="SEQ_CLS", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapters")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "merged")
    args = arguments([tiny_model], reward_adapters=[str(tmp_path / "adapters")])
    (column,) = score(args, [tiny_model.name], ["a", "bc"], 2)
    assert column.values == pytest.approx(scores(tmp_path / "merged", ["a", "bc"]), abs=1e-5)


def test_faults_that_names_and_configs_tell(scorer: Path, tiny_model: Path, tmp_path: Path) -> None:
    def faults(*args: Any, **more: Any) -> list[str]:
        return reward_model_faults(arguments(*args, **more))

    assert faults([scorer, tiny_model], ["default", "genrm"]) == []
    assert (
        "there is no reward model plugin mine: known are default, genrm"
        in faults([scorer], ["mine"])[0]
    )
    assert "did you mean genrm?" in faults([tiny_model], ["genrn"])[0]
    assert (
        "has no classification head: --reward_model_plugin genrm asks it" in faults([tiny_model])[0]
    )
    assert "cannot be asked: leave --reward_model_plugin out" in faults([scorer], ["genrm"])[0]
    assert "--reward_template qwen" in faults([scorer], reward_template=["qwen"])[0]
    assert (
        "a reward function has the name format too" in faults([save_scorer(tmp_path / "format")])[0]
    )
    about = RewardModel("x", str(tmp_path), "default", None, None)
    with pytest.raises(UsageError, match="cannot load --reward_model"):
        ModelReward(about, None, torch.device("cpu"), False)


@pytest.mark.skipif(not SOURCES, reason=NO_SOURCE)
@pytest.mark.parametrize("source", SOURCES)
def test_the_plugins_of_ms_swift(
    source: Path, scorer: Path, speaker: Callable[[str], Path]
) -> None:
    plugin = source / "examples" / "train" / "grpo" / "plugin" / "plugin.py"
    models, plugins = (
        [scorer, speaker("[YES]"), speaker("[NO]")],
        ["my_rmplugin", "qwenlong", "qwenlong"],
    )
    args = arguments(models, plugins, external_plugins=[str(plugin)])
    question = "<text>A story.</text> Who? Format your response as follows: ..."
    asked = {"role": "user", "content": question}
    messages = [[asked, {"role": "assistant", "content": text}] for text in ("he", "she")]
    columns = {"messages": messages, "reward_model": [{"ground_truth": "he"}] * 2}
    batch = RewardBatch(["he", "she"], columns, 2, {"global_step": 0})
    names = [one.name for one in args.reward_models]
    with rewards_and_models(
        args, names, partial(load_plugins, [str(plugin)]), None, torch.device("cpu")
    ) as caller:
        own, yes, no = caller.score(batch)
    assert not own.invalid and all(
        isinstance(value, float) and math.isfinite(value) for value in own.values
    )
    assert (yes.values, no.values) == ((1.0, 1.0), (0.0, 0.0))


@pytest.mark.skipif(not SOURCES, reason=NO_SOURCE)
@pytest.mark.parametrize("source", SOURCES)
def test_the_served_judge_of_ms_swift(
    source: Path,
    speaker: Callable[[str], Path],
    start_tiny: Callable[..., ServerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = source / "examples" / "train" / "grpo" / "plugin" / "plugin.py"
    server = start_tiny(speaker("So 7"), max_model_len=4096)  # it asks for 2,048 tokens
    wait_until_serving(server)
    monkeypatch.setenv("GENRM_API_BASE", f"{server.url}/v1")
    args = arguments([], external_plugins=[str(plugin)])
    (column,) = score(args, ["async_genrm"], ["a", "b", "c", "d"], 2)
    assert column.values == pytest.approx((0.7,) * 4)
