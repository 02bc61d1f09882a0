"""Rows, cards and conditions: whatever a run's files hold, the page is ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from swift_r1.errors import UsageError
from swift_r1.lab.runs.query import read_conditions
from swift_r1.lab.view.completion_html import (
    about_prompt,
    card,
    completion,
    data_columns,
    is_long,
    reasons_of,
    rows_table,
)
from swift_r1.lab.view.message_html import Look, prompt_block
from tests.lab.html import Reader

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
    look = Look(whole=True, words="x")
    html += card(row, [], {}, look) + prompt_block(row, look)
    found = Reader(html)
    names = {name for name, _ in found.attributes}
    assert set(found.tags) <= OURS
    assert names <= {*("class", "type", "href", "id", "tabindex", "aria-sort", "title", "open")} | {
        name for name in names if name.startswith("data-")
    }
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


def test_a_prompt_shows_what_is_asked_and_folds_the_chat_template() -> None:
    chat = "<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    shown_first, folded = prompt_block({"prompt": chat}).split("<details")
    assert "1 + 2?" in shown_first and "im_start" not in shown_first and "im_start" in folded
    assert not folded.startswith(' class="thought" open')
    assert '"thought" open' in prompt_block({"prompt": chat}, Look(words="brief"))
    assert "<details" not in prompt_block({"prompt": "1 + 2?"})
    cell = rows_table([{"prompt": chat}], ["prompt"], "prompt", False, {}, "")
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


def test_reasons_belong_to_their_completion() -> None:
    row = {"request_id": "r/0", "number": 1, "completion": "same"}
    rows = [
        {"request_id": "r/0/1", "cause": "mine"},
        {"request_id": "r/0/11", "cause": "not"},
    ]
    assert [one.get("cause") for one in reasons_of(row, rows)] == ["mine"]
