"""`swift check` through the real command: what it finds, its JSON and its exit code; and the start of `swift rlhf`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forks

REPO = Path(__file__).resolve().parents[2]
COUNTDOWN = str(REPO / "plugins" / "countdown.py")

PLUGIN = '''
import random, re
from swift.dataset import DatasetMeta, ResponsePreprocessor, register_dataset
from swift.rewards import ORM, orms
from swift.rollout import MultiTurnScheduler, multi_turns

print("noise while it loads")


def load():
    yield {"question": "1 + 1?", "solution": "2"}
    yield {"solution": "3"}
    yield {"question": "2 + 2?", "solution": "4"}


def gold(row):
    return f"<answer>{row['solution']}</answer>"


class Right(ORM):
    """1 if right"""

    def __init__(self, args=None, **kwargs):
        assert args.temperature == 1.0 and args.cosine_max_len == args.max_completion_length == 512

    def __call__(self, completions, solution, **kwargs):
        print("noise in a call")
        assert len(completions) > 1
        found = [re.findall(r"<answer>(.*?)</answer>", text)[:1] for text in completions]
        return [float(one == [wanted]) for one, wanted in zip(found, solution)]


def evaluates(completions, solution, **kwargs):
    values = []
    for text, wanted in zip(completions, solution):
        found = re.search("<answer>(.*?)</answer>", text)
        try:
            values.append(float(eval(found.group(1)) == int(wanted)))
        except Exception:
            values.append(0.0)
    return values


def no_empty(completions, **kwargs):
    return [float("nan") if not text else 1.0 for text in completions]


def raises(completions, **kwargs):
    return [1 / 0 for text in completions]


orms |= {
    "right": Right,
    "evaluates": evaluates,
    "same": lambda completions, **kwargs: [1.0] * len(completions),
    "no_empty": no_empty,
    "raises": raises,
    "one_value": lambda completions, **kwargs: 1.0,
    "moody": lambda completions, **kwargs: [random.random() for _ in completions],
    "silent": lambda completions, **kwargs: [None] * len(completions),
    "needs": lambda completions, colour, **kwargs: [1.0] * len(completions),
}
register_dataset(DatasetMeta(dataset_name="sums", loader=load, preprocess_func=ResponsePreprocessor()))
multi_turns["again"] = MultiTurnScheduler
'''
SAMPLERS = '''
from swift_r1 import Sampler, samplers


class First(Sampler):
    """The first rows, for ever"""

    def next(self, count):
        return list(range(count))


class Short(First):
    def next(self, count):
        return [0]


class Forgets(First):
    """Knows after a resume nothing of what it was told"""

    told = 0

    def next(self, count):
        return [self.told] * count

    def tell(self, outcomes):
        self.told += 1


samplers |= {"first": First, "short": Short, "forgets": Forgets}
samplers |= {"far": type("Far", (First,), {"next": lambda self, count: [10**6] * count})}
samplers |= {"text": type("Text", (First,), {"next": lambda self, count: ["1"] * count})}
samplers |= {"odd": type("Odd", (First,), {"state_dict": lambda self: {"seen": {1}}})}
samplers |= {"raises": type("Raises", (First,), {"tell": lambda self, outcomes: 1 / 0})}
samplers |= {"unbuilt": type("Unbuilt", (), {}), "other": lambda rows, args: rows}
samplers |= {"half": type("Half", (First,), {"__init__": lambda self, rows, args: None})}
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    return path


def swift(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return forks.run(["-m", "swift_r1", *words], cwd=cwd, timeout=120)


def check(
    cwd: Path, *words: str, code: int, plugins: Sequence[str] = ("plugin.py",)
) -> dict[str, Any]:
    given = ["--external_plugins", *plugins] if plugins else []
    done = swift("check", *given, "--json", "--reward_num_workers", "1", *words, cwd=cwd)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert found["ok"] is (code == 0)
    return found


def test_a_good_plugin(plugin: Path) -> None:
    found = check(plugin.parent, "--dataset", "sums", "--reward_funcs", "right", code=0)
    (data,) = found["datasets"]
    assert (data["name"], data["ok"], data["rows"], data["columns"]) == (
        "sums",
        True,
        2,
        ["question", "solution"],
    )
    assert data["prompt"] == "[user] 1 + 1?"
    assert "no prompt" in data["problems"][0]
    (reward,) = found["rewards"]
    assert (reward["name"], reward["ok"], reward["problems"], reward["tells_right"]) == (
        "right",
        True,
        [],
        True,
    )
    assert reward["values"]["right"] == [1.0, 1.0]  # from the plugin's gold(row)
    assert found["right"] == "<answer>2</answer>"
    assert {"wrong", "empty", "long", "garbage", "9**9**9", "brackets"} < set(reward["values"])
    assert reward["values"]["wrong"] == [0.0, 0.0]
    assert 0 < reward["milliseconds"] < 1000
    assert found["plugins"][0]["schedulers"] == ["again"]


@pytest.mark.long
def test_each_task_of_a_mixture(plugin: Path) -> None:
    tasks = {
        "good": {"dataset": "sums", "reward_funcs": "right"},
        "bad": {"dataset": "sums", "reward_funcs": ["right", "rihgt"], "prompts": 2},
    }
    tasks["calls"] = {"dataset": "sums", "reward_funcs": "right", "tools": "add", "max_turns": 2}
    (plugin.parent / "tasks.yaml").write_text(json.dumps(tasks))
    (plugin.parent / "adds.py").write_text(
        "from swift_r1 import tools\n\ndef add(a: int):\n    'Adds.'\n    return a + 1\n\ntools['add'] = add\n"
    )
    found = check(
        plugin.parent, "--mixture", "tasks.yaml", code=2, plugins=("plugin.py", "adds.py")
    )["tasks"]
    assert {name: len(one["tools"]) for name, one in found.items()} == {
        "good": 0,
        "bad": 0,
        "calls": 1,
    }
    assert found["good"]["ok"] and found["good"]["rewards"][0]["tells_right"]
    assert [data["prompt"] for data in found["bad"]["datasets"]] == ["[user] 1 + 1?"]
    (fault,) = found["bad"]["faults"]
    assert fault.startswith(
        "--reward_funcs: there is no reward function rihgt: did you mean right?"
    )


@pytest.mark.long
def test_samplers(plugin: Path) -> None:
    good, bad = SAMPLERS.split("samplers |= ", 1)
    (plugin.parent / "good.py").write_text(good + 'samplers["first"] = First\n')
    (plugin.parent / "bad.py").write_text(good + "samplers |= " + bad)
    data = ("--dataset", "sums", "--reward_funcs", "right")
    found = check(plugin.parent, *data, code=0, plugins=("plugin.py", "good.py"))
    assert found["plugins"][1]["samplers"] == ["first"]
    faults = check(plugin.parent, *data, code=2, plugins=("plugin.py", "bad.py"))["faults"]
    for fault, beginning in zip(sorted(faults), sorted(FAULTS), strict=True):
        assert fault.startswith(beginning)
    (fault,) = check(plugin.parent, *data, "--prompt_sampler", "difficult", code=2)["faults"]
    assert fault.startswith(
        "--prompt_sampler: there is no sampler difficult: did you mean difficulty?"
    )
    check(plugin.parent, *data, "--prompt_sampler", "difficulty", code=0)


FAULTS = (
    "--prompt_sampler: Short.next failed: it returned 1 rows, 8 were asked for",
    "--prompt_sampler: Far.next failed: it returned row 1000000, and there are rows 0 to 99",
    "--prompt_sampler: Text.next failed: it returned row '1', and there are rows 0 to 99",
    "--prompt_sampler: Odd.state_dict failed: TypeError: Object of type set is not JSON serializable (",
    "--prompt_sampler: Raises.tell failed: ZeroDivisionError: division by zero (",
    "--prompt_sampler unbuilt cannot be constructed: TypeError: Unbuilt() takes no arguments (",
    "--prompt_sampler other is a list, which does not derive from swift_r1.Sampler",
    "--prompt_sampler half: Half.__init__ must call super().__init__(rows, args)",
    "--prompt_sampler forgets chooses other rows when it is run again or resumed: state_dict must have all",
)


def test_the_count_of_rows_left_out(plugin: Path) -> None:
    rows = [{"query": "1 + 1?", "solution": "2"}, *[{"solution": "2"}] * 5]
    (plugin.parent / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data,) = check(plugin.parent, "--dataset", "mixed.jsonl", "--reward_funcs", "right", code=0)[
        "datasets"
    ]
    *examples, count = data["problems"]
    assert [example.split(":")[2] for example in examples] == ["2", "3", "4"]
    assert count == "5 of the first 6 rows are left out"


@pytest.mark.parametrize(
    "columns", [[], ["--columns", '{"answer": "answer"}'], ["--columns", '{"answer": "gold"}']]
)
@pytest.mark.long
def test_a_column_reaches_rewards_under_its_own_name(plugin: Path, columns: list[str]) -> None:
    plugin.write_text(
        "from swift_r1 import orms\n"
        "def right(completions, answer, **kwargs):\n"
        "    return [float(text == wanted) for text, wanted in zip(completions, answer)]\n"
        'orms["right"] = right\n'
    )
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(200)]
    (plugin.parent / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--dataset", "sums.jsonl", "--gold", "{answer}", *columns)
    (reward,) = check(plugin.parent, *words, code=0)["rewards"]
    assert reward["tells_right"]
    del rows[150]["answer"]
    (plugin.parent / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fault = "--reward_funcs right needs the column answer, which the row sums:150 lacks (all rows have question)"
    assert check(plugin.parent, *words, code=2)["faults"] == [f"{fault}; --columns renames"]
    run = ("rlhf", "--rlhf_type", "grpo", "--model", "./gone", "--external_plugins", "plugin.py")
    assert (
        fault
        in swift(*run, *words[:2], *columns, "--reward_funcs", "right", cwd=plugin.parent).stderr
    )


def test_what_each_broken_reward_is_told(plugin: Path) -> None:
    names = ["right", "evaluates", "same", "no_empty", "raises", "one_value", "moody", "silent"]
    found = check(plugin.parent, "--dataset", "sums", "--reward_funcs", *names, code=2)
    rewards = {reward["name"]: reward for reward in found["rewards"]}
    assert list(rewards) == names
    said = {name: "\n".join(reward["problems"]) for name, reward in rewards.items()}
    assert [name for name in names if not rewards[name]["ok"]] == [
        "no_empty",
        "raises",
        "one_value",
    ]
    assert said["right"] == ""
    assert said["evaluates"] == "9**9**9 (hostile): no answer within 1 s, worker killed"
    assert rewards["evaluates"]["values"]["9**9**9"] == ["invalid"]
    better = " (made up; a method wrong(row) of the reward gives a better one)"
    assert said["same"] == (
        "does not give a right answer more than a wrong one in 2 of 2 rows, the first is sums:0: "
        "right '<answer>2</answer>', wrong '<answer>3</answer>'" + better
    )
    assert "empty: nan is not a finite number" in said["no_empty"]
    assert rewards["no_empty"]["values"]["empty"] == ["invalid", "invalid"]
    assert "every completion: row sums:0: ZeroDivisionError" in said["raises"]
    assert "returned one value (1.0) for 6 completions" in said["one_value"]
    assert "not deterministic" in said["moody"]
    assert "no opinion on any completion" in said["silent"]
    assert rewards["silent"]["values"]["right"] == [None, None]


JUDGES = """
import sqlite3
from swift_r1 import orms


