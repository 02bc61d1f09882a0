"""Run folders as `swift rlhf` leaves them, made up: small or large."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

KINDS = ("right", "wrong value", "wrong format", "no answer", "truncated", "invalid reward")
STEPS_PER_ROUND = 2
_WORDS = [
    "".join(random.Random(seed).choices(string.ascii_lowercase, k=2 + seed % 8)) for seed in range(2_000)
]  # fmt: skip
VOCABULARY = {
    **{code: bytes([code]) for code in range(256)},
    **{256: b"<answer>", 257: b"</answer>", 258: b"<|im_end|>", 259: "\u20ac".encode()[:2]},
}


def make_run(
    folder: Path,
    steps: int = 4,
    groups: int = 4,
    per_group: int = 4,
    words: int = 8,
    exit_code: int | None = 0,
    seed: int = 0,
    prompts: int = 6,
) -> Path:
    """`steps` optimizer steps, two a round; returns the folder. `exit_code` None: killed."""
    folder.mkdir(parents=True)
    words_given = ["swift", "rlhf", "--model", "tiny model", "--seed", str(seed)]
    args = {
        "model": "tiny model",
        "seed": seed,
        "max_steps": steps,
        "reward_funcs": ["countdown", "format"],
    }
    args |= {"num_generations": per_group, "rlhf_type": "grpo", "output_dir": str(folder.parent)}
    content: dict[str, Any] = {
        "args": args,
        "run_dir": str(folder),
        "command": words_given,
        "versions": {"swift-r1": "0.1.0"},
        "started": 1_790_000_000.0 + seed,
    }
    content["plan"] = {"total_steps": steps, "optimizer_steps_per_round": STEPS_PER_ROUND}
    _write(folder / "args.json", json.dumps(content, indent=2))
    rows = list(completions(steps, groups, per_group, words, seed, prompts))
    write_rows(folder / "completions.jsonl", rows)
    write_rows(folder / "logging.jsonl", logged(steps, rows))
    held_out = [
        row | {"step": step, "advantage": None, "request_id": f"run/eval/{step}/{row['prompt_id']}"}
        for step in (0, steps)
        for row in completions(1, 2, 2, words, seed + 1, 2)
    ]
    write_rows(folder / "eval_completions.jsonl", held_out)
    _write(folder / "invalid_rewards.jsonl", "")
    if exit_code is not None:
        summary = {
            "steps": steps,
            "seconds": 60.0,
            "exit_code": exit_code,
            "eval_before": 0.1,
            "eval_after": 0.5,
        }
        _write(folder / "summary.json", json.dumps(summary))
    events = [(0, "started", "from the beginning"), (steps, "saved", f"checkpoint-{steps}")]
    if exit_code is not None:
        events.append((steps, "ended", f"after step {steps}"))
    write_rows(
        folder / "events.jsonl",
        [
            {"time": 1_790_000_000.0 + step, "step": step, "kind": kind, "text": text}
            for step, kind, text in events
        ],
    )
    make_tokens(folder, rows, steps)
    return folder


def completions(
    steps: int, groups: int, per_group: int, words: int, seed: int = 0, prompts: int = 6
) -> Iterator[dict[str, Any]]:
    """Rows of completions.jsonl; the class of each goes through `KINDS`."""
    chance = random.Random(seed)
    place = 0
    for step in range(1, steps + 1, STEPS_PER_ROUND):
        for group in range(groups):
            prompt = (step * groups + group) % prompts
            for number in range(per_group):
                kind = KINDS[place % len(KINDS)] if group else "right"
                place += 1
                yield completion(kind, step, group, number, f"countdown:{prompt}", words, chance)


def completion(
    kind: str, step: int, group: int, number: int, prompt_id: str, words: int, chance: random.Random
) -> dict[str, Any]:
    thought = " ".join(chance.choices(_WORDS, k=words))
    answer = (
        ""
        if kind in ("no answer", "truncated")
        else f"<answer>{chance.randint(1, 99)} + 1</answer>"
    )
    right = float(kind == "right")
    formatted = float(kind in ("right", "wrong value"))
    invalid = kind == "invalid reward"
    return {
        "step": step,
        "prompt_id": prompt_id,
        "request_id": f"run/{step // STEPS_PER_ROUND}/{group}",
        "number": number,
        "group": group,
        "prompt": f'Use "3", 9 and 8 to make {prompt_id}.\n',
        "completion": f"<think>{thought}\n\u20ac 50 %</think>\n{answer}",
        "rewards/countdown": None if invalid else right,
        "rewards/format": formatted,
        "reward": None if invalid else right + 0.1 * formatted,
        "advantage": None if invalid else right - 0.5,
        "tokens": len(thought) + len(answer),
        "finish_reason": "length" if kind == "truncated" else "stop",
        "weight_version": step - 1,
        "nums": [3, 9, 8],
        "target": step,
    }


def logged(steps: int, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for step in range(1, steps + 1):
        known = [row["reward"] for row in rows if row["reward"] is not None]
        yield {
            "step": step,
            "reward": sum(known) / len(known),
            "reward_std": 0.3,
            "loss": -0.01 * step,
            "kl": 0.001 * step,
            "entropy": 2.0 / step,
            "completions/mean_length": 20.0 + step,
            "rollout/logp_diff": 1e-6,
            "tokens_per_second": 1_000.0,
            "time/step": 2.5,
        }
        if step == steps:
            yield {
                "step": step,
                "eval/countdown/accuracy": 0.5,
                "eval/countdown/completions": 4.0,
            } | {
                f"eval/countdown/avg@2{end}": value
                for end, value in (("", 0.5), ("/low", 0.2), ("/high", 0.8))
            }


def make_tokens(folder: Path, rows: list[dict[str, Any]], steps: int) -> None:
    """The first group of each round in each of its steps, and the vocabulary: a token for
    each byte, for the answer tags, and one that is the beginning of a character."""
    (folder / "tokens").mkdir()
    for step in range(1, steps + 1):
        round_step = step - (step - 1) % STEPS_PER_ROUND
        own = [
            recorded(row, step) for row in rows if row["step"] == round_step and row["group"] == 0
        ]
        write_tokens(folder / "tokens" / f"step-{step:06d}.parquet", own)
    table = {
        "token_id": list(VOCABULARY),
        "bytes": list(VOCABULARY.values()),
        "special": [i == 258 for i in VOCABULARY],
    }
    kinds = [("token_id", pa.int32()), ("bytes", pa.binary()), ("special", pa.bool_())]
    parquet.write_table(
        pa.table(table, pa.schema(kinds)),
        folder / "tokens" / "vocabulary.parquet",
        compression="zstd",
    )


def token_ids(text: str) -> list[int]:
    ids: list[int] = []
    for part in text.replace("</answer>", "\0\1").replace("<answer>", "\0\2").split("\0"):
        tag = {"\1": 257, "\2": 256}.get(part[:1])
        ids += ([] if tag is None else [tag]) + list((part if tag is None else part[1:]).encode())
    return [*ids, 258]


def recorded(row: Mapping[str, Any], step: int) -> dict[str, Any]:
    ids = token_ids(row["completion"])
    chance, count = random.Random(f"{step} {row['request_id']} {row['number']}"), len(ids)
    logps = [-chance.expovariate(1) for _ in ids]
    values: dict[str, Any] = {
        "step": step,
        "round_step": row["step"],
        "prompt_id": row["prompt_id"],
        "request_id": row["request_id"],
        "number": row["number"],
        "group": row["group"],
        "prompt_token_ids": list(row["prompt"].encode()),
        "token_ids": ids,
        "mask": [True] * count,
        "rollout_logps": [value + chance.gauss(0, 1e-3) for value in logps],
        "logps": logps,
        "ratios": [1 + chance.gauss(0, 0.1) for _ in ids],
        "clipped": [chance.choice((-1, 0, 0, 0, 1)) for _ in ids],
        "entropies": [chance.expovariate(1) for _ in ids],
        "advantages": [row["advantage"] or 0.0] * count,
        "weight_versions": [row["weight_version"] + (at > count // 2) for at in range(count)],
        "ref_logps": None,
    }
    return values


def write_tokens(path: Path, rows: list[dict[str, Any]]) -> None:
    kinds = {
        "step": pa.int32(),
        "round_step": pa.int32(),
        "prompt_id": pa.string(),
        "request_id": pa.string(),
    }
    kinds |= {"number": pa.int16(), "group": pa.int32(), "sequence": pa.int16()}
    kinds |= {"prompt_token_ids": pa.list_(pa.int32())}
    kinds |= {
        "token_ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.bool_()),
        "clipped": pa.list_(pa.int8()),
    }
    kinds |= dict.fromkeys(("rollout_logps", "logps", "ratios"), pa.list_(pa.float32()))
    kinds |= dict.fromkeys(("entropies", "advantages", "ref_logps"), pa.list_(pa.float32()))
    kinds |= {"weight_versions": pa.list_(pa.int32())}
    parquet.write_table(
        pa.Table.from_pylist(rows, pa.schema(list(kinds.items()))), path, compression="zstd"
    )


def write_rows(path: Path, rows: Any) -> None:
    """Adds rows as the run does."""
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
