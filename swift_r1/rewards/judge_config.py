"""What `--judge` says: the address of a language model that judges, what it is asked, and how its answers are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from swift_r1.errors import UsageError, read_yaml, yaml_fault
from swift_r1.wire.urls import keys_in

KEY_VARIABLE = "SWIFT_JUDGE_API_KEY"
PLACEHOLDER = re.compile(r"\{(\w+)\}")
_RUBRIC = "A good answer is correct, complete, and to the point."
_ASKED = {
    "scale": "{rubric}\nExplain your judgement briefly, then end with the score in "
    "double brackets, a number from {low} (worst) to {high} (best): [[score]]",
    "words": "{rubric}\nExplain your judgement briefly, then end with your verdict in "
    "double brackets, one of {words}: [[verdict]]",
}
_SHOWN = "<task>\n{prompt}\n</task>\n\n<answer>\n{completion}\n</answer>"
_EPISODE = "<task>\n{prompt}\n</task>\n\n<episode>\n{episode}\n</episode>"
_OPENING = "You judge an answer to a task."
_OPENING_OF_EPISODES = (
    "You judge the whole course of an assistant's work on a task: what it wrote, the tools that it called and what it "
    "read, in order."
)
_OF_COMPLETIONS = frozenset(("prompt", "completion", "episode"))
_NUMBER = r"\[\[\s*([+-]?\d+(?:\.\d+)?)\s*\]\]"


Otherwise = Literal["invalid", "none"] | float
"""The reward where there is no verdict: an invalid one, no opinion, or a number."""


class JudgeConfig(BaseModel):
    """The content of `--judge`; a key that is not here is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    url: str = Field(pattern=r"^https?://[^@?#]+$")  # of the OpenAI protocol, up to `/v1`
    model: str | None = None  # None: the first that the address lists
    api_key_env: str | None = None  # the environment variable that holds the key
    rubric: str = _RUBRIC
    system: str = ""  # the system message and the question, with `{placeholders}`
    prompt: str = ""
    # the numbers of the worst and the best answer, which become 0 and 1; or the verdicts, with the reward of each
    scale: tuple[float, float] | dict[str, float] = (0.0, 10.0)
    # a pattern whose first group is the score or verdict; its last match counts
    answer: str | None = None
    votes: int = Field(default=1, ge=1, le=64)
    combine: Literal["majority", "median", "mean"] = "majority"
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    max_tokens: int = Field(default=1024, ge=1)
    # characters of an episode that are shown; of a longer one its middle is left out
    episode_length: int = Field(default=60_000, ge=100)
    # seconds of one request; None: --reward_timeout
    timeout: float | None = Field(default=None, gt=0)
    at_once: int = Field(default=16, ge=1)  # requests of one reward process
    invalid: Otherwise = "invalid"  # of an answer that cannot be read
    max_calls: int | None = Field(default=None, ge=0)  # budget of the run
    max_total_tokens: int | None = Field(default=None, ge=0)
    over_budget: Otherwise = "invalid"
    extra: dict[str, Any] = {}  # more fields of each request

    @model_validator(mode="before")
    @classmethod
    def _has_no_key(cls, value: object) -> object:
        for name in keys_in(value):
            if name != "url":  # which has its own rule
                raise ValueError(
                    f"{name}: a key has no place in a file: name its variable in api_key_env"
                )
        return value

    @field_validator("scale", mode="before")
    @classmethod
    def _are_words(cls, value: object) -> object:
        if isinstance(value, dict) and any(isinstance(key, bool) for key in value):
            raise ValueError('YAML reads YES and NO as true and false: write {"YES": 1, "NO": 0}')
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(f"votes {self.votes} are all the same at temperature 0: give one")
        if not isinstance(self.scale, dict) and self.scale[0] == self.scale[1]:
            raise ValueError(
                "scale needs two different numbers: of the worst and of the best answer"
            )
        if isinstance(self.scale, dict) and not self.scale:
            raise ValueError("scale has no verdicts")

        if self.answer is not None:
            try:
                groups = re.compile(self.answer).groups
            except re.error as error:
                raise ValueError(f"answer is no pattern: {error}") from error
            if groups != 1:
                raise ValueError(f"answer has {groups} groups: one is what is read")

        if not {"completion", "episode"} & set(PLACEHOLDER.findall(self.shown())):
            raise ValueError("prompt lacks {completion}")
        return self

    def asked(self, of_episodes: bool = False) -> str:
        """Returns the template of the system message, about single answers or about whole episodes."""
        if self.system:
            return self.system
        opening = _OPENING_OF_EPISODES if of_episodes else _OPENING
        return f"{opening} {_ASKED['words' if self.words else 'scale']}"

    def shown(self, of_episodes: bool = False) -> str:
        """Returns the template of the question, as `asked`."""
        return self.prompt or (_EPISODE if of_episodes else _SHOWN)

    @property
    def words(self) -> dict[str, float]:
        """Returns the verdicts in capitals; empty where numbers are asked for."""
        if not isinstance(self.scale, dict):
            return {}
        return {word.upper(): value for word, value in self.scale.items()}

    @property
    def pattern(self) -> str:
        """Returns what an answer is searched for: its first group is the score or the verdict."""
        words = "|".join(map(re.escape, self.words))
        return self.answer or (rf"(?i)\[\[\s*({words})\s*\]\]" if words else _NUMBER)

    @property
    def columns(self) -> frozenset[str]:
        """Returns what the templates take from the data."""
        named = PLACEHOLDER.findall("\n".join((self.asked(), self.shown(), self.rubric)))
        return frozenset(named) - self.own_words.keys() - _OF_COMPLETIONS

    @property
    def own_words(self) -> dict[str, str]:
        """Returns the placeholders that do not depend on the data, and their texts."""
        low, high = (0.0, 0.0) if isinstance(self.scale, dict) else self.scale
        return {
            "rubric": self.rubric,
            "low": f"{low:g}",
            "high": f"{high:g}",
            "words": ", ".join(self.words),
        }


def judge_text(value: str) -> str:
    """Returns the content of `--judge` as JSON in one line. Raises as `read_judge`."""
    return read_judge(value).model_dump_json(exclude_unset=True)


def read_judge(value: str) -> JudgeConfig:
    """`--judge`: a YAML file, a JSON file or JSON itself. Raises UsageError: it cannot be read, or is not as
    `JudgeConfig` says."""
    import yaml

    where = "--judge" if value.lstrip().startswith("{") else f"--judge {value}"
    try:
        content = read_yaml(
            value if where == "--judge" else Path(value).expanduser().read_text(encoding="utf-8")
        )
        return JudgeConfig.model_validate(content)
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} is not valid YAML or JSON: {yaml_fault(error)}") from error
    except ValidationError as error:
        known = f"there is no such key; known are {', '.join(JudgeConfig.model_fields)}"
        faults = {}
        for fault in error.errors():
            key = "".join(f"{name}: " for name in fault["loc"][:1])
            text = (
                known
                if fault["type"] == "extra_forbidden"
                else fault["msg"].removeprefix("Value error, ")
            )
            faults[key] = f"{where}: {key}{text}"
        raise UsageError(*faults.values()) from error
