"""The reward `judge`, against a real server that judges by a rule, and one that is a tiny language model."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from swift_r1.errors import UsageError
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import CheckArguments
from swift_r1.launch.checks.preflight import column_faults
from swift_r1.launch.checks.reward_smoke_test import quick_faults
from swift_r1.launch.checks.run import run_checks
from swift_r1.record.episodes import EpisodeCall, steps_of
from swift_r1.rewards import remote
from swift_r1.rewards.judge_config import judge_text
from swift_r1.rewards.orm import build_reward
from swift_r1.rewards.pool import InlineRewards, RewardPool
from swift_r1.rewards.types import RewardBatch, RewardColumn
from tests.conftest import ServerProcess, wait_until_serving
from tests.rewards.reward_model_makers import save_speaker

Rule = Callable[[dict[str, Any], int], str | int]
KEY = "sk-of-nobody"


class Server(ThreadingHTTPServer):
    """An OpenAI address whose model is `rule(request, number of this request)`: a text, or the code of a failure."""

    daemon_threads = True

    def __init__(self, rule: Rule) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.rule, self.seen, self.authorizations = rule, list[dict[str, Any]](), set[str | None]()
        self.times: list[float] = []
        self.retry_after = 2
        self.usage: object = {"total_tokens": 10}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.answer(200, {"data": [{"id": "ruler"}]})

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        self.server.times.append(time.monotonic())
        self.server.authorizations.add(self.headers.get("Authorization"))
        said = self.server.rule(body, len(self.server.seen))
        if isinstance(said, int):
            return self.answer(said, {"error": f"you sent {self.headers.get('Authorization')}"})
        choices = [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}]
        return self.answer(200, {"choices": choices, "usage": self.server.usage})

    def answer(self, code: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        if code == 429:
            self.send_header("Retry-After", str(self.server.retry_after))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def serve() -> Iterator[Callable[[Rule], Server]]:
    running: list[tuple[Server, threading.Thread]] = []

    def start(rule: Rule) -> Server:
        server = Server(rule)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def judged(
    url: str,
    completions: list[str],
    folder: Path | None = None,
    workers: int = 0,
    episodes: list[list[dict[str, Any]]] | None = None,
    **config: Any,
) -> RewardColumn:
    """What is made of one group, in worker processes or in this one; `folder` is the run's, `episodes` the steps of an
    agent's."""
    args = SimpleNamespace(
        judge=json.dumps({"url": url, **config}), output_dir=str(folder), reward_timeout=20.0
    )
    args.reward_num_workers, args.reward_memory_limit, args.reward_env = workers or 1, 2.0, []
    task = [{"role": "user", "content": "Name a number."}]
    columns = {
        "messages": [[*task, {"role": "assistant", "content": text}] for text in completions],
        "solution": ["7"] * len(completions),
    }
    if episodes is not None:
        columns["episode_steps"] = episodes
    with (RewardPool if workers else InlineRewards)(args, ["judge"]) as pool:
        return pool.score(RewardBatch(completions, columns, len(completions), {"global_step": 3}))[
            0
        ]


def asked_about(body: dict[str, Any]) -> str:
    found = re.search(r"<answer>\n(.*)\n</answer>", body["messages"][1]["content"], re.DOTALL)
    assert found is not None
    return found[1]


