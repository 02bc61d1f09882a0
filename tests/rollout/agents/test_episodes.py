"""Episodes of agents over a real engine: the tokens of conversations are the engine's own, whatever agents do."""

from __future__ import annotations

import resource
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_r1.errors import ServerUnreachable
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.scoring import completion_metrics
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.serving.sessions.session import SessionState
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest
from tests.conftest import until
from tests.rollout.agents.conftest import LoggedRollouts, Stage
from tests.serving.session_engine import Entry
from tests.tool_templates import HERMES

WRONG = {
    "silent": "silent: it made no call of the model that was answered",
    "crashes": "exception: ConnectionError: the shop is closed",
    "leaves": "exception: SystemExit: 3",
    "ends its process": "exception: its process ended before run returned",
    "dies": "died: signal 9 (Killed)",
    "eats": "memory: MemoryError",
    "gives a list": "result: the reward is '[1.0]', not a finite number",
    "gives nan": "result: the reward is 'nan', not a finite number",
    "hangs": "timeout: no end within 3 s (I begin to hang)",
    "hangs at once": "timeout: no end within 3 s",
}


def written(conversation: Trajectory) -> list[tuple[Any, ...]]:
    """Of each turn in the sequences: prompt, tokens, log-probs and weight version."""
    found = []
    for one in conversation.sequences:
        for turn in sorted(set(one.turns) - {-1}):
            places = [place for place, of in enumerate(one.turns) if of == turn]
            start, end = places[0], places[-1] + 1
            assert places == list(range(start, end))
            assert tuple(one.token_ids[start:end]) == conversation.turns[turn]
            prompt = (*one.prompt_token_ids, *one.token_ids[:start])
            [version] = set(one.versions_of_tokens()[start:end])
            found.append((prompt, one.token_ids[start:end], one.logprobs[start:end], version))
        for own, mask, logprob in zip(one.turns, one.loss_mask, one.logprobs, strict=True):
            assert mask == (own >= 0) and (mask or logprob == 0)
    return found


def same_as_made(groups: list[list[Trajectory]], log: list[Entry]) -> None:
    """Each completion of the engine is in one sequence exactly, behind the prompt that it was asked."""
    found = [one for group in groups for conversation in group for one in written(conversation)]
    made = [
        (one.prompt, one.token_ids, one.logprobs, (one.versions or ((0, -1),))[0][1]) for one in log
    ]
    assert sorted(found) == sorted(made)


def tokens(groups: list[list[Trajectory]]) -> list[Any]:
    """All but weight versions, and the numbers of turns, which for calls beside each other are as they came."""
    every = [one for group in groups for conversation in group for one in conversation.sequences]
    return [(one.prompt_token_ids, one.token_ids, one.logprobs, one.loss_mask) for one in every]


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("agent", ["counts", "branches"])
def test_tokens_are_the_engines_and_repeat(
    stages: Callable[..., Stage], agent: str, served: bool
) -> None:
    stage = stages(agent)
    first = stage.play([{}, {}, {}], served=served)
    same_as_made(first, stage.rollouts.log)
    sequences = {"counts": 1, "branches": 3}[agent]
    for conversation in (one for group in first for one in group):
        assert len(conversation.sequences) == sequences and conversation.failure is None
        assert conversation.infos is not None
        assert (
            conversation.infos["num_turns"]
            == len(conversation.turns)
            == {"counts": 2, "branches": 3}[agent]
        )
        assert conversation.text == conversation.messages[-1]["content"]
        told = [step["said"]["content"] for step in conversation.steps]
        assert told == [
            stage.tokenizer.decode(turn, skip_special_tokens=True) for turn in conversation.turns
        ]
        assert [step["tokens"] for step in conversation.steps] == list(map(len, conversation.turns))
        read = [message["content"] for step in conversation.steps for message in step["read"]]
        if agent == "counts":
            assert read == [conversation.messages[0]["content"], "more"]
            assert [step["kind"] for step in conversation.steps] == ["new", "extends"]
        else:
            assert sorted(read[:2]) == ["left", "right"] and read[2] == "both"
        if agent == "counts":
            noted = conversation.infos["noted"].rpartition("/")
            assert noted[0] == conversation.request_id
            assert conversation.infos["reward"] == pytest.approx(
                sum(conversation.infos["turn_rewards"])
            )
    assert len({one.sequences[0].token_ids for group in first for one in group}) > 3
    again = stage.play([{}, {}, {}], served=served, at_once=1)
    assert tokens(first) == tokens(again)


