"""The reward `judge`: a language model behind an OpenAI address says what completions are worth (`--judge FILE`).

It gives each completion a score or a verdict (Zheng et al. 2023, arXiv:2306.05685), `votes` times (self-consistency,
arXiv:2203.11171).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sqlite3
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_r1.rewards.episode_text import episode_messages, told, without_middle
from swift_r1.rewards.orm import AsyncORM, orms
from swift_r1.rewards.remote import JsonClient, RemoteRewardError

if TYPE_CHECKING:
    from swift_r1.rewards.judge_config import JudgeConfig, Otherwise

STORE = "judge.sqlite"
Messages = list[dict[str, str]]
Question = tuple[str, str]
"""The system message, and the user's."""


class UnreadableAnswer(ValueError):
    """The judge answered without a verdict."""


class OverBudget(RuntimeError):
    """`max_calls` or `max_total_tokens` is spent."""


class Answers:
    """What the judge has answered, by the content of the question, and what it cost: in a file that all reward
    processes of a run share and that a resumed run finds again; without one, in memory."""

    def __init__(self, path: Path | None) -> None:
        # Calls come one after another, maybe from several threads.
        self._db = sqlite3.connect(
            path or ":memory:", timeout=30, isolation_level=None, check_same_thread=False
        )
        self._db.executescript(
            "PRAGMA synchronous=OFF;"
            "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, question TEXT, answer TEXT);"
            "CREATE TABLE IF NOT EXISTS spent (one INTEGER PRIMARY KEY, calls INTEGER, tokens INTEGER);"
            "INSERT OR IGNORE INTO spent VALUES (1, 0, 0)"
        )

    def get(self, key: str) -> str | None:
        """Returns the answer to a question; None where it was not asked yet."""
        row = self._db.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(
        self,
        key: str,
        question: str,
        answer: str,
        tokens: int,
    ) -> None:
        """Keeps an answer, and counts its tokens."""
        self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (key, question, answer))
        self._db.execute("UPDATE spent SET tokens = tokens + ?", (tokens,))

    def take_call(self, config: JudgeConfig) -> bool:
        """Returns whether one more call is within the budget; it is counted then."""
        limits = (config.max_calls, config.max_total_tokens)
        most = [2**62 if limit is None else limit for limit in limits]
        counted = self._db.execute(
            "UPDATE spent SET calls = calls + 1 WHERE calls < ? AND tokens < ?", most
        )
        return counted.rowcount == 1


