"""Does `swift forecast` tell what then happens? A forecast, then the run with other prompts.

    python examples/mini/make_model.py countdown models/mini/countdown
    python benchmarks/forecast.py                      # all cases, half an hour on two cores
    python benchmarks/forecast.py demo noise           # some; what was measured before is kept in --output_dir

`predicted` and `happened` are shares of groups with a signal: by the forecast, with its 95 % interval over prompts, and
in the first steps of the run. They agree where they differ by at most 1.96 standard errors of their difference.
`reward` is the mean of the first function over the first and the last third of the run. The verdict is right where that
mean rises, by more than two standard errors over steps, if and only if the forecast is `learnable`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
SWIFT = (sys.executable, "-m", "swift_r1")
MINI = "models/mini/countdown"
SMOLLM2 = "models/smollm2-135m"
HOPELESS = 6  # steps of a run that cannot learn
FIRST = 5  # steps that the share is compared with: later ones are of other weights
COMMON = (
    *("--rlhf_type", "grpo", "--use_vllm", "false", "--torch_dtype", "float32", "--gradient_checkpointing", "false"),
    *("--lr_scheduler_type", "constant", "--num_train_epochs", "100", "--weight_decay", "0"),
)
OF_MINI = (
    *("--external_plugins", str(EXAMPLES / "countdown_demo" / "plugin.py"), str(HERE / "forecast_plugin.py")),
    *("--dataset", "countdown_mini", "--learning_rate", "5e-4"),
)
OF_SMOLLM2 = ("--num_generations", "8", "--per_device_train_batch_size", "32")
TWO = str(EXAMPLES / "smollm2_countdown" / "plugin.py")


@dataclass(frozen=True)
class Case:
    """A run, and how much of it is tried."""

    model: str
    flags: tuple[str, ...]
    prompts: int = 24
    completions: int = 16


def mini(*flags: str, length: int = 64, size: int = 8, steps: int = 18) -> Case:
    more = ("--max_completion_length", str(length), "--num_generations", str(size), "--max_steps", str(steps))
    batch = ("--per_device_train_batch_size", "64" if steps > HOPELESS else "32")
    return Case(MINI, (*OF_MINI, *more, *batch, *flags))


def smollm2(plugin: str, *flags: str, steps: int = HOPELESS) -> Case:
    more = ("--external_plugins", plugin, "--max_steps", str(steps))
    return Case(SMOLLM2, (*OF_SMOLLM2, *more, *flags), prompts=16, completions=16)


CASES = {
    "demo": mini("--reward_funcs", "countdown", "format", "--reward_weights", "1", "0.1"),
    "one reward": mini("--reward_funcs", "countdown"),
    "groups of 2": mini("--reward_funcs", "countdown", size=2),
    "unreachable": mini("--reward_funcs", "unreachable", steps=HOPELESS),
    "always the same": mini("--reward_funcs", "same", steps=HOPELESS),
    "cut off": mini("--reward_funcs", "countdown", length=12, steps=HOPELESS),
    "form alone": mini("--reward_funcs", "unreachable", "format", steps=HOPELESS),
    "form as the task": mini("--reward_funcs", "format"),
    "noise": mini("--reward_funcs", "noise", steps=9),
    "SmolLM2, two numbers": smollm2(
        TWO,
        *("--dataset", "countdown_two", "--reward_funcs", "solved", "answer_tag", "--reward_weights", "1", "0.1"),
        *("--response_prefix", "<answer>", "--stop_words", "</answer>", "--max_completion_length", "16"),
        *("--learning_rate", "1e-5"),
        steps=12,
    ),
    "SmolLM2, sums": smollm2(
        str(HERE / "forecast_plugin.py"),
        *("--dataset", "sums_two", "--reward_funcs", "sum", "--learning_rate", "1e-5"),
        *("--response_prefix", "<answer>", "--stop_words", "</answer>", "--max_completion_length", "8"),
    ),
    "SmolLM2, Countdown": smollm2(
        str(HERE.parent / "plugins" / "countdown.py"),
        *("--dataset", "countdown#2000", "--reward_funcs", "external_countdown", "format"),
        *("--max_completion_length", "32", "--learning_rate", "1e-5"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)} [all]")
    parser.add_argument("--output_dir", type=Path, default=Path("output/forecast"))
    parser.add_argument("--mini", default=MINI, help=f"the mini model's folder [{MINI}]")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}")
    for name in args.cases or CASES:
        if not (args.output_dir / f"{name}.json").exists():
            measure(name, args.output_dir, args.mini)
    found = {name: path for name in CASES if (path := args.output_dir / f"{name}.json").exists()}
    show({name: json.loads(path.read_text()) for name, path in found.items()}, args.markdown)
    return 0


def measure(name: str, folder: Path, mini_model: str) -> None:
    """Forecasts and runs a case; writes what was found to a file of its name."""
    case, run, file = CASES[name], folder / name / "run", folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    model = mini_model if case.model == MINI else case.model
    flags = [*COMMON, *case.flags, "--model", model]
    tried = ["--num_prompts", str(case.prompts), "--num_completions", str(case.completions), "--seed", "1"]
    said = folder / f"{name}.forecast.json"
    subprocess.run([*SWIFT, "forecast", *flags, *tried, "--json", str(said)], check=True)
    kept = ["--output_dir", str(run), "--add_version", "false", "--save_strategy", "no", "--report_to", "none"]
    kept += ["--logging_steps", "1", "--log_tokens", "none", "--seed", "2"]
    subprocess.run([*SWIFT, "rlhf", *flags, *kept], check=True)
    forecast = json.loads(said.read_text())
    lines = [json.loads(line) for line in (run / "logging.jsonl").read_text().splitlines()]
    groups = FIRST * int(forecast["groups_per_step"])
    task = forecast["rewards"][0]["name"]
    rewards = [line[f"rewards/{task}/mean"] for line in lines]
    seconds = [line["time/step"] for line in lines[1:]]
    result = {
        "level": forecast["level"],
        "predicted": forecast["own_signal"],
        "happened": 1 - fmean(line["frac_reward_zero_std"] for line in lines[:FIRST]),
        "groups": groups,
        "rewards": rewards,
        "truncated": [forecast["truncated"]["value"], lines[0]["completions/clipped_ratio"]],
        "seconds": [forecast["cost"]["step"], fmean(seconds)],
        "changes": [one["kind"] for one in forecast["changes"]],
    }
    file.write_text(json.dumps(result, indent=2) + "\n")


def agrees(found: dict[str, Any]) -> bool:
    """Whether predicted and actual share of groups differ by no more than chance explains."""
    predicted, happened, groups = found["predicted"], found["happened"], found["groups"]
    spread = (predicted["high"] - predicted["low"]) / 2 / 1.96
    return abs(predicted["value"] - happened) <= 1.96 * math.sqrt(spread**2 + happened * (1 - happened) / groups)


def rises(rewards: list[float]) -> bool:
    third = len(rewards) // 3
    first, last = rewards[:third], rewards[-third:]
    error = math.sqrt((variance(first) + variance(last)) / third)
    return fmean(last) - fmean(first) > 2 * error


def show(cases: dict[str, dict[str, Any]], markdown: bool) -> None:
    heads = [
        "run",
        "predicted",
        "happened",
        "agree",
        "verdict",
        "reward",
        "right",
        "s a step: forecast, run",
        "changes",
    ]
    rows = []
    for name, one in cases.items():
        predicted, third = one["predicted"], len(one["rewards"]) // 3
        between = f"{100 * predicted['low']:.0f} to {100 * predicted['high']:.0f}"
        right = (one["level"] == "learnable") == rises(one["rewards"])
        rows.append(
            [
                name,
                f"{100 * predicted['value']:.0f} % ({between})",
                f"{100 * one['happened']:.0f} % of {one['groups']}",
                "yes" if agrees(one) else "no",
                one["level"],
                f"{fmean(one['rewards'][:third]):.2f} to {fmean(one['rewards'][-third:]):.2f}",
                "yes" if right else "no",
                ", ".join(f"{seconds:.1f}" for seconds in one["seconds"]),
                ", ".join(one["changes"][:2]),
            ]
        )
    if markdown:
        print("\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows]))
        return
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    Console(width=180).print(table)


if __name__ == "__main__":
    sys.exit(main())
