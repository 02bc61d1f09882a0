"""`gymnasium:ID`: environments of Gymnasium whose observations can be read and whose actions can be written.

`--env_args` are keywords of `gymnasium.make`, and `actions` (names of the actions, in their order).
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

from swift_r1.errors import UsageError, describe, one_line
from swift_r1.plugins.agents import AgentResult
from swift_r1.plugins.environments.base import EnvironmentAgent, Row, Script, seed_of, seed_rows
from swift_r1.plugins.environments.chat import Chat, with_text

_OWN = ("actions",)
_TURNS = 100  # of an environment without a limit of steps; replies without an action count too
_STYLED = re.compile(r"\x1b\[(?P<style>[\d;]*)m(?P<text>.*?)\x1b\[0m", re.DOTALL)
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class GymnasiumAgent(EnvironmentAgent):
    """The model reads an observation and writes an action, turn after turn. An episode's reward is the sum of its
    steps'; `turn_rewards` has each turn's."""

    @classmethod
    def prepare(cls) -> None:
        cls._made().close()

    @classmethod
    def rows(cls, split: str, count: int | None) -> Iterator[Row]:
        environment = cls._made()
        actions = _actions(environment, cls.args.get("actions"))
        text = f"{_about(environment)}\n\n{_asked(actions)}"
        environment.close()
        yield from seed_rows(text, split, count)

    @classmethod
    def scripts(cls, own: Row) -> dict[str, Script]:
        actions = _actions(cls._made(), cls.args.get("actions"))
        return {"random actions": lambda chance: chance.choice(actions or ["look", "wait"])}

    async def play(self, client: Any, row: Row, own: Row) -> AgentResult:
        environment = self._made()
        actions = _actions(environment, self.args.get("actions"))
        observation, _ = environment.reset(seed=own.get("seed", seed_of(row)))
        chat = Chat(client, with_text(row["messages"], _text(environment, observation)))
        most = environment.spec.max_episode_steps or _TURNS
        rewards: list[float] = []
        result = {"steps": 0, "invalid_actions": 0, "terminated": False, "truncated": False}
        while len(rewards) < most:
            message = await chat.turn()
            if message is None:
                break
            action = _action(message["content"], actions)
            if action is None:
                result["invalid_actions"] += 1
                rewards.append(0.0)
                chat.messages.append(
                    {"role": "user", "content": f"That is no action. {_asked(actions)}"}
                )
                continue
            start = getattr(environment.action_space, "start", 0)
            step = environment.step(action if isinstance(action, str) else action + start)
            observation, reward, result["terminated"], result["truncated"], _ = step
            rewards.append(float(reward))
            result["steps"] += 1
            if result["terminated"] or result["truncated"]:
                break
            chat.messages.append({"role": "user", "content": _text(environment, observation)})
        environment.close()
        result["truncated"] |= not result["terminated"]
        return {
            "reward": sum(rewards),
            "turn_rewards": rewards,
            **{name: float(n) for name, n in result.items()},
        }

    @classmethod
    def _made(cls) -> Any:
        import gymnasium

        args = {name: value for name, value in cls.args.items() if name not in _OWN}
        try:
            module, _, name = cls.name.rpartition(":")
            if module:
                importlib.import_module(module)  # it registers its environments
            spec = gymnasium.spec(name)
            made: Any = spec.entry_point
            made = made if callable(made) else gymnasium.envs.registration.load_env_creator(made)
            # it can write itself down
            if "ansi" in getattr(made, "metadata", {}).get("render_modes", ()):
                args.setdefault("render_mode", "ansi")
            return gymnasium.make(name, **args)
        except gymnasium.error.Error as error:
            raise UsageError(f"--env gymnasium:{cls.name}: {one_line(error)}") from error
        except Exception as error:  # the environment's
            raise UsageError(f"--env gymnasium:{cls.name}: {describe(error)}") from error


def _actions(environment: Any, names: list[str] | None) -> list[str] | None:
    """Returns the names of the actions in their order; None where any text is an action. Raises UsageError for other
    spaces, and names that are not as many as the actions."""
    from gymnasium import spaces

    space = environment.action_space
    where = f"--env gymnasium:{environment.spec.id}"
    if isinstance(space, spaces.Text):
        return None
    if not isinstance(space, spaces.Discrete):
        raise UsageError(
            f"{where}: its actions are {space}, which nobody writes; Discrete and Text can be played"
        )
    if environment.render_mode != "ansi" and not _readable(environment.observation_space):
        raise UsageError(
            f"{where}: its observations are {environment.observation_space}, which is not text"
        )
    count = int(space.n)
    if names is not None and len(names) != count:
        raise UsageError(f"{where}: --env_args has {len(names)} actions, the environment {count}")
    return names or _documented(environment, count) or [str(number) for number in range(count)]


def _documented(environment: Any, count: int) -> list[str] | None:
    """Returns the names of the actions by the documentation of Gymnasium's own environments: `- 0: Move left`, and so
    on."""
    found = re.findall(
        r"^\s*- (\d+): (.+)$", _section(environment, "## Action Space"), re.MULTILINE
    )
    numbers = [int(number) for number, _ in found]
    return [name.strip() for _, name in found] if numbers == list(range(count)) else None


def _readable(space: Any) -> bool:
    """Returns whether values of a space are short enough as JSON."""
    from gymnasium import spaces

    if isinstance(space, spaces.Tuple):
        return all(_readable(one) for one in space.spaces)
    if isinstance(space, spaces.Dict):
        return all(_readable(one) for one in space.spaces.values())
    if isinstance(space, spaces.Box):
        return len(space.shape) < 3 and space.dtype != "uint8"  # not a picture
    return isinstance(
        space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text
    )


def _about(environment: Any) -> str:
    """Returns what an environment is by its documentation, and what an observation is, where that is not drawn."""
    titles = (
        ("", "## Description")
        if environment.render_mode == "ansi"
        else ("", "## Description", _OBSERVATION)
    )
    parts = {title: _section(environment, title).strip().partition("\n\n")[0] for title in titles}
    parts["## Description"] *= not parts[""]
    texts = [" ".join(part.split()) for part in parts.values() if part]
    return "\n".join(texts) or f"You play {environment.spec.id}."


_OBSERVATION = "## Observation Space"


def _section(environment: Any, title: str) -> str:
    """Returns a section of the documentation of its class; without a title what is above all titles."""
    text = f"\n{inspect.getdoc(type(environment.unwrapped)) or ''}"
    text = re.sub(r"(?m)^ (?=\S)", "", text)
    return (text.partition(f"\n{title}\n")[2] if title else text).partition("\n## ")[0]


def _asked(actions: list[str] | None) -> str:
    if actions is None:
        return "Answer with your next command and nothing else."
    listed = ", ".join(
        f"{number} ({name})" if name != str(number) else name for number, name in enumerate(actions)
    )
    return f"Answer with the number of your next action: {listed}."


def _action(reply: str, actions: list[str] | None) -> str | int | None:
    """Returns the last number of an action that a reply has, else the last name; None where it has neither."""
    if actions is None:
        return reply.strip() or None
    numbers = [
        int(found)
        for found in re.findall(r"(?<![\w.])\d{1,9}(?![\w.]*\w)", reply)
        if int(found) < len(actions)
    ]
    if numbers:
        return numbers[-1]
    # Of names that are part of another the longest.
    names = {name.lower(): number for number, name in enumerate(actions) if name != str(number)}
    either = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    found = re.findall(rf"(?<!\w)(?:{either})(?!\w)", reply.lower()) if names else []
    return names[found[-1]] if found else None


def _text(environment: Any, observation: Any) -> str:
    """Returns what is drawn, where the environment draws with characters; else the observation, as JSON if it is no
    text."""
    if isinstance(observation, str):
        return observation
    if environment.render_mode == "ansi":
        return _STYLED.sub(_plain, str(environment.render())).strip("\n")
    return json.dumps(observation, default=lambda value: value.tolist())


def _plain(styled: re.Match[str]) -> str:
    """Puts text with a background, which is where the player is, in brackets, and names other colours."""
    codes = [int(code) for code in styled["style"].split(";") if code]
    text = styled["text"]
    if any(40 <= code < 48 for code in codes):
        return f"[{text}]"
    colours = [_COLOURS[code - 30] for code in codes if 30 <= code < 38]
    return f"{text}({colours[0]})" if colours else text
