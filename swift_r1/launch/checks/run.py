"""Everything that `swift check` looks at, in one report, and that report for people and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from swift_r1.data.images import ImageFile, images_of
from swift_r1.data.loading import LoadedData, load_rows
from swift_r1.data.preprocessors import Row
from swift_r1.data.prompts import PromptEncoder, Wording, tokenizer_of_run
from swift_r1.data.registry import register_dataset_info
from swift_r1.data.resolve import open_sources
from swift_r1.data.rows import Drops, preprocessed
from swift_r1.data.sources import DataFlags, Source
from swift_r1.data.tool_registry import server_tools
from swift_r1.data.vision import VisionProcessor
from swift_r1.errors import RunFailed, UsageError
from swift_r1.flags.rlhf import CheckArguments
from swift_r1.flags.run import Task
from swift_r1.launch.checks.environments import (
    EnvironmentReport,
    check_environment,
    show_environment,
)
from swift_r1.launch.checks.golds import right_completions, unreadable_golds
from swift_r1.launch.checks.images import row_faults
from swift_r1.launch.checks.names import name_faults, why_no_agent
from swift_r1.launch.checks.preflight import column_faults
from swift_r1.launch.checks.rewards import OF_EPISODES, RewardReport, try_rewards
from swift_r1.launch.checks.sampler import sampler_faults
from swift_r1.launch.checks.tools import ToolReport, template_faults, try_tools
from swift_r1.models.shape import longest_prompt, transformers_config
from swift_r1.plugins import LoadedPlugin, load_plugins
from swift_r1.plugins.agents import agents
from swift_r1.plugins.environments.registering import register_environment
from swift_r1.plugins.tools.mcp_servers import register_servers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from swift_r1.launch.checks.agents import AgentReport

_MADE_UP_ROW: Row = {
    "messages": [{"role": "user", "content": "made up"}],
    "dataset": "made up",
    "prompt_id": "check:0",
}

_ENVIRONMENT_S = 120.0  # for an environment to load and play its episodes

_KINDS = {
    "orms": "rewards",
    "rm_plugins": "reward model plugins",
    "datasets": "datasets",
    "schedulers": "schedulers",
    "envs": "environments",
    "samplers": "samplers",
    "tools": "tools",
    "agents": "agents",
    "trackers": "trackers",
    "others": "other",
}
"""What a plugin registers, in words."""


@dataclass(frozen=True, slots=True)
class ImageReport:
    """What becomes of an image.

    Attributes:
        size: its width and height in pixels, within `--max_pixels` and `--min_pixels`.
        tokens: how many it becomes in the prompt.
    """

    size: tuple[int, int]
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class DatasetReport:
    """The first rows of a dataset.

    Attributes:
        rows: how many could be preprocessed; `problems` says what was wrong with others.
        columns: what rewards get in addition to the prompt.
        prompt: the first row's, as the model sees it with `--model`, else its messages.
        prompt_tokens: its length; None without a tokenizer.
        images: those of the first row that has some.
    """

    name: str
    ok: bool
    rows: int
    problems: tuple[str, ...]
    columns: tuple[str, ...]
    prompt: str
    prompt_tokens: int | None
    images: tuple[ImageReport, ...] = ()


@dataclass(slots=True)
class CheckReport:
    """All findings. `faults` are those that belong to no single dataset or reward, one line each, and `notes` are what
    breaks no run."""

    plugins: list[LoadedPlugin] = field(default_factory=list)
    datasets: list[DatasetReport] = field(default_factory=list)
    rewards: list[RewardReport] = field(default_factory=list)
    tools: list[ToolReport] = field(default_factory=list)
    environment: EnvironmentReport | None = None
    agent: AgentReport | None = None
    right: str | None = None  # the completion of the first row that was tried as a right one
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tasks: dict[str, CheckReport] = field(default_factory=dict)  # of each of `--mixture`

    @property
    def ok(self) -> bool:
        """Says whether nothing found would break a run."""
        return (
            not self.faults
            and all(one.ok for one in self.datasets)
            and all(one.ok for one in self.rewards)
            and all(one.ok for one in self.tasks.values())
        )

    @property
    def num_notes(self) -> int:
        """Returns how many lines say what breaks no run."""
        notes = len(self.notes)
        notes += sum(len(data.problems) for data in self.datasets)
        notes += sum(len(reward.problems) for reward in self.rewards)
        return notes + sum(one.num_notes for one in self.tasks.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON-able values; an invalid value is the text `invalid`, no opinion is null."""
        return {
            "ok": self.ok,
            "faults": self.faults,
            "notes": self.notes,
            "plugins": [
                {kind: getattr(one, kind) for kind in ("path", *_KINDS)} for one in self.plugins
            ],
            "datasets": [asdict(one) for one in self.datasets],
            "rewards": [
                asdict(one)
                | {
                    "values": {
                        kind: [
                            "invalid" if value is not None and math.isnan(value) else value
                            for value in some
                        ]
                        for kind, some in one.values.items()
                    },
                    "milliseconds": round(one.milliseconds, 3),
                }
                for one in self.rewards
            ],
            "right": self.right,
            "tools": [asdict(one) for one in self.tools],
            "environment": None if self.environment is None else asdict(self.environment),
            "agent": None if self.agent is None else asdict(self.agent),
            "tasks": {name: one.to_json() for name, one in self.tasks.items()},
        }