def result(query):
    table = sqlite3.connect(":memory:")
    table.executescript("CREATE TABLE t (n INTEGER); INSERT INTO t VALUES (1), (2), (3);")
    try:
        return table.execute(query).fetchall()
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return None


def near(completions, solution, **kwargs):
    answers = [text.removeprefix("<answer>").removesuffix("</answer>") for text in completions]
    return [
        float(one.isdecimal() and abs(int(one) - int(right)) <= 5)
        for one, right in zip(answers, solution)
    ]


def runs(completions, query, **kwargs):
    return [float(result(text) == result(right)) for text, right in zip(completions, query)]


class Own:
    def __call__(self, completions, solution, **kwargs):
        return near(completions, solution)

    def wrong(self, row):
        return f"<answer>{int(row['solution']) + self.far}</answer>"


class Far(Own):
    far = 6


class TooNear(Own):
    far = 5


class Fails(Own):
    far = None


class NoText(Own):
    def wrong(self, row):
        return 6


class Right(Own):
    far = 0


orms |= {"near": near, "runs": runs, "far": Far}
orms |= {"too_near": TooNear, "fails": Fails, "no_text": NoText, "really_right": Right}
"""


@pytest.fixture
def judges(tmp_path: Path) -> Path:
    (tmp_path / "plugin.py").write_text(JUDGES)
    rows = [
        {"question": "1?", "solution": "7", "query": "SELECT n FROM t LIMIT 10"},
        {"question": "2?", "solution": "9", "query": "SELECT max(n) - 1 FROM t WHERE n < 9"},
    ]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.long
def test_a_made_up_wrong_answer_that_is_right_is_no_fault(judges: Path) -> None:
    """With a tolerance each number plus one is right, and so is another row's; a larger LIMIT gives the same rows."""
    words = ("--dataset", "sums.jsonl", "--reward_funcs", "near", "--gold")
    (near,) = check(judges, *words, "<answer>{solution}</answer>", code=0)["rewards"]
    assert near["tells_right"] is True
    assert near["values"]["wrong"] == near["values"]["another row's"] == [1.0, 1.0]
    (said,) = near["problems"]
    assert said.startswith(
        "does not give a right answer more than a wrong one in 2 of 2 rows, the first is sums:0: "
        "right '<answer>7</answer>', wrong '<answer>8</answer>' (made up; "
    )
    words = ("--dataset", "sums.jsonl", "--reward_funcs", "runs", "--gold", "{query}")
    (runs,) = check(judges, *words, code=0)["rewards"]
    assert runs["tells_right"] is True
    assert runs["values"]["wrong"] == [1.0, 0.0]
    assert "in 1 of 2 rows, the first is sums:0: right 'SELECT n FROM t LIMIT 10'" in str(runs)


