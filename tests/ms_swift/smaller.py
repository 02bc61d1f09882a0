"""A command of ms-swift's scripts on a laptop: its sizes replaced by small ones, and nothing else.

`python -m tests.ms_swift.smaller` prints what may be replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyarrow import Table, parquet

from tests.ms_swift.scripts import ScriptCommand
from tests.vision import picture

REPLACED = {
    "model": "a random model of two layers, of another family where it reads images: vLLM's class for Qwen2.5-VL "
    "needs torchvision",
    "the hub": "one on this machine, whose data sets have 16 rows of the same columns (USE_HF, HF_ENDPOINT)",
    "output_dir": "a folder of the test",
    "num_train_epochs": "--max_steps 2",
    "per_device_train_batch_size, per_device_eval_batch_size, gradient_accumulation_steps": "at most 2",
    "steps_per_generation": "as many steps as before, of the new --gradient_accumulation_steps",
    "generation_batch_size": "as many steps as before, of the new batch",
    "num_generations": "2, where it was more",
    "max_completion_length": "at most 16",
    "max_length, vllm_max_model_len": "at most 4096, the length of the model",
    "dataset_num_proc": "1",
    "NPROC_PER_NODE, vllm_tensor_parallel_size, sequence_parallel_size": "at most 2 (of servers 1)",
    "vllm_data_parallel_size, data_parallel_size": "1",
    "NNODES, nnodes": "as many as the script has commands for",
    "vllm_server_host, vllm_server_port, port, MASTER_ADDR, MASTER_PORT": "addresses of this machine",
    "report_to": "those trackers that are installed",
}
PROBLEMS = [(a, b) for a in range(2, 6) for b in range(3, 7)]
_SEEN = (
    "AI-ModelScope/clevr_cogen_a_train",
    "AI-ModelScope/chartqa_digit_r1v_format",
    "lmms-lab/multimodal-open-r1-8k-verified",
)
_AT_MOST = {
    **dict.fromkeys(
        (
            *(
                "per_device_train_batch_size",
                "per_device_eval_batch_size",
                "gradient_accumulation_steps",
            ),
            *(
                "num_generations",
                "vllm_tensor_parallel_size",
                "sequence_parallel_size",
                "nproc_per_node",
            ),
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "dataset_num_proc",
            "vllm_data_parallel_size",
            "data_parallel_size",
        ),
        1,
    ),
    "max_completion_length": 16,
    "max_length": 4096,
    "vllm_max_model_len": 4096,
}
_DROPPED = (
    "num_train_epochs",
    "steps_per_generation",
    "generation_batch_size",
    "vllm_server_host",
    "vllm_server_port",
)


@dataclass(frozen=True)
class Place:
    """Where a small command runs: the model, the folder of the run, the rollout servers' ports, that of the first
    rank, and how many nodes there are."""

    model: Path
    output: Path
    server_ports: Sequence[int] = ()
    master_port: int = 0
    nodes: int = 1


def write_hub(folder: Path) -> None:
    """The data sets that the scripts name, as `hub_stand_in.Hub` serves them, with 16 rows of the same columns each."""
    sets: dict[str, list[dict[str, object]]] = {}
    seen: dict[str, list[dict[str, object]]] = {name: [] for name in _SEEN}
    for a, b in PROBLEMS:
        shown = {"bytes": picture(28, 28, 10 * a + b), "path": None}
        counted = {"problem": f"How many? {a} + {b}", "solution": f"<answer> {a + b} </answer>"}
        for name in _SEEN:
            seen[name].append({**counted, "image": shown})
        question, said = f"What is {a} + {b}?", f"{a} + {b} = {a + b}."
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
        rows: dict[str, dict[str, object]] = {
            "AI-MO/NuminaMath-TIR default": {
                "problem": question,
                "solution": f"{said} \\boxed{{{a + b}}}",
                "messages": turns,
            },
            "modelscope/gsm8k main": {"question": question, "answer": f"{said}\n#### {a + b}"},
            "LLM-Research/xlam-function-calling-60k dataset": {
                "id": a * 10 + b,
                "query": question,
                "answers": json.dumps([{"name": "add", "arguments": {"a": a, "b": b}}]),
                "tools": json.dumps(
                    [
                        {
                            "name": "add",
                            "description": "Adds two.",
                            "parameters": {"a": {"type": "int"}},
                        }
                    ]
                ),
            },
        }
        for name, row in rows.items():
            sets.setdefault(name, []).append(row)
    for name, rows in seen.items():
        (folder / name).mkdir(parents=True)
        parquet.write_table(Table.from_pylist(rows), folder / name / "rows.parquet")
        card = "---\nconfigs:\n- config_name: default\n  data_files: rows.parquet\n---\n"
        (folder / name / "README.md").write_text(card)
    for name, found in sets.items():
        repo, config = name.split()
        (folder / repo).mkdir(parents=True)
        (folder / repo / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
        card = f"---\nconfigs:\n- config_name: {config}\n  default: true\n  data_files: rows.jsonl\n---\n"
        (folder / repo / "README.md").write_text(card)


def smaller(command: ScriptCommand, place: Place) -> tuple[list[str], dict[str, str]]:
    """The words behind `swift` of the command cut down to `place`, and the variables in front of it."""
    flags = _flags(command.words)
    was = {
        name: int(values[0])
        for name, values in flags.items()
        if name in _AT_MOST and name != "max_length"
    }
    for name in flags.keys() & _AT_MOST.keys():
        most = (
            1
            if command.name == "rollout" and name == "vllm_tensor_parallel_size"
            else _AT_MOST[name]
        )
        flags[name] = [str(min(int(flags[name][0]), most))]
    flags["model"] = [str(place.model)]
    environ = dict(command.environ)
    if command.name == "rollout":
        flags["port"] = [str(place.server_ports[0])]
        return ["rollout", *_words(flags)], environ
    processes = int(flags.get("nproc_per_node", [environ.get("NPROC_PER_NODE", "1")])[0])
    if "NPROC_PER_NODE" in environ:
        environ["NPROC_PER_NODE"] = str(min(processes, 2))
    if "NNODES" in environ:
        environ["NNODES"] = str(place.nodes)
    if "nnodes" in flags:
        flags["nnodes"] = [str(place.nodes)]
    if environ.keys() & {"MASTER_ADDR", "MASTER_PORT"}:
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.master_port)}
    steps = _micro_batches(flags, was, processes * int(command.environ.get("NNODES", "1")))
    servers = len(flags.get("vllm_server_host", ()))
    for name in _DROPPED:
        flags.pop(name, None)
    if steps is not None:
        flags["steps_per_generation"] = [str(steps)]
    if servers:
        flags["vllm_server_host"] = ["127.0.0.1"] * servers
        flags["vllm_server_port"] = [str(port) for port in place.server_ports[:servers]]
    if "report_to" in flags:
        flags["report_to"] = [name for name in flags["report_to"] if name == "tensorboard"] or [
            "none"
        ]
    flags |= {"output_dir": [str(place.output)], "max_steps": ["2"]}
    return ["rlhf", *_words(flags)], environ


def _micro_batches(
    flags: Mapping[str, list[str]], was: Mapping[str, int], processes: int
) -> int | None:
    """The new --steps_per_generation of a script that sets the round."""
    old = was.get("gradient_accumulation_steps", 1)
    if "generation_batch_size" in flags:
        round_of = int(flags["generation_batch_size"][0]) / (
            was.get("per_device_train_batch_size", 1) * processes
        )
    elif "steps_per_generation" in flags:
        round_of = int(flags["steps_per_generation"][0])
    else:
        return None
    return max(1, round(round_of * min(old, 2) / old))


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = [value] if equals else []
        else:
            flags[next(reversed(flags))].append(word)
    return flags


def _words(flags: Mapping[str, Sequence[str]]) -> list[str]:
    return [word for name, values in flags.items() for word in (f"--{name}", *values)]


if __name__ == "__main__":
    for flag, by in REPLACED.items():
        print(f"{flag}: {by}")
