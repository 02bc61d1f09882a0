"""Does `swift forecast` tell what then happens? A forecast, then the run with other prompts.

    examples/mini/make_model.sh countdown models/mini/countdown
    python benchmarks/forecast.py                      # all cases, half an hour on two cores
    python benchmarks/forecast.py demo noise           # some; what was measured before is kept in --output_dir
    python benchmarks/forecast.py --run output/demo/v0-20261122-204759   # forecast from its first round, no model

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from rich.console import Console
from rich.table import Table

from swift_r1.flags import Plan, RlhfArguments
from swift_r1.lab.forecast.outlook import outlook
from swift_r1.lab.forecast.show import to_json
from swift_r1.lab.forecast.verdict import verdict
from swift_r1.record.metrics import read_json_lines

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent / "examples"
SWIFT = (sys.executable, "-m", "swift_r1")
MINI = "models/mini/countdown"
SMOLLM2 = "models/smollm2-135m"
HOPELESS = 6  # steps of a run that cannot learn
FIRST = 5  # steps that the share is compared with: later ones are of other weights
COMMON = (
    *(
        "--rlhf_type",
        "grpo",
        "--use_vllm",
        "false",
        "--torch_dtype",
        "float32",
        "--gradient_checkpointing",
        "false",
    ),
    *("--lr_scheduler_type", "constant", "--num_train_epochs", "100", "--weight_decay", "0"),
)
OF_MINI = (
    *(
        "--external_plugins",
        str(EXAMPLES / "countdown_demo" / "plugin.py"),
        str(HERE / "forecast_plugin.py"),
    ),
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
    more = (
        "--max_completion_length",
        str(length),
        "--num_generations",
        str(size),
        "--max_steps",
        str(steps),
    )
    batch = ("--per_device_train_batch_size", "64" if steps > HOPELESS else "32")
    return Case(MINI, (*OF_MINI, *more, *batch, *flags))


def smollm2(plugin: str, *flags: str, steps: int = HOPELESS) -> Case:
    more = ("--external_plugins", plugin, "--max_steps", str(steps))
    return Case(SMOLLM2, (*OF_SMOLLM2, *more, *flags), prompts=16, completions=16)


def sums(dataset: str, steps: int) -> Case:
    more = (
        "--dataset",
        dataset,
        "--reward_funcs",
        "sum",
        "--learning_rate",
        "1e-5",
        "--max_completion_length",
        "8",
    )
    ends = ("--response_prefix", "<answer>", "--stop_words", "</answer>")
    return smollm2(str(HERE / "forecast_plugin.py"), *more, *ends, steps=steps)


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
        *(
            "--dataset",
            "countdown_two",
            "--reward_funcs",
            "solved",
            "answer_tag",
            "--reward_weights",
            "1",
            "0.1",
        ),
        *(
            "--response_prefix",
            "<answer>",
            "--stop_words",
            "</answer>",
            "--max_completion_length",
            "16",
        ),
        *("--learning_rate", "1e-5"),
        steps=12,
    ),
    "SmolLM2, sums of one digit": sums("sums_one", 12),
    "SmolLM2, sums": sums("sums_two", HOPELESS),
    "SmolLM2, Countdown": smollm2(
        str(HERE.parent / "plugins" / "countdown.py"),
        *("--dataset", "countdown#2000", "--reward_funcs", "external_countdown", "format"),
        *("--max_completion_length", "32", "--learning_rate", "1e-5"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)} [all]")
    parser.add_argument("--output_dir", type=Path, default=Path("output/forecast"))
    parser.add_argument("--run", type=Path, help="a run that has been made, instead of cases")
    parser.add_argument("--name", help="what the table calls that run [its folder]")
    parser.add_argument("--mini", default=MINI, help=f"the mini model's folder [{MINI}]")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}")
    if args.run is not None:
        measure_past(args.run, args.output_dir / f"{args.name or args.run.name}.json")
    for name in [] if args.run is not None else args.cases or CASES:
        if not (args.output_dir / f"{name}.json").exists():
            measure(name, args.output_dir, args.mini)
    found = [path for path in sorted(args.output_dir.glob("*.json")) if path.suffixes == [".json"]]
    show({path.stem: json.loads(path.read_text()) for path in found}, args.markdown)
    return 0


def measure(name: str, folder: Path, mini_model: str) -> None:
    """Forecasts and runs a case; writes what was found to a file of its name."""
    case, run = CASES[name], folder / name / "run"
    flags = [*COMMON, *case.flags, "--model", mini_model if case.model == MINI else case.model]
    forecast = forecast_of(flags, folder / f"{name}.forecast.json", case.prompts, case.completions)
    kept = [
        "--output_dir",
        str(run),
        "--add_version",
        "false",
        "--save_strategy",
        "no",
        "--report_to",
        "none",
    ]
    kept += ["--logging_steps", "1", "--log_tokens", "none", "--seed", "2"]
    subprocess.run([*SWIFT, "rlhf", *flags, *kept], check=True)
    compare(forecast, run, folder / f"{name}.json")


def measure_past(run: Path, file: Path) -> None:
    """Of a run that has been made: its first round is of the base model, and tells of the steps after it."""
    content = json.loads((run / "args.json").read_text())
    args = RlhfArguments.from_dict(content["args"])
    rows = [
        {"tokens": 0} | row
        for row in read_json_lines(run / "completions.jsonl")
        if row["step"] == 1
    ]
    first = read_json_lines(run / "logging.jsonl")
    line = next(one for one in first if "loss" in one)
    part = {
        "prompts": len({row["group"] for row in rows}),
        "generate": line["time/generate"],
        "reward": 0.0,
    }
    found = {"parts": [part], "steps": [line], "fault": None, "invalid": {}}
    seen = outlook(rows, found, args, Plan(**content["plan"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    compare(to_json(seen, verdict(seen, args), ""), run, file, since=1)


def forecast_of(flags: Sequence[str], file: Path, prompts: int, completions: int) -> dict[str, Any]:
    file.parent.mkdir(parents=True, exist_ok=True)
    tried = ["--num_prompts", str(prompts), "--num_completions", str(completions), "--seed", "11"]
    subprocess.run([*SWIFT, "forecast", *flags, *tried, "--json", str(file)], check=True)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def compare(forecast: dict[str, Any], run: Path, file: Path, since: int = 0) -> None:
    """Writes what was forecast and what happened in the steps after the first `since`."""
    lines = [json.loads(line) for line in (run / "logging.jsonl").read_bytes().splitlines()]
    lines = [line for line in lines if "loss" in line][since:]  # not those of evaluations
    task = forecast["rewards"][0]["name"]
    result = {
        "level": forecast["level"],
        "predicted": forecast["own_signal"],
        "happened": 1 - fmean(line["frac_reward_zero_std"] for line in lines[:FIRST]),
        "groups": FIRST * int(forecast["groups_per_step"]),
        "rewards": [line[f"rewards/{task}/mean"] for line in lines],
        "truncated": [forecast["truncated"]["value"], lines[0]["completions/clipped_ratio"]],
        "seconds": [forecast["cost"]["step"], fmean(line["time/step"] for line in lines[1:])],
        "changes": [one["kind"] for one in forecast["changes"]],
    }
    file.write_text(json.dumps(result, indent=2) + "\n")


def agrees(found: dict[str, Any]) -> bool:
    """Whether predicted and actual share of groups differ by no more than chance explains."""
    predicted, happened, groups = found["predicted"], found["happened"], found["groups"]
    spread = (predicted["high"] - predicted["low"]) / 2 / 1.96
    return abs(predicted["value"] - happened) <= 1.96 * math.sqrt(
        spread**2 + happened * (1 - happened) / groups
    )


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