@pytest.mark.long
def test_a_reward_gives_its_own_wrong_answer(judges: Path) -> None:
    words = ("--dataset", "sums.jsonl", "--gold", "<answer>{solution}</answer>", "--reward_funcs")
    far, near = check(judges, *words, "far", "near", code=0)["rewards"]
    assert far["problems"] == [] and far["tells_right"] is True
    assert far["values"]["wrong of far"] == near["values"]["wrong of far"] == [0.0, 0.0]
    found = check(judges, *words, "too_near", code=2)
    (reward,) = found["rewards"]
    assert reward["tells_right"] is False and "wrong '<answer>12</answer>'" in str(reward)
    for name, said in (
        ("fails", "fails: TypeError: unsupported operand"),
        ("no_text", "returned an int, not the text of a completion"),
        ("really_right", "returned the right completion of row sums:0"),
    ):
        (fault,) = check(judges, *words, name, code=2)["faults"]
        assert fault.startswith(f"reward {name}: its wrong(row) {said}")


def test_gold_on_the_command_line_and_nothing_to_learn_from(plugin: Path) -> None:
    words = ("--dataset", "sums", "--reward_funcs", "right", "--gold")
    # other braces stay
    found = check(plugin.parent, *words, "<answer>{{solution}}</answer>", code=2)
    assert found["rewards"][0]["values"]["right"] == [0.0] * 2
    assert found["faults"] == [
        "no reward gives the right answer more than a wrong one: there is nothing to learn from"
    ]
    found = check(plugin.parent, *words, "{ {x y} <answer>{solution}</answer>", code=0)
    assert found["rewards"][0]["values"]["right"] == [1.0] * 2
    (fault,) = check(plugin.parent, *words, "{solution[0]}", code=2)["faults"]
    assert fault == "--gold '{solution[0]}': only a whole column can be filled in, {solution}"
    found = check(plugin.parent, *words, "<answer>{answer}</answer>", code=2)
    assert found["faults"] == [
        "--gold names the column answer, and the data has question, solution"
    ]


