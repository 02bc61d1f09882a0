"""The tokens of several turns: what was there is never tokenised again, and only what the model wrote is trained."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_r1.data.prompts import PromptEncoder
from swift_r1.rollout.transcript import Transcript, TurnFault
from tests import tool_templates

QUESTION = {"role": "user", "content": "2+2?"}
AGAIN = {"role": "user", "content": "again"}


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


class Talk:
    """A conversation and the tokenizer's view of it."""

    def __init__(self, tokenizer, messages=(QUESTION,)):
        self.encoder = PromptEncoder(tokenizer)
        self.end = tokenizer.eos_token_id
        self.tokens = Transcript(
            self.ids(self.encoder.render(messages)), messages, self.encoder, [self.end]
        )

    def ids(self, text):
        return list(self.encoder.tokenize(text))

    def says(self, text, end=True):
        ids = self.ids(text) + [self.end] * end
        self.tokens.answer(ids, [-1.0] * len(ids), text)
        return ids

    def trained(self):
        return [
            token
            for token, trained in zip(self.tokens.token_ids, self.tokens.loss_mask, strict=True)
            if trained
        ]


TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(TEXT, st.booleans(), TEXT), min_size=1, max_size=4))
def test_the_model_sees_what_the_template_makes_of_the_conversation(tokenizer, turns):
    """With a token a character, carried tokens and the rendered conversation are the same."""
    talk, messages, written = Talk(tokenizer), [QUESTION], []
    for said, ended, answer in turns:
        written += talk.says(said, ended)
        messages = [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": answer},
        ]
        talk.tokens.follow(messages)
    seen = [*talk.tokens.prompt_token_ids, *talk.tokens.token_ids]
    assert seen == talk.ids(talk.encoder.render(messages))
    assert talk.trained() == written
    values = zip(talk.tokens.logprobs, talk.tokens.loss_mask, strict=True)
    assert all((value == -1.0) == trained for value, trained in values)


def test_tokens_that_the_text_would_not_give_are_carried(tokenizer):
    talk = Talk(tokenizer)
    # its text would tokenise to the tag's one token
    odd = [*talk.ids("<thi"), *talk.ids("nk>"), talk.end]
    assert len(talk.ids("<think>")) == 1
    talk.tokens.answer(odd, [-1.0] * len(odd), "<think>")
    talk.tokens.follow([QUESTION, {"role": "assistant", "content": "<think>"}, AGAIN])
    assert talk.tokens.token_ids[: len(odd)] == odd


THOUGHT = "<think>\nsome\n</think>\n\n4"


def test_thoughts_that_the_template_leaves_out_of_earlier_turns_stay(tokenizer):
    """Also where a scheduler closes a thought, behind which the template would not show the model's text."""
    own = copy.copy(tokenizer)
    own.chat_template = tool_templates.THINKING
    talk = Talk(own)
    messages = [QUESTION, {"role": "assistant", "content": THOUGHT}, AGAIN]
    written = talk.says(THOUGHT)
    assert "some" not in talk.encoder.render(messages)
    talk.tokens.follow(messages)
    written += talk.says("<think>\nmore", end=False)
    messages += [{"role": "assistant", "content": "<think>\nmore\n</think>\n\n5"}, AGAIN]
    talk.tokens.follow(messages)
    written += talk.says("6")
    turn = "<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    read = f"{THOUGHT}{turn}<think>\nmore\n</think>\n\n5{turn}6<|im_end|>"
    assert own.decode(talk.tokens.token_ids) == read and talk.trained() == written


def test_a_turn_goes_on_where_its_text_has_grown(tokenizer):
    talk = Talk(tokenizer)
    talk.says("5")
    talk.tokens.follow([QUESTION, {"role": "assistant", "content": "5. Wait,"}])
    talk.says(" 4")
    # the first end token has left
    assert tokenizer.decode(talk.tokens.token_ids) == "5. Wait, 4<|im_end|>"
    assert tokenizer.decode(talk.trained()) == "5 4<|im_end|>"
    assert talk.tokens.messages == [QUESTION, {"role": "assistant", "content": "5. Wait, 4"}]
    assert len(talk.tokens.turns) == 2 and talk.tokens.sampled_length == len(talk.tokens.token_ids)


def test_what_follows_the_last_turn_is_not_part_of_the_trajectory(tokenizer):
    talk = Talk(tokenizer)
    ids = talk.says("5")
    talk.tokens.follow([QUESTION, {"role": "assistant", "content": "5"}, AGAIN])
    talk.tokens.answer((), (), "")  # no room
    assert talk.tokens.sampled_length == len(ids)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([QUESTION], "2 messages were there, now 1"),
        ([AGAIN, {"role": "assistant", "content": "5"}, AGAIN], "message 0 .user. has changed"),
        (
            [QUESTION, {"role": "assistant", "content": "4"}, AGAIN],
            "message 1 is no longer what the model wrote",
        ),
        ([QUESTION, AGAIN, AGAIN], "message 1 is no longer what the model wrote"),
    ],
)
def test_the_past_cannot_change(tokenizer, messages, why):
    talk = Talk(tokenizer)
    talk.says("5")
    before = list(talk.tokens.token_ids)
    with pytest.raises(TurnFault, match=why):
        talk.tokens.follow(messages)
    assert talk.tokens.token_ids == before


