"""Every file that a run, a launch or an evaluation writes: docs/files.md is made of it, and tests hold the
folders of runs against it. A new file gets an entry here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swift_r1.record.folder import WARM_START


@dataclass(frozen=True)
class WrittenFile:
    """A file, or a family of them.

    Attributes:
        path: below its folder; `<name>` stands for any text without a slash, a slash at the end for all below it.
        about: what it is.
        form: its format; empty for files of others, which have their own.
        readers: who reads it, beside people.
        fields: of a row, or of the object; empty where they are said elsewhere.
    """

    path: str
    about: str
    form: str = ""
    readers: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)


_LINES = "JSON lines"
_COMPLETION = {
    "step": "first optimizer step on its round, counted from 1",
    "prompt_id": "prompt: dataset and row",
    "task": "name of its task (`--mixture`)",
    "request_id": "request that it answers; with `number` and `step` it identifies the completion",
    "group": "its group in the round",
    "number": "its position in the group",
    "prompt": "prompt as the model saw it, with special tokens",
    "completion": "completion as the rewards saw it; the last turn if there are several",
    "rewards/<reward>": "value of each reward function or model; null for no opinion or an invalid value (`invalid`)",
    "invalid": "names of rewards that are invalid here; absent if all are valid",
    "reward": "weighted sum of the rewards; null if none is valid",
    "advantage": "advantage of the completion (mean over tokens if per token); null if it was not trained on",
    "tokens": "length in tokens over all turns",
    "finish_reason": "`stop`, or `length` if it was cut off at the limit",
    "weight_version": "version of the weights that wrote it, the oldest if several did",
    "newest_weight_version": "newest version, if several weights wrote it",
    "weight_versions": "`[first token, version]` of each stretch, if several versions wrote it and are known",
    "entropy": "mean entropy of its tokens in nats (`--log_entropy true`)",
    "dropped": "true: `--dynamic_sample` replaced its group, and it was not trained on",
    "turns": "number of turns (a scheduler, tools, an agent)",
    "messages": "the conversation (of a scheduler, tools or an agent)",
    "tool_calls": "tool calls in order: name, arguments, outcome, answer",
    "calls": "calls of the model in the order in which they began: `kind`, `parent` (number of the call that it "
    "continues), `conversation` (number among `other_messages` and `messages`), `place` of its answer there, "
    "`prompt_tokens`, `tokens`, `finish_reason`",
    "turn_rewards": "reward of each turn, if the agent or environment returned them",
    "turn_advantages": "advantage of each turn's tokens, if they differ by turn (`--advantage_per`)",
    "returned": "numbers and texts (their first 1,000 characters) that an agent or environment returned beside its rewards",
    "sequences": "number of token sequences of an agent's episode, if not 1",
    "other_messages": "conversations of an agent's episode that ended before the last one",
    "failure": "why an agent's episode has no valid reward",
    "limit": "limit that the episode ran into: `calls`, `tokens`, `seconds`, `cost` or `length` (the model's)",
    "cost": "what its calls of tools cost (`--tool_prices`)",
    "images": "images of the prompt in order, if any: `path`, `sha256` of the file, `width` and `height` in pixels",
    "<column>": "every other column of the row; a column named like a field becomes `columns/<column>`",
}

RUN: Sequence[WrittenFile] = (
    WrittenFile(
        "args.json",
        "what was run; written at the start and again when resuming, without secrets",
        "JSON",
        "`--resume_from_checkpoint`, `swift view`, `report`, `why`, `replay`",
        {
            "args": "every resolved flag",
            "command": "command line, with secrets as `***`",
            "run_dir": "the folder",
            "versions": "package versions",
            "hardware": "processors, memory, GPUs",
            "world_size": "training processes",
            "plan": "prompts, completions and optimizer steps per round, and total steps",
            "dataset_hash": "hash of the training rows; a resumed run must have the same",
            "prepared_data": "where prepared rows are kept",
            "own_dtype": "whether checkpoints have the dtype in the model's config",
            "replay": "run that this one replays, or null",
            "resumed_from": "checkpoint that it continues from, or null",
            "started": "start time in Unix seconds",
        },
    ),
    WrittenFile(
        "name.txt", "name that was given to the run in `swift view`", "text", "`swift view`"
    ),
    WrittenFile("args-node<k>.json", "args.json of the other nodes", "JSON"),
    WrittenFile(
        "logging.jsonl",
        "one line every `--logging_steps` steps and one per evaluation; keys in [metrics.md](metrics.md)",
        _LINES,
        "`swift view`, `report`, `why`, model cards",
    ),
    WrittenFile(
        "completions.jsonl",
        "one line per completion that was trained on or dropped",
        _LINES,
        "`swift view`, `report`, `replay`",
        _COMPLETION,
    ),
    WrittenFile(
        "eval_completions.jsonl",
        "one line per completion of an evaluation; `step` is the step of the weights, `benchmark` the name of the "
        "dataset if it has one",
        _LINES,
        "`swift view`, `report`",
    ),
    WrittenFile(
        "judge.sqlite", "answers to the reward `judge`, by question", "SQLite", "a resumed run"
    ),
    WrittenFile(
        "invalid_rewards.jsonl",
        "one line per reward that could not be used",
        _LINES,
        "`swift view`",
        {
            "step": "the optimizer step",
            "reward": "the function",
            "kind": "`value`, `shape`, `exception`, `timeout`, `died` or `memory`",
            "cause": "reason, with file and line of an exception",
            "completion": "completion that it was called with",
            "<column>": "each column it was called with",
        },
    ),
    WrittenFile(
        "episode_times.jsonl",
        "how long the calls of an episode took (schedulers, tools, agents); never truncated, so the last line of an "
        "episode counts",
        _LINES,
        "`swift view`",
        {
            "step": "as in `completions.jsonl`",
            "request_id": "as in `completions.jsonl`",
            "number": "as in `completions.jsonl`",
            "calls": "seconds of each call of the model, in the order of `calls`",
            "tools": "seconds of each call of a tool, in the order of `tool_calls`; null where an agent made it",
            "own": "seconds of an agent outside the model; else null",
        },
    ),
    WrittenFile(
        "events.jsonl",
        "events of the run; never truncated, so it also shows kills and resumes",
        _LINES,
        "`swift view`, `report`",
        {
            "time": "time in Unix seconds",
            "step": "optimizer steps done so far",
            "kind": "`started`, `resumed`, `saved`, `skipped`, `evaluated`, `server_lost`, `server_restored`, "
            "`server_joined`, `server_left`, `stopping`, `failed`, `ended`",
            "text": "a sentence",
        },
    ),
    WrittenFile(
        "diagnosis.jsonl",
        "problems that the run found in itself ([diagnosis.md](diagnosis.md)), each once; the verdict is not in it: it "
        "is made of `logging.jsonl` whenever it is asked for",
        _LINES,
        "a resumed run, which does not repeat them",
        {
            "name": "name of the check",
            "steps": "first and last step in which it was seen",
            "evidence": "evidence, with numbers",
            "advice": "what to try",
            "numbers": "means of its metrics, in the first rounds and in those steps",
        },
    ),
    WrittenFile(
        "spans/<lane>.jsonl",
        "what a process, a server or a pool of workers did, and when",
        _LINES,
        "`swift view` (time), `swift view --trace`",
        {
            "start": "Unix seconds",
            "end": "Unix seconds",
            "name": "`generate`, `reward`, `train`, `sync`, `evaluate`, `save`, `start`, `wait`, ...",
            "step": "the optimizer step",
        },
    ),
    WrittenFile(
        "tokens/step-<N>.parquet",
        "token record of optimizer step N (`--log_tokens`), one row per recorded completion",
        "Parquet, zstd",
        "`swift view` (tokens), `swift replay`",
        {
            "step": "the optimizer step",
            "round_step": "`step` of the completion in `completions.jsonl`",
            "prompt_id": "as in `completions.jsonl`",
            "request_id": "as in `completions.jsonl`",
            "number": "as in `completions.jsonl`",
            "group": "as in `completions.jsonl`",
            "sequence": "number of the row within the completion; an agent's episode may have several",
            "prompt_token_ids": "token ids of the prompt",
            "token_ids": "token ids of the completion; this and all lists below have one entry per token",
            "mask": "whether the token is in the loss",
            "written": "whether the policy wrote the token and may be trained on it; loss filters only clear `mask`",
            "rollout_logps": "log-prob in the engine",
            "logps": "log-prob in the trainer, from this step's forward pass",
            "ratios": "importance ratio",
            "clipped": "-1: clipped from below, 1: from above, 0: not clipped",
            "entropies": "entropy of the policy at the token, in nats",
            "advantages": "advantage of the token",
            "weight_versions": "version of the weights that wrote the token",
            "ref_logps": "log-prob in the reference policy; null without one",
            "routes": "with `--router_replay_mode R3` and `--log_tokens all`: the experts of the tokens of prompt and "
            "completion, of each token layer after layer, a byte each, two with 256 experts or more; the largest number "
            "where the engine has read nothing",
        },
    ),
    WrittenFile(
        "tokens/probe-<N>.parquet",
        "token record of the probe prompts at the evaluation of step N (`--probe_prompts`); null where there is no "
        "loss",
        "Parquet, zstd",
        "`swift view` (prompts)",
    ),
    WrittenFile(
        "tokens/vocabulary.parquet",
        "one row per token of the vocabulary",
        "Parquet",
        "`swift view`",
        {
            "token_id": "token id",
            "bytes": "text of the token",
            "special": "whether it is a special token",
        },
    ),
    WrittenFile(
        "tokens/stride", "steps that the record keeps once it exceeds `--log_tokens_limit`", "text"
    ),
    WrittenFile("checkpoint-<N>/", "[below](#a-checkpoint)"),
    WrittenFile("last", "link to the newest checkpoint (`--create_checkpoint_symlink true`)"),
    WrittenFile("best", "link to the best checkpoint (also with `--metric_for_best_model`)"),
    WrittenFile("aside-checkpoint-<N>/", "checkpoint that a resumed run did not continue from"),
    WrittenFile(
        "skipped/step-<N>.safetensors",
        "batch of a step that was skipped because its loss or gradient was not finite",
        "safetensors",
    ),
    WrittenFile("images/<name>.png", "curves, drawn when the run ends", "PNG"),
    WrittenFile(
        "summary.json",
        "result of the run; written last, so a run without it did not end by itself",
        "JSON",
        "`swift view`, `launch`, scripts",
        {
            "steps": "optimizer steps",
            "seconds": "seconds of the training loop, with evaluations",
            "first_reward": "mean reward of the first round",
            "last_reward": "mean reward of the last round",
            "eval_before": "accuracy before the first step, averaged over the datasets; null if not evaluated",
            "eval_after": "accuracy at the last evaluation",
            "best_step": "step of the best checkpoint (`--metric_for_best_model`)",
            "best_metric": "value of that metric",
            "saves_since_best": "saves since then that were not better",
            "exit_code": "exit code of the run",
            "last_evaluation": "every figure of the last evaluation",
        },
    ),
    WrittenFile(
        "sampled.jsonl", "answers of `swift forecast`, in a folder that it removes", _LINES
    ),
    WrittenFile("tensorboard/", "TensorBoard's files (`--report_to`, `--logging_dir`)"),
    WrittenFile("wandb/", "wandb's files"),
    WrittenFile("swanlab/", "SwanLab's files"),
    WrittenFile("trackio/", "Trackio's files"),
    WrittenFile("mlflow/", "MLflow's files"),
    WrittenFile(
        "engine-<N>.log", "log of an engine started by the run (`--vllm_mode colocate`)", "text"
    ),
    WrittenFile("launch/<role>-<N>.log", "output of a task of `swift launch`", "text"),
    WrittenFile(
        "launch/servers.txt",
        "addresses of the servers (`--vllm_server_file`)",
        "one URL per line",
        "the trainer",
    ),
    WrittenFile(
        f"{WARM_START}/",
        "the warm start of this run (`sft` in the file of `swift launch`): a run folder of its own",
    ),
    WrittenFile("launch/.lock", "lock of the launch"),
    WrittenFile(
        ".lock",
        "lock of the run, held while it writes here",
        "",
        "`swift view`, to see whether the run is alive",
    ),
    WrittenFile(
        ".lease",
        "lease of its server, so that a resume can start at once; readable by its user only",
        "",
        "the run itself",
    ),
)
"""In the folder of a run."""

CHECKPOINT: Sequence[WrittenFile] = (
    WrittenFile(
        "model.safetensors, config.json, ...", "the model, for `from_pretrained`", "Hugging Face's"
    ),
    WrittenFile(
        "adapter_model.safetensors, adapter_config.json",
        "the adapters instead, with `--train_type lora`",
        "peft's",
    ),
    WrittenFile(
        "tokenizer.json, chat_template.jinja, ...",
        "the tokenizer, with the chat template used in training",
    ),
    WrittenFile("critic/", "PPO's critic"),
    WrittenFile("README.md", "model card of the run so far", "Markdown"),
    WrittenFile(
        "manifest.json",
        "size and hash of every file; written last, so a folder without it is not a checkpoint",
        "JSON",
        "resuming, which verifies it",
    ),
    WrittenFile(
        "state/",
        "optimizer, random generators, the open round, log sizes; absent with `--save_only_model true`",
    ),
)

EVALUATION = (
    WrittenFile(
        "completions.jsonl",
        "every completion, written as it arrives",
        _LINES,
        "the same command, to continue",
    ),
    WrittenFile(
        "report.json",
        "figures with intervals, settings, versions, the command",
        "JSON",
        "`--compare`",
    ),
    WrittenFile(
        "settings.json", "settings that the completions depend on", "JSON", "the same command"
    ),
    WrittenFile(
        "compare.json", "result of `swift eval --compare`: differences with intervals", "JSON"
    ),
    WrittenFile("server.log", "log of the server that it started", "text"),
)
