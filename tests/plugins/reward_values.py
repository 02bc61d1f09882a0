"""`python tests/plugins/reward_values.py ours|theirs PLUGIN NAME...`: what rewards of an ms-swift plugin give.

500 values each, as JSON on standard output: loaded by this package, or by ms-swift as its trainer does it.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PIECES = [
    *(
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "<tool_call>",
        "</tool_call>",
        "<response>",
        "</response>",
    ),
    *(
        "<obs>",
        "</obs>",
        "```python\n",
        "```",
        "####",
        "\\boxed{",
        "}",
        " ",
        "\n",
        "3 + 4",
        "7",
        "2 * (3 + 4)",
        "14",
    ),
    *(
        '{"name": "add", "parameters": {"a": 3}}',
        '{"name": "sub", "parameters": {}}',
        "so",
        "1,000",
        "-7",
        "$5.",
    ),
]
WHOLE = [
    "<think>a</think>\n<answer>3 + 4</answer>",
    "<think>a</think> <answer>2 * (3 + 4) = 14</answer>",
    "<think>so</think>\n#### 7",
    "the answer is \\boxed{14}",
    "<think>a</think>\n<answer>\n```python\nprint(7)\n```\n</answer>",
    '<think>a</think>\n<tool_call>\n{"name": "add", "parameters": {"a": 3}}\n</tool_call>',
    "<think>a</think>\n<response>7</response>",
]
GOLD = ["7", "<answer>14</answer>", "#### 7", WHOLE[-2], WHOLE[-1]]


def texts_and_columns() -> tuple[list[str], dict[str, list[Any]]]:
    rng = random.Random(0)
    texts = WHOLE * 10 + [
        "".join(rng.choices(PIECES, k=rng.randint(0, 9))) for _ in range(500 - 10 * len(WHOLE))
    ]
    columns: dict[str, list[Any]] = {
        "solution": [rng.choice(GOLD) for _ in texts],
        "nums": [rng.choice([[3, 4], [2, 3, 4], [1]]) for _ in texts],
        "target": [rng.choice([7, 14, 1]) for _ in texts],
        "verification_info": [{"language": "python", "test_cases": []} for _ in texts],
    }
    return texts, columns


def their_rewards(plugin: str, names: list[str]) -> dict[str, Any]:
    sys.path.insert(0, str(Path(plugin).parent))
    spec = importlib.util.spec_from_file_location("their_plugin", plugin)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    from swift.rewards import orms

    return {name: orms[name](args=None) for name in names}


def our_rewards(plugin: str, names: list[str]) -> dict[str, Any]:
    from swift_r1.plugins import load_plugins
    from swift_r1.rewards.orm import build_reward

    load_plugins([plugin])
    return {name: build_reward(name).function for name in names}


def main(side: str, plugin: str, names: list[str]) -> None:
    rewards = {"ours": our_rewards, "theirs": their_rewards}[side](plugin, names)
    texts, columns = texts_and_columns()
    state = SimpleNamespace(global_step=3, max_steps=10)
    found = {
        name: reward(list(texts), trainer_state=state, **columns)
        for name, reward in rewards.items()
    }
    print(json.dumps(found), file=sys.__stdout__)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