def run_checks(args: CheckArguments) -> CheckReport:
    """Loads plugins and data, renders a prompt, calls the rewards. All faults are in the report."""
    report = CheckReport()
    try:
        report.plugins = load_plugins(args.external_plugins)
        register_servers(args.mcp_servers)
        register_dataset_info(args.custom_dataset_info)
    except UsageError as error:
        report.faults += error.faults
        return report
    for task in args.tasks:
        own = CheckReport(report.plugins) if task.name else report
        _check(task, own)
        if task.name:
            report.tasks[task.name] = own
    return report


def _check(task: Task, report: CheckReport) -> None:
    """Reads a task's data, renders a prompt, calls its rewards."""
    args = task.args
    assert isinstance(args, CheckArguments)
    try:
        args = _register(args, report)
        encoder = _encoder(args, report)
        rows, parts = _read(args, replace(args.data_flags, task=task.name), report, encoder)
        _try_samplers(args, report, rows)
        # those of a plugin may be of another task
        offered = report.plugins if args.calls_tools or not task.name else ()
        called = args.tools or [name for plugin in offered for name in plugin.tools]
        if (called or server_tools()) and not report.faults:
            report.tools = try_tools(args, called)
        if not args.dataset:
            rows = [_MADE_UP_ROW]
            parts = [rows]
        if rows:
            _play_agent(args, report, rows[0], encoder)
            _call_rewards(args, report, rows, parts, encoder)
    except UsageError as error:
        report.faults += error.faults
    except RunFailed as error:  # of the process that agents are forked from
        report.faults.append(str(error))
    if report.rewards and all(one.tells_right is False for one in report.rewards):
        report.faults.append(
            "no reward gives the right answer more than a wrong one: there is nothing to learn from"
        )


def _register(args: CheckArguments, report: CheckReport) -> CheckArguments:
    """Loads the environment, and looks up all names. Returns the arguments with the rewards to try: those of the plugins
    where none are named. Raises UsageError."""
    if args.env is not None:
        report.environment = check_environment(
            args.env, args.env_args, args.reward_env, args.num_rows, _ENVIRONMENT_S
        )
        if report.environment.faults:
            raise UsageError(*report.environment.faults)
        register_environment(args.env, args.env_args, args.reward_env)
    names = args.called_rewards
    if not names and not args.reward_model:
        names = [name for plugin in report.plugins for name in plugin.orms]
    args = replace(
        args, reward_funcs=names, reward_weights=args.reward_weights or [1.0] * len(names)
    )
    report.faults += name_faults(args)
    for plugin in report.plugins:
        for name in plugin.agents:
            why = why_no_agent(agents[name]) if name != args.agent else None
            if why is not None:
                report.faults.append(f"agents[{name!r}]: {why}")
    return args


