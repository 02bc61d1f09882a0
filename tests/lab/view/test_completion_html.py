"""Rows, cards and conditions: whatever a run's files hold, the page is ours."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from swift_r1.errors import RunFailed, UsageError
from swift_r1.lab.runs.heatmap import Heatmap
from swift_r1.lab.runs.query import read_conditions
from swift_r1.lab.view.answer_sources import (
    check_memory,
    newest_checkpoint,
    own_key,
    server_urls,
    weight_bytes,
)
from swift_r1.lab.view.completion_html import (
    about_prompt,
    card,
    completion,
    data_columns,
    is_long,
    reasons_of,
    rows_table,
)
from swift_r1.lab.view.message_html import Look, prompt_block, rendered, shown

TEXT = some.text(some.characters(), max_size=20) | some.sampled_from(
    ["<script>x</script>", '"><img src=x>', "'", "\x00"]
)
VALUE = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | TEXT,
    lambda one: some.lists(one, max_size=3) | some.dictionaries(TEXT, one, max_size=3),
    max_leaves=6,
)
NAMES = (
    some.sampled_from(
        ["step", "completion", "prompt", "reward", "rewards/<b>", "messages", "advantage", "number"]
    )
    | TEXT
)
OURS = {
    *(
        "h1",
        "h2",
        "h4",
        "h5",
        "h6",
        "br",
        "hr",
        "em",
        "strong",
        "code",
        "ul",
        "ol",
        "li",
        "blockquote",
    ),
    *(
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "a",
        "b",
        "button",
        "p",
        "article",
        "h2",
        "dl",
        "dt",
        "dd",
    ),
} | {*("pre", "div", "details", "summary", "span", "mark")}


class _Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


@settings(max_examples=200, deadline=None)
@given(some.dictionaries(NAMES, VALUE, max_size=8), some.dictionaries(NAMES, VALUE, max_size=4))
def test_any_row_is_shown_with_our_tags_alone(row: dict[str, Any], reason: dict[str, Any]) -> None:
    columns = list(row)
    html = rows_table(
        [row],
        columns,
        columns[0] if columns else None,
        True,
        {"completion": lambda _row: '/group?x="&y=<'},
        "x",
    )
    html += card(row, [reason], {"tokens": "/tokens?a=b&c=d"}) + about_prompt(row)
    for look in (Look(whole=True, words="x"), Look(rendered=True)):
        html += card(row, [], {}, look) + prompt_block(row, look)
    found = _Tags(html)
    assert found.found <= OURS
    assert found.attributes <= {
        *("class", "type", "href", "id", "tabindex", "aria-sort", "title", "open")
    } | {name for name in found.attributes if name.startswith("data-")}
    html.encode()
    assert is_long(row) in (True, False) and isinstance(data_columns(row), dict)


def test_all_conversations_of_an_episode_are_there() -> None:
    said = [
        [{"role": "user", "content": name}, {"role": "assistant", "content": f"{name}!"}]
        for name in "abc"
    ]
    html = card({"messages": said[2], "other_messages": said[:2], "sequences": 3}, [], {})
    assert (
        html.index("c!") < html.index("conversation 1 of 3") < html.index("a!") < html.index("b!")
    )
    assert "<h2>reward –</h2>" in html
    assert not is_long({"messages": said[2], "other_messages": said[:2]})
    said[0][1]["content"] *= 10_000
    assert is_long({"messages": said[2], "other_messages": said[:2]})


MARKDOWN = some.sampled_from(
    [
        *(
            "# ",
            "* ",
            "1. ",
            "> ",
            "    ",
            "\n",
            "\n\n",
            "`",
            "```",
            "```python\n",
            "|a|b|\n|-|-|\n",
            "**",
            "_",
        ),
        *(
            "![x](http://a/b.png)",
            "[x](javascript:alert(1))",
            "[a]: http://b",
            "<http://c>",
            "[a][b]",
            "&lt;",
            "\\(",
        ),
        *(
            '<img src=x onerror="a()">',
            "<script>",
            '" onmouseover="a()',
            "$x_1 * y_2$",
            "\\boxed{7}",
            "md5-",
        ),
    ]
)


@settings(max_examples=300, deadline=None)
@given(some.lists(MARKDOWN | TEXT, max_size=12).map("".join))
def test_rendered_text_has_no_links_no_images_and_nothing_that_acts(text: str) -> None:
    found = _Tags(rendered(text))
    assert found.found <= OURS - {"a", "button", "article"}
    assert found.attributes <= {"class", "style"}


def test_text_is_rendered() -> None:
    html = rendered("So **7**:\n\n* $x_1 * y_2 * z_3$\n* `a < b[0]`\n\n\x1b\\boxed{7}")
    assert "<strong>7</strong>" in html and "<code>$x_1 * y_2 * z_3$</code></li>" in html
    assert "<code>a &lt; b[0]</code>" in html
    assert "<b class=unseen>␛</b>" in html and "<code>\\boxed{7}</code>" in html
    chat = "<|im_start|>system\nbe *brief*<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    html = prompt_block({"prompt": chat}, Look(rendered=True))
    assert '<div class="turn system"><b>system</b>' in html and "<em>brief</em>" in html
    assert "im_start" not in html and "im_start" in prompt_block({"prompt": chat})


def test_a_prompt_shows_what_is_asked_and_folds_the_chat_template() -> None:
    chat = "<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    shown_first, folded = prompt_block({"prompt": chat}).split("<details")
    assert "1 + 2?" in shown_first and "im_start" not in shown_first and "im_start" in folded
    assert not folded.startswith(' class="thought" open')
    assert '"thought" open' in prompt_block({"prompt": chat}, Look(words="brief"))
    assert "<details" not in prompt_block({"prompt": "1 + 2?"})
    cell = rows_table([{"prompt": chat}], ["prompt"], "prompt", False, {}, "", ())
    assert "1 + 2?" in cell and "im_start" not in cell


def test_the_graded_answer_is_marked_and_a_long_thought_folded() -> None:
    short = "<think>1 + 2</think><answer>1 + 2</answer>"
    assert completion({"completion": short, "rewards/countdown": 0.0}) == (
        '<pre class="text">&lt;think&gt;1 + 2&lt;/think&gt;&lt;answer&gt;<b class="answer" title="the answer">'
        "1 + 2</b>&lt;/answer&gt;</pre>"
    )
    long = {"completion": f"<think>{'word ' * 200}needle</think>so \\boxed{{7}} it is"}
    html = completion(long)
    assert '<details class="thought"><summary>thought, 1,021 characters</summary>' in html
    assert html.endswith('so \\boxed{<b class="answer" title="the answer">7</b>} it is</pre>')
    assert '<details class="thought" open>' in completion(long, Look(words="NEEDLE"))
    inside = f"<think>{'word ' * 200}<answer>7</answer></think>"
    html = completion({"completion": inside, "rewards/countdown": 0.0})
    assert '<details class="thought"><summary>' in html and 'class="answer"' not in html


def test_the_searched_words_are_in_view_and_marked() -> None:
    row = {"completion": "a " * 400 + "Needle <b>" + " z" * 400}
    html = rows_table([row], ["completion"], None, False, {}, "needle <")
    assert "<mark>Needle &lt;</mark>b&gt;" in html and len(html) < 700
    assert html.count("…") == 2


def test_values_are_short() -> None:
    assert [shown(one) for one in (None, 0.123456, float("nan"), 3, [1, "é"], "x")] == [
        *("–", "0.1235", "invalid", "3", '[1, "é"]', "x")
    ]


def test_conditions() -> None:
    assert read_conditions(
        'reward>=0.5; finish_reason = length;nums contains 25; a != "1"; b=null;'
    ) == [
        ("reward", ">=", 0.5),
        ("finish_reason", "=", "length"),
        ("nums", "contains", 25.0),
        ("a", "!=", "1"),
        ("b", "=", None),
    ]
    assert read_conditions('completion contains "a;b=c"; rewards/x<2') == [
        ("completion", "contains", "a;b=c"),
        ("rewards/x", "<", 2.0),
    ]
    assert read_conditions(" ; ") == []
    for bad in ("reward", "reward is high", "=3", "x > null"):
        with pytest.raises(UsageError, match="is not a condition"):
            read_conditions(bad)
    with pytest.raises(UsageError, match="'reward>=': a value is missing after >="):
        read_conditions("a=1; reward>=")


@settings(max_examples=200, deadline=None)
@given(some.text(max_size=60))
def test_any_condition_is_read_or_refused(text: str) -> None:
    try:
        found = read_conditions(text)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert all(len(one) == 3 for one in found)


def test_reasons_belong_to_their_completion() -> None:
    row = {"request_id": "r/0", "number": 1, "completion": "same"}
    rows = [
        {"request_id": "r/0/1", "cause": "mine"},
        {"request_id": "r/0/11", "cause": "not"},
        {"completion": "same"},
    ]
    assert [one.get("cause") for one in reasons_of(row, rows)] == ["mine"]
    assert reasons_of({"completion": "same"}, rows) == [{"completion": "same"}]


def test_a_key_is_for_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFT_API_KEY", "secret")
    assert own_key("http://127.0.0.1:8000") == own_key("http://[::1]:8000") == "secret"
    assert (
        own_key("http://example.org:8000") is None
        and own_key("http://127.0.0.1.example.org") is None
    )


def test_the_servers_of_a_run(tmp_path: Path) -> None:
    assert server_urls(
        {"use_vllm": True, "vllm_server_host": ["a"], "vllm_server_port": [1, 2]}
    ) == (
        "http://a:1",
        "http://a:2",
    )
    file = tmp_path / "servers.txt"
    of_file = {"use_vllm": True, "vllm_server_file": str(file)}
    assert server_urls(of_file) == ()
    file.write_text("http://a\nnonsense\nhttp://b:1/\n")
    assert server_urls(of_file) == ("http://a", "http://b:1")
    assert server_urls({"use_vllm": False}) == server_urls({"no": "flag"}) == server_urls({}) == ()


def test_checkpoints(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for name in ("checkpoint-2", "checkpoint-10", "checkpoint-x", "checkpoint-30.partial"):
        (tmp_path / name).mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert newest_checkpoint(tmp_path, 5) == tmp_path / "checkpoint-2"
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(1 << 42)  # without a byte on the disk
    assert weight_bytes(weights.parent) == 1 << 42
    with pytest.raises(RunFailed, match=r"checkpoint-2 needs 4096.4 GiB of memory"):
        check_memory(weights.parent)


def test_charts_of_distributions() -> None:
    pytest.importorskip("nicegui", reason="pip install 'swift-r1[view]'")
    from swift_r1.lab.runs.failures import FAILURES
    from swift_r1.lab.view.pages.distributions import heat_options, largest_share, of_all, shares
    from swift_r1.lab.view.pages.prompt import in_groups, mean_reward

    counts = {"step": 1} | dict.fromkeys(FAILURES, 0) | {"right": 3, "truncated": 1}
    assert of_all([counts])[0] == {"step": 1} | dict.fromkeys(FAILURES, 0.0) | {
        "right": 0.75,
        "truncated": 0.25,
    }
    rows = [{"step": step, "right": step / 1000} for step in range(1000)]
    lines = shares(rows, {"all right": "right"})
    assert len(lines[0].points) == 334 and lines[0].points[1] == (3.0, pytest.approx(0.004))
    found = Heatmap([1, 5], [(0.0, 0.5), (1.0, 1.0)], [[3, 1], [0, 2]])
    heat = heat_options("x", found, largest_share(found))
    assert heat["series"][0]["data"] == [
        [0, 0, 0.75, "0 to 0.5", 4],
        [0, 1, 0.25, "1", 4],
        [1, 1, 1.0, "1", 2],
    ]
    assert heat["xAxis"]["data"] == [1, 5] and heat["yAxis"]["data"] == ["0 to 0.5", "1"]
    assert heat["visualMap"]["max"] == 1.0
    rows = [
        {"step": 5, "number": 1, "reward": None},
        {"step": 5, "number": 0, "reward": 1.0},
        {"step": 2, "reward": 0.5},
    ]
    assert {
        step: [row.get("number") for row in group] for step, group in in_groups(rows).items()
    } == {
        2: [None],
        5: [0, 1],
    }
    assert mean_reward(rows) == 0.75 and mean_reward(rows[:1]) is None