def test_a_template_that_drops_the_last_turn_is_refused(tokenizer):
    talk = Talk(tokenizer)
    talk.says("5")
    render = talk.encoder.render
    talk.encoder.render = lambda messages, tools: render(messages[-1:], tools)
    with pytest.raises(TurnFault, match="the chat template leaves the model's last turn out"):
        talk.tokens.follow([QUESTION, {"role": "assistant", "content": "5"}, AGAIN])


def test_a_scheduler_puts_its_own_tokens_into_a_turn(tokenizer):
    talk = Talk(tokenizer)
    ids = talk.says("5 is it")
    tip = talk.ids(" (check)")
    talk.tokens.revise([*ids[:2], *tip], None)
    talk.tokens.follow([QUESTION, {"role": "assistant", "content": "anything"}])
    talk.says("4")
    assert tokenizer.decode(talk.tokens.token_ids) == "5  (check)4<|im_end|>"
    assert tokenizer.decode(talk.trained()) == "5 4<|im_end|>"
    assert talk.tokens.logprobs[2 : 2 + len(tip)] == [0.0] * len(tip)


def test_masks_leave_tokens_out_and_never_add_any(tokenizer):
    talk = Talk(tokenizer)
    ids = talk.says("5 is")
    with pytest.raises(
        TurnFault, match="trains token 2 of the turn, which the model did not write there"
    ):
        talk.tokens.revise([*ids[:2], *talk.ids("x")], [1, 1, 1])
    with pytest.raises(TurnFault, match="has 1 values for 5 tokens"):
        talk.tokens.revise(None, [1])
    talk.tokens.revise(None, [0, 0, 1, 1, 1])
    assert tokenizer.decode(talk.trained()) == "is<|im_end|>"
    talk.tokens.check_turns([ids], [[1, 1, 0, 1, 1]])
    assert tokenizer.decode(talk.trained()) == "s<|im_end|>"
    with pytest.raises(TurnFault, match="row 0 of response_token_ids are not the tokens of turn 1"):
        talk.tokens.check_turns([ids[1:]], [])
    with pytest.raises(TurnFault, match="there are 2 rows, the model wrote 1 turns"):
        talk.tokens.check_turns([ids, ids], [])
    with pytest.raises(TurnFault, match="turn 1 has 2 values for 5 tokens"):
        talk.tokens.check_turns([], [[1, 1]])


def test_rows_of_a_scheduler_may_hold_what_continues_a_turn(tokenizer):
    talk = Talk(tokenizer)
    first = talk.says("5")[:-1]
    talk.tokens.follow([QUESTION, {"role": "assistant", "content": "5 tip"}])
    tip, second = talk.ids(" tip"), talk.says("4")
    talk.tokens.check_turns([[*first, *tip, *second]], [[1, 0, 0, 0, 0, 0, 1]])
    assert tokenizer.decode(talk.trained()) == "5<|im_end|>"
    with pytest.raises(TurnFault, match="rows of different lengths"):
        talk.tokens.check_turns([[1]], [[1, 1]])
    with pytest.raises(TurnFault, match="the rows end at turn 1, the model wrote 2"):
        talk.tokens.check_turns([first], [])
    talk.tokens.check_turns([[*first, talk.end], second], [])  # the end token that was taken back
    assert talk.tokens.turn_token_ids == (tuple(first), tuple(second))


def routed(talk, count, value):
    """Experts of the next `count` tokens, all the same."""
    talk.tokens.add_routes(np.full((count, 2, 1), value, np.uint8))


def test_a_token_keeps_the_experts_of_its_first_reading(tokenizer):
    """What an engine says of a turn: the tokens from the first unknown one on, without the last that it wrote."""
    talk = Talk(tokenizer)
    assert talk.tokens.routed == 0 and talk.tokens.routes_up_to(0) is None
    prompt = len(talk.tokens.prompt_token_ids)
    first = len(talk.says("4"))
    routed(talk, prompt + first - 1, 1)
    talk.tokens.follow([*talk.tokens.messages, AGAIN])
    asked = prompt + len(talk.tokens.token_ids) - talk.tokens.routed
    second = len(talk.says("5!"))
    routed(talk, asked + second - 1, 2)
    assert talk.tokens.routed == prompt + len(talk.tokens.token_ids) - 1
    found = talk.tokens.routes_up_to(len(talk.tokens.token_ids))[:, 0, 0].tolist()
    assert found == [1] * (prompt + first - 1) + [2] * (asked + second - 1)
    assert len(talk.tokens.routes_up_to(3)) == prompt + 3


def test_tokens_behind_a_revised_one_have_no_experts_yet(tokenizer):
    talk = Talk(tokenizer)
    prompt = len(talk.tokens.prompt_token_ids)
    ids = talk.says("4567")
    routed(talk, prompt + len(ids) - 1, 1)
    talk.tokens.revise([*ids[:2], *talk.ids("xyz")], None)
    assert talk.tokens.routed == prompt + 2


def test_an_end_that_is_taken_back_never_had_experts(tokenizer):
    talk = Talk(tokenizer)
    prompt = len(talk.tokens.prompt_token_ids)
    ids = talk.says("4")
    routed(talk, prompt + len(ids) - 1, 1)
    grown = [*talk.tokens.messages[:-1], {"role": "assistant", "content": "4 or"}]
    talk.tokens.follow(grown)
    assert talk.tokens.routed == prompt + len(ids) - 1
    assert talk.tokens.token_ids == talk.ids("4 or")