def _encoder(args: CheckArguments, report: CheckReport) -> PromptEncoder | None:
    """Returns what renders prompts, where there is a model; looks at its template. Raises UsageError."""
    if not args.model:
        return None
    from swift_r1.models.loading import load_tokenizer

    transformers_config(args.model, "--model")  # or raises
    tokenizer = load_tokenizer(args.model)
    encoder = PromptEncoder(
        tokenizer,
        Wording.of(args),
        longest_prompt(args),
        args.truncation_strategy,
        partial(VisionProcessor.load, args.model, tokenizer),
    )
    if args.calls_tools:
        report.faults += template_faults(args, encoder)
    return encoder


def _read(
    args: CheckArguments, flags: DataFlags, report: CheckReport, encoder: PromptEncoder | None
) -> tuple[list[Row], list[Sequence[Row]]]:
    """Reads the first rows of each dataset. Returns them, and all rows that a run would train on and hold out; the
    first ones again where those are made, or read while it trains. Raises UsageError."""
    sources = open_sources(args.dataset, use_hf=args.use_hf)
    left_out = Drops()
    rows = [row for source in sources for row in _rows(args, source, encoder, report, left_out)]
    is_whole = rows and not args.streaming and not any(source.samples_itself for source in sources)
    if not is_whole or not all(one.ok for one in report.datasets):
        return rows, [rows]
    data = load_rows(flags)
    report.faults += row_faults(args, data.train, data.eval)
    if report.faults:
        return rows, [rows]
    report.notes += _notes_of_all(data, encoder, left_out)
    return rows, [data.train, data.eval]


def _try_samplers(args: CheckArguments, report: CheckReport, rows: Sequence[Row]) -> None:
    """Tries the sampler that is named, and those of the plugins."""
    if not rows:
        return
    # what it would choose from has more rows than this report
    more = list(islice(cycle(rows), 100))
    names = [args.prompt_sampler]
    for plugin in report.plugins:
        names += plugin.samplers
    for name in dict.fromkeys(names):
        report.faults += sampler_faults(replace(args, prompt_sampler=name), more)


def _play_agent(
    args: CheckArguments, report: CheckReport, row: Row, encoder: PromptEncoder | None
) -> None:
    """Plays one episode of the agent that is named, where nothing is wrong so far. Raises UsageError, RunFailed."""
    if not args.plays_agent or args.env is not None or report.faults:
        return
    from swift_r1.launch.checks.agents import check_agent  # which needs torch

    [gold] = right_completions(args.gold, report.plugins, args.reward_funcs, [row])
    own = tokenizer_of_run(encoder.tokenizer, Wording.of(args)) if encoder is not None else None
    report.agent = check_agent(args, row, gold, own)
    report.faults += report.agent.faults


def _call_rewards(
    args: CheckArguments,
    report: CheckReport,
    rows: Sequence[Row],
    parts: Sequence[Sequence[Row]],
    encoder: PromptEncoder | None,
) -> None:
    """Calls the rewards for the first rows, where `parts`, all rows, have the columns that they need. Raises
    UsageError."""
    names = args.reward_funcs
    if not names:
        return
    lacking = column_faults(args, *parts)
    report.faults += lacking
    if lacking:
        return
    # those judge episodes, and none is played here
    judged = [name for name in names if name not in OF_EPISODES]
    golds = right_completions(args.gold, report.plugins, judged, rows)
    if not judged or report.faults:
        return
    prefix = encoder.response_prefix if encoder is not None else args.response_prefix
    report.notes += unreadable_golds(judged, parts[0], args)
    report.rewards = try_rewards(args, judged, rows, golds, prefix)
    report.right = golds[0]