@pytest.mark.long
def test_rewards_see_what_the_prompt_begins(plugin: Path, thinking_base: Path) -> None:
    """The template opens `<think>`, so a right completion need not; one that does is as it is."""
    words = (
        "--dataset",
        "sums",
        "--reward_funcs",
        "right",
        "format",
        "--model",
        str(thinking_base),
        "--gold",
    )
    for gold in (
        "yes</think>\n<answer>{solution}</answer>",
        "<think>yes</think>\n<answer>{solution}</answer>",
    ):
        right, form = check(plugin.parent, *words, gold, code=0)["rewards"]
        assert right["values"]["right"] == form["values"]["right"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ["--reward_funcs", "rigth"],
            "--reward_funcs: there is no reward function rigth: did you mean right?",
        ),
        (["--dataset", "sum"], "unknown dataset sum: "),
        (
            ["--dataset", "sums", "--reward_funcs", "needs"],
            "--reward_funcs needs needs the column colour",
        ),
        (
            ["--reward_funcs", "right"],
            "--reward_funcs right needs the column solution, which the data lacks (it has none)",
        ),
    ],
)
def test_faults(plugin: Path, words: list[str], fault: str) -> None:
    found = check(plugin.parent, *words, code=2)
    assert found["faults"][0].startswith(fault)


