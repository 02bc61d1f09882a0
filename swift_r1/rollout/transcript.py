"""The conversation of a scheduler: its messages, and the tokens that they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from swift_r1.data.prompt_templates import behind_turn
from swift_r1.data.prompts import PromptEncoder
from swift_r1.serving.sessions.tokens import ExactTokens
from swift_r1.wire.protocol import FinishReason, Limit


class TurnFault(ValueError):
    """A scheduler asked for something that tokens cannot carry."""


class Transcript(ExactTokens):
    """Keeps the conversation of a scheduler; tokens in `ends` end a turn. `tools` are the prompt's.

    Attributes:
        messages: as the model last saw them, with its last turn.
        text, finish_reason: of the last turn; `length` too where there is no further one (`full`), by this `limit`.
        answers: of each turn, the place of its message among `messages`, its finish reason, and the seconds that it
            took.
        last_message: where the tokens of the model's last message begin, which may be several turns.
        routed: how many of the first tokens, the prompt's included, have experts that the engine chose when it first
            read them.
    """

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        encoder: PromptEncoder,
        ends: Collection[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(prompt_token_ids)
        self.messages = deepcopy([dict(message) for message in messages])
        self.text = ""
        self.finish_reason: FinishReason = "stop"
        self.full = False
        self.limit: Limit | None = None
        self.answers: list[tuple[int, FinishReason, float]] = []
        self.last_message = 0
        self._routes: list[np.ndarray] = []  # one after another, `[tokens, layers, k]`
        self._encoder = encoder
        self._ends = frozenset(ends)
        self._tools = tools
        self._revised = False  # the last turn's tokens are no longer those that its text came from

    def end(self, limit: Limit) -> None:
        """Notes that a limit lets no further turn come."""
        self.full = True
        self.limit = limit
        self.finish_reason = "length"

    def follow(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Adds what follows the model's last turn in `messages`, up to the start of its next one. That turn's text may
        have grown at its end; where nothing follows it, the model goes on with it. Raises TurnFault where anything
        before has changed."""
        place = len(self.messages) - 1
        if len(messages) <= place:
            raise TurnFault(
                f"{len(self.messages)} messages were there, now {len(messages)}: the past cannot change"
            )
        for number, (was, now) in enumerate(zip(self.messages[:place], messages, strict=False)):
            if (was["role"], was["content"]) != (now["role"], now["content"]):
                raise TurnFault(
                    f"message {number} ({was['role']}) has changed: the past cannot change"
                )
        last = messages[place]
        rest = messages[place + 1 :]
        content = last["content"] or ""
        if last["role"] != "assistant" or not (self._revised or content.startswith(self.text)):
            raise TurnFault(
                f"message {place} is no longer what the model wrote: only its end can grow (to change its tokens, "
                "return response_token_ids)"
            )
        added = "" if self._revised else content[len(self.text) :]
        if added or not rest:
            self._take_end_back()
        tail = added + (self._behind(messages, place) if rest else "")
        ids = list(self._encoder.tokenize(tail)) if tail else []
        if ids and self.token_ids and ids[0] == self.token_ids[-1] and ids[0] in self._ends:
            del ids[0]  # the model ended its turn itself
        self.read(ids)
        self.messages = deepcopy([dict(message) for message in messages])

    def answer(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        text: str,
        versions: Sequence[int] | None = None,
        finish_reason: FinishReason = "stop",
        seconds: float = 0.0,
    ) -> None:
        """Adds a turn of the model, which took so many seconds. `text` has no special tokens; `versions` are of the
        weights, one per token."""
        self._revised = False
        if self.messages[-1]["role"] != "assistant":
            self.last_message = len(self.token_ids)
        self.write(token_ids, logprobs, [0] * len(token_ids) if versions is None else versions)
        if self.messages[-1]["role"] == "assistant":
            self.messages[-1]["content"] = text = self.messages[-1]["content"] + text
        else:
            self.messages.append({"role": "assistant", "content": text})
        self.text = text
        self.finish_reason = finish_reason
        self.answers.append((len(self.messages) - 1, finish_reason, seconds))

    @property
    def routed(self) -> int:
        return sum(map(len, self._routes))

    def add_routes(self, routes: np.ndarray | None) -> None:
        """Adds the experts of the tokens behind those that have some; None where nobody asks for them."""
        if routes is not None:
            self._routes.append(routes)

    def routes_up_to(self, end: int) -> np.ndarray | None:
        """Returns the experts of the prompt and of the `end` tokens behind it, as far as they have some; None without
        any."""
        if not self._routes:
            return None
        whole: np.ndarray = np.concatenate(self._routes)
        return whole[: len(self.prompt_token_ids) + end]

    def revise(self, token_ids: Sequence[int] | None, loss_mask: Sequence[int] | None) -> None:
        """Puts `token_ids` in the place of the last turn's, and trains those with a 1 in `loss_mask`; without a mask,
        those up to the first change. Raises TurnFault where the lengths differ, or a token is to be trained that the
        model did not write."""
        start = self.turns[-1].start
        written = self.token_ids[start:]
        logprobs = self.logprobs[start:]
        wanted = written if token_ids is None else list(token_ids)
        same = 0
        while same < min(len(written), len(wanted)) and written[same] == wanted[same]:
            same += 1
        mask = (
            [place < same for place in range(len(wanted))]
            if loss_mask is None
            else [bool(one) for one in loss_mask]
        )
        if len(mask) != len(wanted):
            raise TurnFault(f"response_loss_mask has {len(mask)} values for {len(wanted)} tokens")
        if any(mask[same:]):
            place = same + mask[same:].index(True)
            raise TurnFault(
                f"response_loss_mask trains token {place} of the turn, which the model did not write there"
            )
        self._revised = self._revised or wanted != written
        self.token_ids[start:] = wanted
        self.logprobs[start:] = [*logprobs[:same], *[0.0] * (len(wanted) - same)]
        self.loss_mask[start:] = mask
        self.versions[start:] = [
            *self.versions[start : start + same],
            *[None] * (len(wanted) - same),
        ]
        self.sampled_length = start + same
        known = self.routes_up_to(start + same)
        self._routes = [] if known is None else [known]  # others stand behind these now
        self.turns[-1] = slice(start, len(self.token_ids))

    def check_turns(
        self, token_ids: Sequence[Sequence[int]], loss_mask: Sequence[Sequence[int]]
    ) -> None:
        """Compares the rows that a scheduler returned at its end; a 0 of its mask leaves a token out. A row begins with
        a turn of the model; text added to the turn's end and turns that continue it may follow in it. Raises TurnFault
        where these are not the conversation's tokens."""
        if token_ids and loss_mask and list(map(len, token_ids)) != list(map(len, loss_mask)):
            raise TurnFault(
                "response_token_ids and response_loss_mask have rows of different lengths"
            )
        turn = 0
        for number, row in enumerate(token_ids or loss_mask):
            if turn == len(self.turns):
                raise TurnFault(
                    f"there are {len(token_ids or loss_mask)} rows, the model wrote {len(self.turns)} turns"
                )
            start = self.turns[turn].start
            end = self.turns[turn].start + len(row)
            # 1: an end token that was taken back
            if not token_ids and end - self.turns[turn].stop not in (0, 1):
                length = self.turns[turn].stop - start
                raise TurnFault(
                    f"response_loss_mask of turn {turn + 1} has {len(row)} values for {length} tokens"
                )
            if token_ids and list(row) != self.token_ids[start:end]:
                end -= 1  # except a last end token, which was taken back
                if row[-1] not in self._ends or list(row[:-1]) != self.token_ids[start:end]:
                    raise TurnFault(
                        f"row {number} of response_token_ids are not the tokens of turn {turn + 1}"
                    )
            for place, trained in zip(
                range(start, end), loss_mask[number] if loss_mask else (), strict=False
            ):
                self.loss_mask[place] = self.loss_mask[place] and bool(trained)
            turn += 1
            while turn < len(self.turns) and self.turns[turn].start < end:
                turn += 1
        if (token_ids or loss_mask) and turn < len(self.turns):
            raise TurnFault(f"the rows end at turn {turn}, the model wrote {len(self.turns)}")

    @property
    def turn_token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The model's turns."""
        return tuple(tuple(self.token_ids[span]) for span in self.turns)

    def _take_end_back(self) -> None:
        """The turn goes on behind its end token: that token leaves."""
        if self.token_ids and self.token_ids[-1] in self._ends:
            for values in (self.token_ids, self.logprobs, self.loss_mask, self.versions):
                del values[-1]
            self.sampled_length = min(self.sampled_length, len(self.token_ids))
            self.turns[-1] = slice(self.turns[-1].start, len(self.token_ids))

    def _behind(self, messages: Sequence[Mapping[str, Any]], place: int) -> str:
        behind = behind_turn(
            lambda shown, _opening: self._encoder.render(shown, self._tools), messages, place
        )
        if behind is None:
            raise TurnFault("the chat template leaves the model's last turn out")
        return behind