def test_equal_calls_beside_each_other_have_the_answers_of_their_order(
    stages: Callable[..., Stage],
) -> None:
    """They may arrive in any order."""
    stage = stages("repeats")
    rows = [
        {"how": how, "messages": [{"role": "user", "content": "say"}]}
        for how in ("together", "in turn")
    ]
    said = {}
    for row in rows:  # the same episodes, since seeds are by number
        [group] = stage.play([row], n=3)
        said[row["how"]] = [(one.infos or {})["said"] for one in group]
    assert len({text for texts in said["together"] for text in texts}) > 12
    assert said["together"] == said["in turn"]


@pytest.mark.parametrize("how", ["waiting", "unread", "streamed", "left"])
def test_what_an_agent_gives_up_is_left_out_whenever_its_answer_came(
    stages: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """And what it never awaits is not."""
    stage, real, kept = stages("gives up"), LoggedRollouts.one, list[int]()

    def state() -> SessionState:
        [name] = stage.gateway.model.conversations
        return stage.gateway.sessions.store.get(name)

    def one(rollouts: LoggedRollouts, request: RolloutRequest) -> RolloutOutput:
        if request.request_id.endswith("/0"):
            (tmp_path / "asked").touch()
            until((lambda: state().failed) if how == "waiting" else (tmp_path / "ready").exists)
        output = real(rollouts, request)
        if how == "left" or not request.request_id.endswith("/0"):
            kept.append(output.completions[0].weight_version)
        return output

    def tell() -> None:
        until(lambda: stage.gateway.model.conversations and state().calls)
        (tmp_path / "answered").touch()

    monkeypatch.setattr(LoggedRollouts, "one", one)
    stage.rollouts.says, stage.rollouts.tokenizer = ["yes", "yes", "no"], stage.tokenizer
    try:
        with ThreadPoolExecutor(1) as threads:
            told = threads.submit(tell) if how in ("unread", "streamed") else None
            [[ended]] = stage.play(
                [{"how": how, "folder": str(tmp_path)}], n=1, calls=2, timeout=20.0
            )
            assert told is None or told.result() is None
    finally:
        stage.rollouts.says = []
    assert ended.failure is None
    log = stage.rollouts.log
    same_as_made(
        [[ended]], [entry for entry in log if entry.versions and entry.versions[0][1] in kept]
    )
    if how != "left":
        assert len(ended.sequences) == 1 and [
            stage.tokenizer.decode(ids[:-1]) for ids in ended.turns
        ] == ["yes", "no"]
        assert (ended.infos or {})["agent"]["kinds"] == {"new": 1, "extends": 1}


@pytest.mark.parametrize("served", [True, pytest.param(False, marks=pytest.mark.long)])
def test_agents_that_misbehave_are_told_apart(stages: Callable[..., Stage], served: bool) -> None:
    stage, rows = stages("misbehaves", memory=1.0), [{"how": how} for how in WRONG]
    groups = stage.play([*rows, {}], n=1, served=served, timeout=3.0)
    assert psutil.Process(stage.processes.pid).children() == []
    causes = {row["how"]: group[0].failure for row, group in zip(rows, groups, strict=False)}
    for how, wanted in WRONG.items():
        assert causes[how] is not None and causes[how].startswith(wanted), how
    assert "agents_plugin.py:" in (causes["crashes"] or "")
    assert groups[-1][0].failure is None and (groups[-1][0].infos or {})["reward"] == 0.5
    same_as_made(groups, stage.rollouts.log)  # what was written before is there
    called = [how not in ("silent", "hangs at once") for how in WRONG]
    assert [len(group[0].sequences) for group in groups] == [*called, 1]


def test_episodes_end_where_nobody_answers_them_any_more(
    stages: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the servers are lost for good, or an evaluation is broken off: both episodes wait for the model."""
    stage = stages("counts")

    def answer(calls: OpenCalls | None) -> None:
        assert calls is not None
        until(lambda: len(calls) == 2)
        raise ServerUnreachable("no server is there")

    monkeypatch.setattr(stage.rollouts, "answer", answer)
    with pytest.raises(ServerUnreachable):
        stage.play([{}], n=2)
    until(lambda: not stage.processes._waiting and not stage.gateway.model.conversations)
    assert len(stage.gateway.sessions.store) == 0


def test_limits_cut_an_episode_off(stages: Callable[..., Stage]) -> None:
    stage, forever = stages("misbehaves"), [{"how": "calls forever"}]
    [[one]] = stage.play(forever, n=1, calls=5)
    assert (
        one.failure is None and one.finish_reason == "length" and (one.infos or {})["reward"] == 0.0
    )
    assert len(one.turns) == 5 and len(one.sequences) == 5 and one.limit == "calls"
    same_as_made([[one]], stage.rollouts.log)
    [[one]] = stage.play(forever, n=1, total=True, max_tokens=4)
    assert one.finish_reason == "length" and sum(map(len, one.turns)) == 4
    assert one.limit == "tokens"
    metrics = completion_metrics([one])
    assert (
        metrics["limits/tokens"] == metrics["agent/limited"] == 1 and metrics["limits/calls"] == 0
    )


def test_an_agent_with_tools_and_with_requests_that_are_refused(
    stages: Callable[..., Stage],
) -> None:
    """What an engine would refuse would end the run there: the gateway refuses it."""
    stage = stages("adds", template=HERMES)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    refused = 3  # the first of them was not even begun
    stage.rollouts.says, stage.rollouts.tokenizer = (
        [""] * refused + [f"I add.\n{call}", "It is 3."],
        stage.tokenizer,
    )
    try:
        [[one]] = stage.play([{}], n=1, max_tokens=900)
    finally:
        stage.rollouts.says = []
    assert one.failure is None and one.infos is not None and one.infos["reward"] == 1.0
    wanted = [
        "cannot force a call",
        "leave top_logprobs out",
        "the vocabulary ends at",
        "frequency_penalty",
    ]
    assert [why in text for why, text in zip(wanted, one.infos["refused"], strict=True)] == [
        True
    ] * 4
    same_as_made([[one]], stage.rollouts.log)
    [made] = one.infos["tool_calls"]
    assert (
        made["turn"] == 1
        and made["name"] == "add"
        and made["content"] == "3"
        and made["outcome"] == "answer"
    )
    assert len(one.sequences) == 1
    assert [message["role"] for message in one.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_each_cause_of_failure_is_said(
    stages: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stages("misbehaves").play([{"how": "crashes"}, {"how": "leaves"}], n=2)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "2 of 4 episodes have no reward: exception: ConnectionError: the shop is closed" in said
    assert "2 of 4 episodes have no reward: exception: SystemExit: 3" in said


AGENT = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
def ask(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = row["messages"]
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "more"}]
print("a log line")
how = row.get("how")
if how == "fails":
    sys.exit("the shop is closed")
print({"number": "0.25", "dict": '{"reward": 0.5, "seen": 1}', "text": "bye"}.get(how, ""))
"""


def test_a_command_with_the_standard_library_alone(stages: Callable[..., Stage]) -> None:
    stage = stages(command=[sys.executable, "-c", AGENT])
    rows = [{"how": how} for how in ("number", "dict", "text", "fails")]
    groups = stage.play(rows, n=1)
    same_as_made(groups, stage.rollouts.log)
    infos = [group[0].infos or {} for group in groups]
    assert [one.get("reward") for one in infos] == [0.25, 0.5, None, None] and infos[1]["seen"] == 1
    assert [group[0].failure for group in groups] == [None] * 3 + [
        "exit: exit code 1 (the shop is closed)"
    ]
    assert all(len(group[0].sequences) == 1 and len(group[0].turns) == 2 for group in groups)


NODE = """
const row = JSON.parse(require("fs").readFileSync(0, "utf8"));
const head = {Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json"};
const body = JSON.stringify({model: "any", messages: row.messages});
fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {method: "POST", headers: head, body})
  .then((answer) => answer.json())
  .then((answer) => console.log(JSON.stringify({reward: 2, said: answer.choices[0].message.content})));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_a_command_of_node(stages: Callable[..., Stage]) -> None:
    """Its own memory is mostly reserved, not taken."""
    [[one]] = stages(command=["node", "-e", NODE]).play([{}], n=1)
    assert one.failure is None and one.infos is not None
    assert one.infos["reward"] == 2.0 and one.infos["said"] == one.text


def test_an_episode_that_cannot_be_started(stages: Callable[..., Stage]) -> None:
    """The machine has no more files for it: it has failed, and the others have not."""
    stage = stages("misbehaves")
    parent = stage.processes.pid
    limits = resource.prlimit(parent, resource.RLIMIT_NOFILE)
    open_now = psutil.Process(parent).num_fds()
    # The first has room for its pipes, and the second has not.
    resource.prlimit(parent, resource.RLIMIT_NOFILE, (open_now + 9, limits[1]))
    try:
        [group] = stage.play([{}])
    finally:
        resource.prlimit(parent, resource.RLIMIT_NOFILE, limits)
    assert sorted((one.failure or "")[:35] for one in group) == [
        "",
        "exception: it cannot be started: [E",
    ]
    assert psutil.Process(parent).num_fds() == open_now and stage.processes.pid == parent
    [group] = stage.play([{}])
    assert [one.failure for one in group] == [None, None]