class Judge(AsyncORM):
    """A language model behind an OpenAI address scores completions (`--judge`).

    Rewards are from 0 to 1, or those of the verdicts. Raises ValueError: constructed without `--judge`, or without the
    key that this names.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        if getattr(args, "judge", None) is None:
            raise ValueError("the reward judge needs --judge FILE")

        from swift_r1.rewards.judge_config import KEY_VARIABLE, read_judge
        from swift_r1.workers.confine import own_key

        self.config: JudgeConfig = read_judge(args.judge)
        self.key = (own_key(self.config.api_key_env or KEY_VARIABLE) or "").strip()
        if self.config.api_key_env is not None and not self.key:
            raise ValueError(
                f"the environment variable {self.config.api_key_env} with the judge's key is not set"
            )
        timeout = float(self.config.timeout or args.reward_timeout)
        self._client = JsonClient(self.key, timeout, patience=timeout)
        folder = Path(getattr(args, "output_dir", None) or ".")
        self.answers = Answers(folder / STORE if (folder / "args.json").is_file() else None)
        self._model = self.config.model
        self._places = asyncio.Semaphore(self.config.at_once)

    async def __call__(
        self, completions: list[str], messages: list[Messages], **columns: Any
    ) -> list[Any]:
        """Returns an exception in the place of an invalid reward. In runs of several turns there are `episode_steps`, and
        whole episodes are judged."""
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}
        rows = []
        for index, completion in enumerate(completions):
            row = {
                name: values[index] for name, values in lists.items() if values[index] is not None
            }
            row |= {"prompt": task_of(messages[index]), "completion": completion}
            rows.append(row | self._episode(row))
        questions = [self._question(row) for row in rows]
        different = list(dict.fromkeys(questions))  # equal completions are one question
        scores = await asyncio.gather(*map(self._score, different))
        score_of = dict(zip(different, scores, strict=True))
        return [score_of[question] for question in questions]

    def _episode(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Returns the texts `prompt` and `episode` of a row: in runs of several turns what came before the model's first
        turn and all that followed, else what was asked and the completion."""
        if "episode_steps" not in row:
            return {"episode": row["completion"]}
        task, course = episode_messages(row["episode_steps"])
        return {"prompt": told(task) if task else row["prompt"], "episode": told(course)}

    async def _score(self, question: Question) -> float | Exception | None:
        """Returns the reward of a completion: that of its votes together, or in the place of one that is not clear."""
        votes = await self._votes(question)
        if not isinstance(votes, list):
            return votes
        if self.config.combine == "median":
            return statistics.median(votes)
        return statistics.fmean(
            statistics.multimode(votes) if self.config.combine == "majority" else votes
        )

    async def _votes(self, question: Question) -> list[float] | float | Exception | None:
        """Returns what the answers say, those that can be read; the reward instead, where most of them say nothing. A
        judge that cannot be reached is always a fault."""
        answers = await asyncio.gather(
            *(self._ask(question, number) for number in range(self.config.votes)),
            return_exceptions=True,
        )
        votes = list[float]()
        causes = list[Exception]()
        for answer in answers:
            try:
                if isinstance(answer, BaseException):
                    raise answer
                votes.append(self._read_score(answer))
            except (RemoteRewardError, OverBudget, UnreadableAnswer) as error:
                causes.append(error)

        if 2 * len(votes) > len(answers):
            return votes

        for cause in causes:
            if isinstance(cause, RemoteRewardError):
                return cause
        meaning: Otherwise = (
            self.config.over_budget if isinstance(causes[0], OverBudget) else self.config.invalid
        )
        if meaning == "invalid":
            return causes[0]
        return None if meaning == "none" else float(meaning)

    async def _ask(self, question: Question, number: int) -> str:
        """Returns the answer to a question, which is asked again for each vote's `number`, the seed.

        Raises:
            OverBudget: it would cost a call more than there may be.
            RemoteRewardError: the judge cannot be reached, or answers with something else.
        """
        config = self.config
        async with self._places:
            if self._model is None:
                self._model = await self._first_model()
            system, user = question
            request = {
                "model": self._model,
                "messages": [
                    {"role": "system", "content": system},
                    {"role": "user", "content": user},
                ],
                "temperature": config.temperature,
                "max_tokens": config.max_tokens,
                "seed": number,
            }
            body = json.dumps(request | config.extra)
            key = hashlib.sha256(body.encode()).hexdigest()
            known = self.answers.get(key)
            if known is not None:
                return known

            if not self.answers.take_call(config):
                raise OverBudget("the budget of --judge is spent")
            answer = await self._request("/chat/completions", body.encode())
            try:
                text = (
                    str(answer["choices"][0]["message"]["content"] or "")
                    .encode(errors="replace")
                    .decode()
                )
                tokens = int((answer.get("usage") or {}).get("total_tokens") or 0)
            except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
                raise RemoteRewardError(
                    f"{config.url} did not answer with a chat completion"
                ) from error
            if config.max_total_tokens is not None and tokens <= 0:
                raise RemoteRewardError(
                    f"{config.url} does not say total_tokens, which its budget counts"
                )
            self.answers.put(key, body, text, tokens)
            return text

    async def _first_model(self) -> str:
        """Returns the name of the first model that the address lists. Raises RemoteRewardError."""
        try:
            return str((await self._request("/models"))["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise RemoteRewardError(
                f"{self.config.url}/models lists no model: give `model`"
            ) from error

    async def _request(self, path: str, body: bytes | None = None) -> Any:
        return await self._client.ask(self.config.url.rstrip("/") + path, body)

    def _question(self, row: Mapping[str, Any]) -> Question:
        """Returns the templates with what the row has in its columns. Raises ValueError: it lacks what they name."""
        from swift_r1.rewards.judge_config import PLACEHOLDER

        words = {**self.config.own_words, **row}

        def filled(template: str) -> str:
            return PLACEHOLDER.sub(word, template)

        def word(placeholder: re.Match[str]) -> str:
            name = placeholder[1]
            if name not in words:
                raise ValueError(f"the row has no {name}, which a template of --judge names")
            return str(words[name])

        of_episodes = "episode_steps" in row
        if of_episodes:
            words["episode"] = without_middle(row["episode"], self.config.episode_length)
        words["rubric"] = filled(str(words["rubric"]))
        return (
            filled(self.config.asked(of_episodes)),
            filled(self.config.shown(of_episodes)),
        )

    def _read_score(self, text: str) -> float:
        """Returns the score from 0 to 1, or that of the verdict, with which an answer ends. Raises UnreadableAnswer."""
        marks = re.findall(self.config.pattern, text)
        if not marks:
            raise unreadable("has no verdict", text)
        mark = marks[-1]
        if isinstance(self.config.scale, dict):
            if mark.upper() not in self.config.words:
                raise unreadable(f"says {mark}, which scale does not have", text)
            return self.config.words[mark.upper()]

        worst, best = self.config.scale
        try:
            share = (float(mark) - worst) / (best - worst)
        except ValueError as error:
            raise unreadable(f"says {mark}, which is not a number", text) from error

        if not 0 <= share <= 1:
            raise unreadable(f"says {mark}, which is outside of the scale", text)
        return share


def task_of(conversation: Sequence[Mapping[str, Any]]) -> str:
    """Returns what was asked: the only message before the completion, or all of them with who said them."""
    if conversation and conversation[-1].get("role") == "assistant":
        conversation = conversation[:-1]
    return told(conversation)


def unreadable(what: str, text: str) -> UnreadableAnswer:
    """Returns the error that says what an answer is, with the end of it."""
    return UnreadableAnswer(f"the judge's answer {what}: {' '.join(text.split())[-160:]!r}")


orms["judge"] = Judge