def test_a_plugin_that_does_not_load_is_json_too(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("1 / 0\n")
    assert check(tmp_path, code=2)["faults"] == [
        "plugin plugin.py:1: ZeroDivisionError: division by zero"
    ]


def test_the_table_for_people_and_a_pasted_command(plugin: Path) -> None:
    words = [
        "--rlhf_type",
        "grpo",
        "--external_plugins",
        "plugin.py",
        "--dataset",
        "sums",
        "--learning_rate",
        "1e-6",
    ]
    done = swift("check", *words, "--reward_funcs", "right", "same", cwd=plugin.parent)
    assert done.returncode == 0, done.stderr
    assert "noise" not in done.stdout
    for part in (
        "rewards right, evaluates",
        "[user] 1 + 1?",
        "same: does not give a right answer",
        "all good",
    ):
        assert part in done.stdout
    assert swift("check", "--lerning_rate", "1", cwd=plugin.parent).returncode == 2


def test_the_prompt_as_the_model_sees_it(plugin: Path) -> None:
    """With a tokenizer made here; a long line stays one line, and what looks like markup stays."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    tokenizer.chat_template = (
        "{% for m in messages %}[bold]{{ m.role }} : {{ m.content }}{% endfor %} :smile: go"
    )
    tokenizer.save_pretrained(plugin.parent / "model")
    LlamaConfig(max_position_embeddings=600).save_pretrained(plugin.parent / "model")
    words = (
        "--dataset",
        "sums",
        "--reward_funcs",
        "right",
        "--model",
        "model",
        "--system",
        "word " * 60,
    )
    (data,) = check(plugin.parent, *words, code=0)["datasets"]
    prompt = "[bold]system : " + "word " * 60 + "[bold]user : 1 + 1? :smile: go"
    assert data["prompt"] == prompt
    assert data["prompt_tokens"] == len(prompt.split())
    done = swift("check", "--external_plugins", "plugin.py", *words, cwd=plugin.parent)
    assert prompt in done.stdout.splitlines()
    found = check(plugin.parent, *words, "--max_completion_length", "532", code=2)["datasets"][0]
    assert (
        not found["ok"]
        and "2 of 2 prompts left out: longer than 68 tokens" in found["problems"][-1]
    )
    report = check(plugin.parent, *words, "--max_completion_length", "600", code=2)
    assert (
        "--max_completion_length 600 leaves no room for a prompt: the model takes 600 tokens"
        in report["faults"]
    )


def rlhf(folder: Path, *rewards: str) -> subprocess.CompletedProcess[str]:
    """Ends at the model, which is no model: everything before it is checked."""
    words = [
        "--rlhf_type",
        "grpo",
        "--external_plugins",
        "plugin.py",
        "--dataset",
        "sums",
        "--model",
        "./gone",
    ]
    done = swift(
        "rlhf", *words, "--per_device_train_batch_size", "8", "--reward_funcs", *rewards, cwd=folder
    )
    assert done.returncode == 2
    return done


def test_rlhf_starts_with_it(plugin: Path) -> None:
    done = rlhf(plugin.parent, "right", "raises", "one_value", "no_empty")
    faults = [line for line in done.stderr.splitlines() if "--reward_funcs" in line]
    assert len(faults) == 2
    assert (
        "--reward_funcs raises fails on every made-up completion (see `swift check`): ZeroDivisionError"
        in faults[0]
    )
    assert "--reward_funcs one_value fails on every made-up completion" in faults[1]


def test_rlhf_refuses_a_reward_that_loops_for_ever(plugin: Path) -> None:
    plugin.write_text(
        PLUGIN
        + "\ndef loops(completions, **kwargs):\n    while True:\n        pass\n\norms['loops'] = loops\n"
    )
    done = rlhf(plugin.parent, "loops", "right", "--reward_timeout", "0.3")
    (fault,) = (line for line in done.stderr.splitlines() if "--reward_funcs" in line)
    assert (
        "--reward_funcs loops fails on every made-up completion (see `swift check`): no answer within 0.3 s"
        in fault
    )


def test_rlhf_says_that_no_reward_knows_the_right_answer(plugin: Path) -> None:
    warning = "no reward gives a right completion more than a wrong one"
    assert warning in rlhf(plugin.parent, "same").stderr
    assert warning not in rlhf(plugin.parent, "same", "right").stderr
    plugin.write_text(PLUGIN.replace("def gold(row):", "def gold(row):\n    row['gone']"))
    assert "the plugin's gold(row) fails: KeyError: 'gone'" in rlhf(plugin.parent, "same").stderr


def test_a_right_completion_for_built_in_rewards(tmp_path: Path) -> None:
    for rewards, solution in (
        ("gsm8k", "9 * 2 = 18\n#### {}"),
        ("math math_tag math_tag_strict", "\\frac{{{}}}{{7}}"),
    ):
        rows = [{"question": f"{n}?", "solution": solution.format(n)} for n in (1, 2)]
        (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ("--dataset", "sums.jsonl", "--reward_funcs", *rewards.split(), "format")
        for reward in check(tmp_path, *words, code=0, plugins=())["rewards"]:
            wrong = float(reward["name"] == "format")
            assert (reward["values"]["right"], reward["values"]["wrong"]) == (
                [1.0] * 2,
                [wrong] * 2,
            ), reward["name"]
    (reward,) = check(
        tmp_path, "--dataset", "countdown", "--reward_funcs", "countdown", code=0, plugins=()
    )["rewards"]
    assert reward["tells_right"]


@pytest.mark.long
def test_golds_that_a_reward_cannot_read_are_counted_and_named(tmp_path: Path) -> None:
    golds = [
        "2",
        "He has 3 apples and gets 2, so 5.",
        "\\frac{1}{2}",
        "about ten",
        "$1$ or $2$, whichever",
    ]
    rows = [{"question": f"{number}?", "solution": gold} for number, gold in enumerate(golds)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--dataset", "sums.jsonl", "--num_rows", "1", "--reward_funcs")
    first, second = check(tmp_path, *words, "math", "gsm8k", code=0, plugins=())["notes"]
    said = "cannot read the solution of {} of 5 rows, whose own answer it calls wrong: sums:1 (He has 3 apples"
    assert first.startswith("math " + said.format(1))
    assert second.startswith("gsm8k " + said.format(3)) and "sums:3 (about ten); sums:4 (" in second
