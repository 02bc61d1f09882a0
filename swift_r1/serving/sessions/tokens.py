"""The tokens of a conversation, as the model read and wrote them. Nothing is tokenised twice: the text of a token
sequence need not tokenise to that sequence."""

from __future__ import annotations

from collections.abc import Sequence


class ExactTokens:
    """Keeps the tokens behind a conversation's first prompt: a session's calls, or the turns of a scheduler.

    Example: the model answers prompt P0 with A0, reads E0, and goes on with A1, by newer weights:
        token_ids = A0 + E0 + A1
        logprobs = [-0.1, -0.4] + [0.0] + [-1.2]
        loss_mask = [True, True] + [False] + [True]
        versions = [4, 4] + [None] + [5]
        turns = [slice(0, 2), slice(3, 4)]
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []  # the engine's; 0 for tokens that the model did not write
        self.loss_mask: list[bool] = []  # what the model wrote, except what a scheduler leaves out
        self.versions: list[int | None] = []  # of the weights that wrote the token
        self.turns: list[slice] = []  # of the model
        # tokens up to the last one that the model wrote: nothing behind it was answered
        self.sampled_length = 0

    def read(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that the model did not write."""
        self._extend(token_ids, [0.0] * len(token_ids), [None] * len(token_ids), own=False)

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Adds a turn of the model, with the version of the weights that wrote each token."""
        start = len(self.token_ids)
        self._extend(token_ids, logprobs, versions, own=True)
        self.turns.append(slice(start, len(self.token_ids)))
        if token_ids:
            self.sampled_length = len(self.token_ids)

    def _extend(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int | None],
        own: bool,
    ) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.versions += versions
        self.loss_mask += [own] * len(token_ids)
