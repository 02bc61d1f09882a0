"""Every file that a run, a launch, a sweep or an evaluation writes: docs/files.md is made of it, and tests hold the
folders of runs against it. A new file gets an entry here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
    "step": "the first optimizer step on its round, from 1",
    "prompt_id": "of the prompt: data set and row",
    "request_id": "of the request that it answers; with `number` and `step` it names the completion",
    "group": "which group of the round it is in",
    "number": "its place in the group",
    "prompt": "as the model saw it, special tokens included",
    "completion": "as the rewards saw it; of several turns the last one",
    "rewards/<reward>": "of each reward function or model; null for no opinion, and for an invalid one (`invalid`)",
    "invalid": "names of the rewards that are invalid here; left out where all are valid",
    "reward": "their weighted sum; null without a valid one",
    "advantage": "of the completion; of tokens their mean; null where it was not trained on",
    "tokens": "its length, all turns together",
    "finish_reason": "`stop`; `length`: cut off at the limit",
    "weight_version": "of the weights that wrote it, the oldest of several",
    "newest_weight_version": "the newest, where they are several",
    "weight_versions": "`[first token, version]` of each stretch, where they are several and known",
    "entropy": "mean entropy of its tokens in nats (`--log_entropy true`)",
    "dropped": "true: `--dynamic_sample` replaced its group, and it was not trained on",
    "turns": "number of turns (a scheduler, tools, an agent)",
    "messages": "the conversation (the same)",
    "tool_calls": "calls in order: name, arguments, outcome, answer",
    "sequences": "token sequences of an agent's episode, where they are not 1",
    "other_messages": "conversations of an agent's episode that ended before the last one",
    "failure": "why an agent's episode has no valid reward",
    "<column>": "each further column of the row; one with the name of a field is `columns/<column>`",
}

RUN: Sequence[WrittenFile] = (
    WrittenFile(
        "args.json",
        "what was run; written at the start, and again at a resume. Secrets are left out",
        "JSON",
        "`--resume_from_checkpoint`, `swift view`, `report`, `why`, `replay`",
        {
            "args": "every resolved flag",
            "command": "the command line, values of secrets as `***`",
            "run_dir": "the folder",
            "versions": "of the packages",
            "hardware": "processors, memory, GPUs",
            "world_size": "training processes",
            "plan": "prompts, completions and optimizer steps of a round, steps in all",
            "dataset_hash": "of the training rows: a resumed run must have the same",
            "prepared_data": "where prepared rows are kept",
            "own_dtype": "whether checkpoints have the dtype of the model's config",
            "replay": "the run that this one replays; null for none",
            "resumed_from": "the checkpoint that it continues from; null for none",
            "started": "Unix seconds",
        },
    ),
    WrittenFile("args-node<k>.json", "the same of the other nodes", "JSON"),
    WrittenFile(
        "logging.jsonl",
        "a line every `--logging_steps` steps, and one for each evaluation: its keys are in [metrics.md](metrics.md)",
        _LINES,
        "`swift view`, `report`, `why`, `sweep`, model cards",
    ),
    WrittenFile(
        "completions.jsonl",
        "a line for each completion that was trained on, or dropped",
        _LINES,
        "`swift view`, `report`, `replay`",
        _COMPLETION,
    ),
    WrittenFile(
        "eval_completions.jsonl",
        "the same of evaluations; `step` is the step of the weights, `benchmark` the set's name where it has one",
        _LINES,
        "`swift view`, `report`",
    ),
    WrittenFile("judge.sqlite", "what the reward `judge` was told, by its question", "SQLite", "a resumed run"),
    WrittenFile(
        "invalid_rewards.jsonl",
        "a line for each reward that could not be used",
        _LINES,
        "`swift view`",
        {
            "step": "the optimizer step",
            "reward": "the function",
            "kind": "`value`, `shape`, `exception`, `timeout`, `died` or `memory`",
            "cause": "in words, with file and line of an exception",
            "completion": "what it was called with",
            "<column>": "each column that it was called with",
        },
    ),
    WrittenFile(
        "events.jsonl",
        "what happened; never cut back, so that it tells of kills and resumes too",
        _LINES,
        "`swift view`, `report`",
        {
            "time": "Unix seconds",
            "step": "optimizer steps done by then",
            "kind": "`started`, `resumed`, `saved`, `skipped`, `evaluated`, `server_lost`, `server_restored`, "
            "`server_joined`, `server_left`, `stopping`, `failed`, `ended`",
            "text": "a sentence",
        },
    ),
    WrittenFile(
        "diagnosis.jsonl",
        "what the run says is wrong with it ([diagnosis.md](diagnosis.md))",
        _LINES,
        "`swift view`",
        {
            "name": "the sign",
            "steps": "first and last step that it was seen in",
            "evidence": "what was seen, with numbers",
            "advice": "what to try",
            "numbers": "means of its metrics in the first rounds and in those steps",
        },
    ),
    WrittenFile(
        "spans/<lane>.jsonl",
        "what a process, a server or a pool of workers did when",
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
        "the token record of optimizer step N (`--log_tokens`): a row for each recorded completion",
        "Parquet, zstd",
        "`swift view` (tokens), `swift replay`",
        {
            "step": "the optimizer step",
            "round_step": "what `completions.jsonl` has as `step`",
            "prompt_id": "as in `completions.jsonl`",
            "request_id": "as in `completions.jsonl`",
            "number": "as in `completions.jsonl`",
            "group": "as in `completions.jsonl`",
            "sequence": "which of the completion's rows: an agent's episode may have several",
            "prompt_token_ids": "list",
            "token_ids": "list, as all below with one entry for each token of the completion",
            "mask": "in the loss",
            "written": "the policy wrote it and it may be trained; filters of the loss clear `mask` alone",
            "rollout_logps": "the engine's log-prob",
            "logps": "the trainer's, in this step's forward pass",
            "ratios": "importance ratio",
            "clipped": "-1 below, 1 above, 0 not",
            "entropies": "of the policy there, in nats",
            "advantages": "of the token",
            "weight_versions": "of the weights that wrote it",
            "ref_logps": "the reference policy's; null without one",
        },
    ),
    WrittenFile(
        "tokens/probe-<N>.parquet",
        "the same of the probe prompts at the evaluation of step N (`--probe_prompts`); null where there is no loss",
        "Parquet, zstd",
        "`swift view` (prompts)",
    ),
    WrittenFile(
        "tokens/vocabulary.parquet",
        "a row for each token of the vocabulary",
        "Parquet",
        "`swift view`",
        {
            "token_id": "its number",
            "bytes": "its text",
            "special": "whether it is a special token",
        },
    ),
    WrittenFile("tokens/stride", "which steps the record keeps, once it is over `--log_tokens_limit`", "text"),
    WrittenFile("checkpoint-<N>/", "[below](#a-checkpoint)"),
    WrittenFile("last", "link to the newest checkpoint (`--create_checkpoint_symlink true`)"),
    WrittenFile("best", "link to the best one (the same, with `--metric_for_best_model`)"),
    WrittenFile("aside-checkpoint-<N>/", "a checkpoint that a resumed run does not continue from"),
    WrittenFile(
        "skipped/step-<N>.safetensors",
        "the batch of a step that was skipped since loss or gradient was not finite",
        "safetensors",
    ),
    WrittenFile("images/<name>.png", "curves, drawn at the end", "PNG"),
    WrittenFile(
        "summary.json",
        "how it went; written last, so that a run without it has not ended by itself",
        "JSON",
        "`swift view`, `sweep`, `launch`, scripts",
        {
            "steps": "optimizer steps",
            "seconds": "of the training loop, evaluations included",
            "first_reward": "of the first round",
            "last_reward": "of the last",
            "eval_before": "accuracy before the first step, mean of the sets; null without",
            "eval_after": "accuracy at the last evaluation",
            "best_step": "of the best checkpoint (`--metric_for_best_model`)",
            "best_metric": "its value",
            "saves_since_best": "saves that were not better since",
            "exit_code": "of the run",
            "last_evaluation": "every figure of the last evaluation",
        },
    ),
    WrittenFile("forecast.json", "of `swift forecast`, in a folder that it removes", "JSON"),
    WrittenFile("tensorboard/", "of TensorBoard (`--report_to`, `--logging_dir`)"),
    WrittenFile("wandb/", "of wandb"),
    WrittenFile("swanlab/", "of SwanLab"),
    WrittenFile("trackio/", "of Trackio"),
    WrittenFile("mlflow/", "of MLflow"),
    WrittenFile("engine-<N>.log", "log of an engine that the run has started (`--vllm_mode colocate`)", "text"),
    WrittenFile("launch/<role>-<N>.log", "what a task of `swift launch` printed", "text"),
    WrittenFile("launch/servers.txt", "addresses of the servers (`--vllm_server_file`)", "a URL a line", "the trainer"),
    WrittenFile("launch/.lock", "held by the launch"),
    WrittenFile(".lock", "held by the run while it writes here", "", "`swift view`: whether the run lives"),
    WrittenFile(".lease", "the lease of its server, for a resume at once; for its user alone", "", "the run itself"),
)
"""In the folder of a run."""

CHECKPOINT: Sequence[WrittenFile] = (
    WrittenFile("model.safetensors, config.json, ...", "the model, for `from_pretrained`", "Hugging Face's"),
    WrittenFile("adapter_model.safetensors, adapter_config.json", "in their place with `--train_type lora`", "peft's"),
    WrittenFile("tokenizer.json, chat_template.jinja, ...", "the tokenizer, with the template of training"),
    WrittenFile("critic/", "PPO's critic"),
    WrittenFile("README.md", "a model card, made of the run so far", "Markdown"),
    WrittenFile(
        "manifest.json",
        "every file with its size and hash; written last: without it there is no checkpoint",
        "JSON",
        "resuming, which checks it all",
    ),
    WrittenFile("state/", "optimizer, generators, an open round, sizes of the logs; not with `--save_only_model true`"),
)

OTHERS: Mapping[str, Sequence[WrittenFile]] = {
    "An evaluation": (
        WrittenFile("completions.jsonl", "every completion as it comes", _LINES, "the same command, which continues"),
        WrittenFile("report.json", "figures with intervals, settings, versions, the command", "JSON", "`--compare`"),
        WrittenFile("settings.json", "what the completions depend on", "JSON", "the same command"),
        WrittenFile("compare.json", "of `swift eval --compare`: differences with intervals", "JSON"),
        WrittenFile("server.log", "log of the server that it has started", "text"),
    ),
    "A sweep": (
        WrittenFile(
            "sweep.json",
            "settings, runs, points and their order",
            "JSON",
            "the same command, which continues",
        ),
        WrittenFile("report.html", "`swift report` of all runs", "HTML"),
        WrittenFile("<point>/", "the run of a point and a seed, and `output.log`, what it printed"),
    ),
}
