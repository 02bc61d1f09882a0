"""Flags of the trackers and hubs that show a run to others."""

from __future__ import annotations

from dataclasses import dataclass

from swift_r1.flags.fields import Scope, resumable_flag


def _tracked(name: str) -> Scope:
    return Scope(
        lambda args: bool({name, "all"} & {*args.report_to}),
        f"without --report_to {name}",
        allow_default=True,
    )


_NAMED = Scope(
    lambda args: bool({*args.report_to} - {"none", "tensorboard"}),
    "without another tracker than tensorboard",
    allow_default=True,
)
_TENSORBOARD, _WANDB, _TRACKIO = map(_tracked, ("tensorboard", "wandb", "trackio"))


@dataclass(frozen=True, kw_only=True)
class TrackerArguments:
    """Trackers."""

    log_completions: bool = resumable_flag(False, "show completions and send them to the trackers")
    report_to: list[str] = resumable_flag(
        ["tensorboard"],
        "trackers: tensorboard, wandb, trackio and those of --external_plugins, of which at least one must be installed; "
        "all: the first three, as far as they are; or none",
    )
    run_name: str | None = resumable_flag(
        None, "name of the run in the trackers (default: the run folder's)", _NAMED
    )
    logging_dir: str | None = resumable_flag(
        None,
        "TensorBoard's folder (default: tensorboard in the run folder)",
        _TENSORBOARD,
        ms_swift="runs there",
    )
    wandb_project: str | None = resumable_flag(
        None, "project in Weights & Biases (default: WANDB_PROJECT, else swift-r1)", _WANDB
    )
    wandb_log_unique_prompts: bool = resumable_flag(
        False, "send one completion per prompt to wandb", _WANDB
    )
    project: str | None = resumable_flag(
        None, "project in Trackio (default: swift-r1)", _TRACKIO, ms_swift="huggingface"
    )
    trackio_space_id: str | None = resumable_flag(
        None,
        "Hugging Face Space that gets the run, with a login (default: TRACKIO_SPACE_ID, else the run folder)",
        _TRACKIO,
    )


_PUSHES = Scope(lambda args: args.push_to_hub, "without --push_to_hub true", allow_default=True)


@dataclass(frozen=True, kw_only=True)
class HubArguments:
    """Hub."""

    push_to_hub: bool = resumable_flag(
        False,
        "send checkpoints, with a model card, to ModelScope, or with --use_hf to Hugging Face",
    )
    hub_model_id: str | None = resumable_flag(
        None,
        "the repository there, owner/name; made where there is none",
        _PUSHES,
        aliases=("push_to_hub_model_id",),
    )
    hub_token: str | None = resumable_flag(
        None,
        "the hub's token (better: in SWIFT_HUB_TOKEN; default: the login of the hub's own tool)",
        _PUSHES,
        secret="SWIFT_HUB_TOKEN",
        aliases=("push_to_hub_token",),
    )
    hub_private_repo: bool = resumable_flag(False, "make it a private repository", _PUSHES)
    hub_strategy: str = resumable_flag(
        "every_save",
        "what is sent: the model of each save, or of the last (end); or with it the whole checkpoint, to resume from, "
        "the last (checkpoint) or each (all_checkpoints)",
        _PUSHES,
        choices=("every_save", "end", "checkpoint", "all_checkpoints"),
    )
    hub_timeout: float = resumable_flag(
        1800.0, "seconds that the end of the run waits for the last upload", _PUSHES, more_than=0
    )