def test_scores_on_a_scale_from_the_first_model_listed(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFT_JUDGE_API_KEY", KEY)
    server = serve(lambda body, _: f"I read [[1]] of it. [[{asked_about(body)}]]")
    column = judged(
        server.url,
        ["2", "10", "10", "6", "11", "\ud800"],
        workers=1,
        scale=[2, 10],
        rubric="It is {solution}.",
    )
    assert column.values[:4] == (0.0, 1.0, 1.0, 0.5)
    assert [bad.index for bad in column.invalid] == [4, 5]
    assert "says 11, which is outside of the scale" in column.invalid[0].cause
    # equal completions are asked about once, and invalid ones not again
    assert len(server.seen) == 5
    first = server.seen[0]
    assert first["model"] == "ruler" and first["temperature"] == 0 and "max_tokens" in first
    assert (
        "It is 7." in first["messages"][0]["content"]
        and "from 2 (worst) to 10" in first["messages"][0]["content"]
    )
    assert "Name a number." in first["messages"][1]["content"]
    assert server.authorizations == {f"Bearer {KEY}"}


def test_verdicts_templates_and_what_a_row_lacks(serve: Any) -> None:
    server = serve(lambda body, _: "It is " + body["messages"][1]["content"])
    config = {
        "scale": {"yes": 1, "No": -0.5},
        "answer": r"is \w+ (\w+)",
        "prompt": "{solution} {completion} {x",
    }
    column = judged(server.url, ["Yes", "no", "maybe", "{solution}"], **config)
    assert column.values[:2] == (1.0, -0.5)
    assert "says maybe, which scale does not have" in column.invalid[0].cause
    assert server.seen[0]["messages"][1]["content"].endswith(" {x")
    column = judged(server.url, ["a", "b"], prompt="{completion} {grade}")
    assert [bad.kind for bad in column.invalid] == ["exception", "exception"]
    assert "the row has no grade, which a template of --judge names" in column.invalid[0].cause


@pytest.mark.parametrize(
    ("combine", "value"), [("majority", 0.2), ("median", 0.2), ("mean", (0.2 + 0.2 + 0.9) / 3)]
)
def test_votes(serve: Any, combine: str, value: float) -> None:
    said = {0: "[[2]]", 1: "hm", 2: "[[9]]", 3: "[[2]]", 4: "[[22]]"}
    server = serve(lambda body, _: said[body["seed"]])
    column = judged(server.url, ["a", "a"], votes=5, temperature=1, combine=combine)
    assert column.values == pytest.approx((value, value))
    said[3] = ""  # now most votes are unreadable
    column = judged(server.url, ["a", "a"], votes=5, temperature=1, combine=combine)
    assert "the judge's answer has no verdict: 'hm'" in column.invalid[0].cause


@pytest.mark.parametrize(("invalid", "value"), [("none", None), (0, 0.0), (-1.5, -1.5)])
def test_what_an_unreadable_answer_means(serve: Any, invalid: Any, value: float | None) -> None:
    assert judged(serve(lambda *_: "I like it").url, ["a", "b"], invalid=invalid).values == (
        value,
        value,
    )


def steps(*texts: str) -> list[dict[str, Any]]:
    """Those of an episode that looks something up and says these texts, one after another."""
    look = {"id": "c", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Name a number."}]
    calls = []
    for number, text in enumerate(texts):
        calls.append(
            EpisodeCall(
                "extends" if number else "new",
                number - 1 if number else None,
                0,
                len(messages),
                9,
                3,
                "stop",
            )
        )
        messages += [
            {"role": "assistant", "content": text, "tool_calls": [look]},
            {"role": "tool", "tool_call_id": "c", "content": f"at {text}"},
        ]
    return steps_of(calls, [messages])


def test_a_judge_sees_the_whole_episode_unless_it_is_too_long(serve: Any) -> None:
    server = serve(lambda *_: "[[5]]")
    episodes = [steps("first", "7"), steps("other", "7"), steps("x" * 5000, "7")]
    column = judged(server.url, ["7"] * 3, episodes=episodes, at_once=1, episode_length=200)
    assert (
        column.values == (0.5,) * 3 and len(server.seen) == 3
    )  # equal last answers are three episodes
    system, user = (message["content"] for message in server.seen[0]["messages"])
    assert system.startswith("You judge the whole course of an assistant's work on a task: what it")
    assert user == (
        "<task>\nName a number.\n</task>\n\n<episode>\n"
        'assistant: first\n(calls) look({"at": 1})\n\ntool look: at first\n\n'
        'assistant: 7\n(calls) look({"at": 1})\n</episode>'
    )
    cut = server.seen[2]["messages"][1]["content"]
    assert "characters are left out here ...]\n" in cut and len(cut) < 400
    assert cut.endswith('assistant: 7\n(calls) look({"at": 1})\n</episode>')
    # an own template; of an episode in which the model was not asked there is only the task
    judged(
        server.url,
        ["7", ""],
        episodes=[episodes[0], []],
        at_once=1,
        prompt="{prompt}|{completion}|{episode}|",
    )
    assert server.seen[3]["messages"][1]["content"].startswith(
        "Name a number.|7|assistant: first\n"
    )
    assert server.seen[4]["messages"][1]["content"] == "Name a number.|||"
    judged(server.url, ["8"], prompt="{completion}|{episode}|")
    assert server.seen[5]["messages"][1]["content"] == "8|8|"


def test_answers_are_kept_in_the_run_and_the_budget_is_the_runs(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text("{}")
    server = serve(lambda *_: "[[5]]")
    completions = list("abcdef")
    assert judged(server.url, completions, tmp_path, 2, max_calls=8).values == (0.5,) * 6
    assert judged(server.url, completions, tmp_path, max_calls=8).values == (0.5,) * 6
    assert len(server.seen) == 6
    column = judged(server.url, [*"abcd", *"wxyz"], tmp_path, max_calls=8)
    assert len(server.seen) == 8 and column.values[:4] == (0.5,) * 4
    assert len(column.invalid) == 2 and "the budget of --judge is spent" in column.invalid[0].cause
    assert judged(
        server.url, ["n", "m"], tmp_path, max_total_tokens=80, over_budget="none"
    ).values == (None, None)
    assert judged(server.url, ["n", "m"], tmp_path, max_total_tokens=81, at_once=1).values[0] == 0.5
    with sqlite3.connect(tmp_path / "judge.sqlite") as kept:
        assert kept.execute("SELECT calls, tokens FROM spent").fetchall() == [(9, 90)]


def test_a_judge_that_is_not_there_or_refuses(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    (tmp_path / "args.json").write_text("{}")
    server = serve(lambda *_: 401)
    column = judged(server.url, ["a", "b"], tmp_path, api_key_env="MY_KEY", invalid=0)
    assert all(
        "answered 401" in bad.cause and "Bearer ***" in bad.cause for bad in column.invalid
    ), column
    assert len(column.invalid) == 2 and KEY.encode() not in (tmp_path / "judge.sqlite").read_bytes()
    server.shutdown()
    server.server_close()
    column = judged(server.url, ["a"], invalid=0, timeout=3)
    assert "ConnectError" in column.invalid[0].cause


@pytest.mark.long
def test_a_judge_that_is_busy_for_a_while(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    busy = serve(lambda _, number: 429 if number == 1 else 503 if number < 6 else "[[10]]")
    # the sixth attempt is within the 20 seconds of a request
    assert judged(busy.url, ["a"]).values == (1.0,)
    assert busy.times[1] - busy.times[0] > 1.9  # as Retry-After says
    busy = serve(lambda *_: 429)
    busy.retry_after = 60
    [bad] = judged(busy.url, ["a"]).invalid
    # it wants more seconds than a request has
    assert "answered 429" in bad.cause and len(busy.seen) == 1


@pytest.mark.parametrize("key", ["sk-of\nnobody", "sk-\u00e9"])
def test_a_key_that_no_header_can_have_is_in_no_message(
    serve: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda *_: "[[10]]")
    monkeypatch.setenv("MY_KEY", key)
    [bad] = judged(server.url, ["a"], api_key_env="MY_KEY").invalid
    assert (
        bad.cause.startswith("RemoteRewardError: the key for ")
        and key.split()[-1] not in bad.cause.split("/v1")[1]
    )
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")  # as files of secrets end
    assert judged(server.url, ["a"], api_key_env="MY_KEY").values == (1.0,)
    assert server.authorizations == {f"Bearer {KEY}"}


@pytest.mark.parametrize("usage", [None, {}, {"total_tokens": "many"}])
def test_a_budget_of_tokens_needs_a_judge_that_counts_them(
    serve: Any, usage: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(lambda *_: "[[10]]")
    monkeypatch.setattr(server, "usage", usage)
    [bad] = judged(server.url, ["a"], max_total_tokens=100).invalid
    assert "total_tokens" in bad.cause or "did not answer with a chat completion" in bad.cause
    if not usage:
        assert judged(server.url, ["a"]).values == (1.0,)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ("nowhere.yaml", "--judge nowhere.yaml: No such file or directory"),
        ("{url", "--judge is not valid YAML or JSON: "),
        ("{}", "--judge: url: Field required"),
        ('{"url": "http://me:pw@host/v1"}', "--judge: url: String should match pattern"),
        ('{"url": "http://x", "api_key": "k"}', "--judge: api_key: a key has no place in a file"),
        (
            '{"url": "http://x", "votess": 3}',
            "--judge: votess: there is no such key; known are url, model, ",
        ),
        (
            '{"url": "http://x", "votes": 3}',
            "--judge: votes 3 are all the same at temperature 0: give one",
        ),
        (
            '{url: "http://x", scale: {YES: 1, NO: 0}}',
            "--judge: scale: YAML reads YES and NO as true and false",
        ),
        ('{"url": "http://x", "prompt": "{prompt}"}', "--judge: prompt lacks {completion}"),
    ],
)
def test_faults_of_the_configuration(config: str, fault: str) -> None:
    with pytest.raises(UsageError) as found:
        judge_text(config)
    assert str(found.value).startswith(fault), str(found.value)


def test_a_key_that_is_not_set() -> None:
    args = SimpleNamespace(
        judge='{"url": "http://x/v1", "api_key_env": "NO_SUCH_KEY"}', reward_timeout=1.0
    )
    with pytest.raises(
        UsageError, match="the environment variable NO_SUCH_KEY with the judge's key is not set"
    ):
        build_reward("judge", args)
    with pytest.raises(UsageError, match="needs --judge FILE"):
        build_reward("judge", SimpleNamespace(judge=None))


def test_the_documentations_example() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    example = text.partition("```yaml\n")[2].partition("```")[0]
    assert json.loads(judge_text(json.dumps(yaml.safe_load(example))))["votes"] == 3


@pytest.mark.long
def test_a_judge_behind_our_own_server(
    start_tiny: Callable[..., ServerProcess], tiny_model: Path, tmp_path: Path
) -> None:
    server = start_tiny(save_speaker(tmp_path / "speaker", "So 7"))
    wait_until_serving(server)
    column = judged(f"{server.url}/v1", ["a", "b"], answer=r"So (\d)", scale=[0, 14], max_tokens=8)
    assert column.values == (0.5, 0.5)
    nonsense = start_tiny(tiny_model)
    wait_until_serving(nonsense)
    column = judged(f"{nonsense.url}/v1", ["a", "b"], max_tokens=8, votes=2, temperature=1.0)
    assert (
        len(column.invalid) == 2
        and "the judge's answer has no verdict: " in column.invalid[0].cause
    )


def test_a_start_does_not_ask_the_judge(serve: Any) -> None:
    server = serve(lambda *_: "I like it")
    row = {"messages": [{"role": "user", "content": "q"}], "dataset": "d", "prompt_id": "d-0"}
    judge = {"url": server.url, "rubric": "It is {solution}, {{prompt}} {rubric} {answer}."}
    words = ["--reward_funcs", "judge", "format", "--judge"]
    args = parse_arguments(CheckArguments, [*words, json.dumps(judge)])
    assert quick_faults(args, row) == [] and server.seen == []
    assert column_faults(args, [{"solution": "2", "messages": []}]) == [
        "--judge names {answer}, a column that the data lacks (it has solution)"
    ]
    args = parse_arguments(
        CheckArguments, [*words, json.dumps({"url": server.url, "api_key_env": "NO_SUCH_KEY"})]
    )
    [fault] = quick_faults(args, row)
    assert "the environment variable NO_SUCH_KEY with the judge's key is not set" in fault


@pytest.mark.long
def test_swift_check_asks_the_judge(serve: Any) -> None:
    server = serve(
        lambda body, _: "[[10]]" if asked_about(body) == "<answer>3</answer>" else "[[0]]"
    )
    words = [
        "--reward_funcs",
        "judge",
        "--judge",
        json.dumps({"url": server.url}),
        "--gold",
        "<answer>3</answer>",
    ]
    report = run_checks(parse_arguments(CheckArguments, words))
    assert report.ok and report.rewards[0].tells_right, report
    assert report.rewards[0].values["right"] == (1.0,) and report.rewards[0].values["wrong"] == (
        0.0,
    )