def _notes_of_all(data: LoadedData, encoder: PromptEncoder | None, left_out: Drops) -> list[str]:
    """Returns what is left out of all rows, beside what the first ones of each dataset have said."""
    notes = []
    drops = data.drops
    if drops.broken > left_out.broken:
        others = "; ".join(
            example for example in drops.examples if example not in left_out.examples
        )
        notes.append(
            f"{drops.broken:,} of all {drops.seen:,} rows are left out{', for example ' * bool(others)}{others}"
        )
    if encoder is not None:
        notes += encoder.chosen(data.train, "training")[1]
    return notes


def _rows(
    args: CheckArguments,
    source: Source,
    encoder: PromptEncoder | None,
    report: CheckReport,
    left_out: Drops,
) -> list[Row]:
    """Returns the first rows of a dataset, which gets its entry in the report; `left_out` gets those that are."""
    drops = Drops()
    raws = source.rows(
        "train", args.num_rows if source.samples_itself else None, args.data_seed or 0
    )
    try:
        some = islice(raws, 100 + args.num_rows)
        flags = replace(args.data_flags, strict=False)  # all faults are shown
        kept = preprocessed(source, some, flags, drops)
        tried = list(islice(kept, args.num_rows))
        faults = row_faults(args, tried)
        if faults:
            raise UsageError(*faults)
        rows = [row for row in tried if encoder is None or encoder.fits(row)]
        prompt, tokens = _prompt(rows[0], encoder) if rows else ("", None)
        images = next(filter(None, map(images_of, rows)), ())
        seen = tuple(_image_report(image, encoder) for image in images)
    except UsageError as error:
        report.datasets.append(DatasetReport(source.name, False, 0, error.faults, (), "", None))
        return []
    left_out.merge(drops)
    problems = [f"row left out: {example}" for example in drops.examples]
    if drops.broken > len(problems):
        problems.append(f"{drops.broken} of the first {drops.seen} rows are left out")
    counted_later = rows and not args.streaming and not source.samples_itself  # with all other rows
    if encoder is not None and len(rows) < len(tried) and not counted_later:
        problems.append(
            f"{len(tried) - len(rows)} of {len(tried)} prompts left out: longer than {encoder.limit}"
        )
    if not tried:
        problems.insert(0, _why_none(drops))
    names = {name for row in rows for name in row}
    columns = tuple(sorted(names - {"messages", "dataset", "prompt_id"}))
    report.datasets.append(
        DatasetReport(
            source.name, bool(rows), len(rows), tuple(problems), columns, prompt, tokens, seen
        )
    )
    return rows


def _image_report(image: ImageFile, encoder: PromptEncoder | None) -> ImageReport:
    size = (image.width, image.height)
    return ImageReport(size, None if encoder is None else encoder.vision.tokens_of(*size))


def _why_none(drops: Drops) -> str:
    """Says why a dataset has no row that can be used."""
    if not drops.seen:
        return "it has no rows"
    filtered = f" (its preprocessor filtered {drops.filtered} out)" if drops.filtered else ""
    return f"none of the first {drops.seen} rows can be used{filtered}"


def _prompt(row: Row, encoder: PromptEncoder | None) -> tuple[str, int | None]:
    if encoder is None:
        return "\n".join(
            f"[{message['role']}] {message['content']}" for message in row["messages"]
        ), None
    encoded = encoder.encode(row)
    assert encoded is not None  # longer ones are left out
    return encoded.text, len(encoded.token_ids)


def show(report: CheckReport, console: Console) -> None:
    """Prints the report: one table of rewards, the prompts, and what is wrong."""

    for plugin in report.plugins:
        found = {word: getattr(plugin, kind) for kind, word in _KINDS.items()}
        text = "; ".join(f"{word} {', '.join(names)}" for word, names in found.items() if names)
        console.print(f"plugin {plugin.path}: {text or 'registered nothing'}")
    _show_task(report, console)
    for name, task in report.tasks.items():
        console.print(f"task {name}", style="bold")
        _show_task(task, console)
    if not report.ok:
        console.print("this would break a run", style="red")
        return
    notes = report.num_notes
    good = f"all good, with {notes} note{'s' * (notes > 1)} above" if notes else "all good"
    console.print(good, style="green")


