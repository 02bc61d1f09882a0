"""docs/python.md: what a plugin's author and a user of the library import."""

from __future__ import annotations

import importlib
from dataclasses import fields

from stubs import stub
from text import MADE, link, table

from swift_r1.algorithms.config import LossConfig
from swift_r1.plugins.import_names import IMPORT_NAMES, Missing

_INTRODUCTION = f"""{MADE}
# Python API

What may be imported, as the source declares it. [plugins.md](plugins.md) explains what plugins are made of, with whole
examples. Importing `swift_r1` loads neither torch nor vLLM. Everything else in the package may change from one version
to the next.
"""
_PLUGINS = "The same names can be imported from ms-swift's modules, in plugin files ([below](#the-names-of-ms-swift))."
_SECTIONS: dict[str, tuple[str, str, str]] = {
    "Rewards": ("swift_r1", "ORM AsyncORM orms", f"[rewards.md](rewards.md). {_PLUGINS}"),
    "Graders": (
        "swift_r1.rewards.graders",
        "Grade grade_countdown grade_gsm8k grade_math",
        "Functions that a reward may call. No completion makes one of them raise ([rewards.md](rewards.md)).",
    ),
    "Datasets": (
        "swift_r1",
        "DatasetMeta SubsetDataset register_dataset RowPreprocessor ResponsePreprocessor AlpacaPreprocessor "
        "MessagesPreprocessor AutoPreprocessor",
        "[datasets.md](datasets.md).",
    ),
    "Samplers": ("swift_r1", "Sampler Outcome samplers", "[plugins.md](plugins.md#samplers)."),
    "Tools and agents": (
        "swift_r1",
        "tools Agent agents",
        "[tools.md](tools.md), [agents.md](agents.md).",
    ),
    "Several turns": (
        "swift_r1.plugins.rollouts",
        "MultiTurnScheduler RolloutScheduler multi_turns Env envs ContextManager context_managers",
        "In plugins `from swift.rollout import ...` ([plugins.md](plugins.md#several-turns)).",
    ),
    "Requests and answers of schedulers": (
        "swift_r1.plugins.protocol",
        "RolloutInferRequest InferRequest RequestConfig RolloutOutput ChatCompletionResponse "
        "ChatCompletionResponseChoice ChatMessage",
        "In plugins `from swift.infer_engine.protocol import ...`.",
    ),
    "Advantages": (
        "swift_r1.algorithms.advantages",
        "group_advantages turn_advantages groups_without_signal Advantages",
        "Pure functions on tensors, as all algorithms; they raise ValueError for shapes that do not fit together and "
        "values out of range. `examples/minimal_grpo.py` is a whole run made of them. [algorithms.md](algorithms.md) "
        "has the formulas.",
    ),
    "The policy's loss": (
        "swift_r1.algorithms.losses",
        "policy_loss LossOutput top_entropy_threshold",
        "Its `LossConfig` is in `swift_r1.algorithms.config`.",
    ),
    "Sums over an optimizer step": (
        "swift_r1.algorithms.aggregation",
        "loss_normalizer sum_metrics mean_metrics drop_truncated",
        "Losses and metrics of micro-batches add up.",
    ),
    "PPO": (
        "swift_r1.algorithms.ppo",
        "PPOConfig ppo_targets gae token_rewards value_loss whiten",
        "Advantages of tokens by a critic, and its loss.",
    ),
    "Talking to a rollout server": (
        "swift_r1.wire.client",
        "RolloutClient",
        "The messages are those of [http.md](http.md#messages), in `swift_r1.wire.protocol`.",
    ),
    "Errors": (
        "swift_r1.errors",
        "SwiftError UsageError ServerUnreachable PortTaken RunFailed",
        "What the library raises for a user's fault. Each has the exit code of [files.md](files.md#exit-codes).",
    ),
}
_INNER = {"RolloutClient": ("wait", "answer", "watch", "call", "called", "drop_connections")}


def page() -> str:
    parts = [
        _INTRODUCTION,
        *(f"- {link(one)}" for one in (*_SECTIONS, "The names of ms-swift")),
        "",
    ]
    for title, (module, names, about) in _SECTIONS.items():
        importlib.import_module(module)
        parts += [f"## {title}", "", about, ""]
        for name in names.split():
            getattr(importlib.import_module(module), name)  # it may be loaded when it is asked for
            parts += [
                f"### {name}",
                "",
                f"`from {module} import {name}`",
                "",
                "```python",
                stub(module, name, _INNER.get(name, ())),
                "```",
                "",
            ]
            parts += _settings() if name == "LossConfig" else []
    return "\n".join([*parts, _names_of_ms_swift()])


def _settings() -> list[str]:
    """Returns the fields of `LossConfig` that the files of methods declare."""
    own = [item for item in fields(LossConfig) if item.metadata]
    rows = [
        (f"`{item.name}`", f"`{item.type}`", f"`{item.default}`", item.metadata["help"])
        for item in own
    ]
    return [
        "Its fields that one method alone reads:",
        "",
        table(("field", "type", "default", "meaning"), rows),
        "",
    ]


def _names_of_ms_swift() -> str:
    rows, stand_ins = [], dict[str, str]()
    for module, names in IMPORT_NAMES.items():
        there = [name for name, entry in sorted(names.items()) if not isinstance(entry, Missing)]
        rows.append((f"`{module}`", ", ".join(f"`{name}`" for name in there)))
        stand_ins |= {
            name: entry.instead for name, entry in names.items() if isinstance(entry, Missing)
        }
    said = sorted((why, name) for name, why in stand_ins.items())
    instead = {why: [f"`{name}`" for other, name in said if other == why] for why, _ in said}
    return f"""## The names of ms-swift

In plugin files, of version 3 and of version 4, with or without ms-swift installed.

{table(("module", "names"), rows)}

These can be imported and derived from, and fail where they are used:

{table(("names", "instead"), ((", ".join(names), why) for why, names in instead.items()))}
"""