def _show_task(report: CheckReport, console: Console) -> None:

    if report.environment is not None:
        show_environment(report.environment, console)
    for data in report.datasets:
        _show_dataset(data, console)
    for note in report.notes:
        console.print(note, style="yellow", soft_wrap=True)
    if report.agent is not None:
        from swift_r1.launch.checks.agents import show_agent

        show_agent(report.agent, console)
    for tool in report.tools:
        console.print(
            f"tool {json.dumps(tool.function, ensure_ascii=False)}",
            soft_wrap=True,
            highlight=False,
        )
        if tool.outcome == "not called":
            continue
        style = "" if tool.outcome == "answer" else "yellow"
        text = f"  {tool.name}({tool.arguments}) -> {tool.content}"
        console.print(text, style=style, soft_wrap=True, highlight=False)
    if report.rewards:
        console.print(_rewards(report))
        if report.right is not None:
            console.print(
                f"right, of the first row: {report.right}", soft_wrap=True, highlight=False
            )
    for reward in report.rewards:
        for problem in reward.problems:
            style = "yellow" if reward.ok else "red"
            console.print(f"{reward.name}: {problem}", style=style, soft_wrap=True)
    for fault in report.faults:
        console.print(fault, style="red", soft_wrap=True)


def _show_dataset(data: DatasetReport, console: Console) -> None:
    """Prints what was tried of a dataset, its first prompt, and its problems."""

    tokens = "" if data.prompt_tokens is None else f", {data.prompt_tokens} tokens"
    columns = ", ".join(data.columns) or "none"
    tried = f"tried {data.rows} rows, columns {columns}; first prompt{tokens}:"
    console.print(f"dataset {data.name}: {tried}")
    # Exactly as it is: not wrapped, nothing in it is markup.
    console.print(
        data.prompt, style="dim", soft_wrap=True, markup=False, highlight=False, emoji=False
    )
    for number, image in enumerate(data.images, start=1):
        console.print(f"  image {number}: {_shown_image(image)}", highlight=False)
    style = "yellow" if data.ok else "red"
    for problem in data.problems:
        console.print(f"  {problem}", style=style, soft_wrap=True)


def _shown_image(image: ImageReport) -> str:
    text = "{} x {} pixels".format(*image.size)
    return text if image.tokens is None else f"{text}, {image.tokens:,} tokens"


def _rewards(report: CheckReport) -> Table:
    """Returns a column for each reward: in a narrow terminal their names are folded, and nothing is cut."""
    from rich.table import Column, Table

    styles = ["red" if not one.ok else "yellow" if one.problems else "" for one in report.rewards]
    columns = (
        Column(one.name, overflow="fold", style=style)
        for one, style in zip(report.rewards, styles, strict=True)
    )
    table = Table("completion", *columns)
    for kind in dict.fromkeys(kind for one in report.rewards for kind in one.values):
        table.add_row(kind, *(_shown(one.values.get(kind, ())) for one in report.rewards))
    table.add_section()
    table.add_row(
        "right > wrong",
        *({True: "yes", False: "no", None: "?"}[one.tells_right] for one in report.rewards),
    )
    table.add_row("ms per group", *(f"{one.milliseconds:.1f}" for one in report.rewards))
    return table


def _shown(values: Sequence[float | None]) -> str:
    """Returns one value, or the range over the rows."""
    texts = list(
        dict.fromkeys(
            "none" if value is None else "invalid" if math.isnan(value) else f"{value:g}"
            for value in values
        )
    )
    if len(texts) < 3:
        return ", ".join(texts)
    numbers = sorted(value for value in values if value is not None and not math.isnan(value))
    return f"{numbers[0]:g}..{numbers[-1]:g}" if numbers else ", ".join(texts)
