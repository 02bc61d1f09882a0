"""`--on slurm`: outside of a job one is submitted and followed; inside of it the driver reaches its nodes by `srun`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_r1.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RUN_FAILED,
    EXIT_TERMINATED,
    RunFailed,
    UsageError,
)
from swift_r1.fleet.backend import AgentPipe, Node, ProcessPipe, agent_words
from swift_r1.fleet.backends.slurm_job import components, job_script, slurm_options
from swift_r1.fleet.run_file import RunFile
from swift_r1.record.folder import checkpoints_of
from swift_r1.runtime.processes import handlers_kept, say

_ASK_S = 2.0
_SILENT_S = 600.0  # for a controller that does not answer
_CALL_S = 60.0  # for one command of Slurm's
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_AT_WORK = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")


@dataclass(frozen=True)
class JobComponent:
    """Nodes of one component of the job; `number` is None where there is only one."""

    number: int | None
    hosts: tuple[str, ...]
    roles: tuple[str, ...] = ()


class SlurmBackend:
    """The nodes of the job that this process runs in."""

    def __init__(self, groups: Sequence[JobComponent], python: str, silence_s: float) -> None:
        self._python = python
        self._silence_s = silence_s
        self._places = {
            f"{host}+{group.number}" if group.number else host: (host, group)
            for group in groups
            for host in group.hosts
        }
        self._addresses = _addresses(sorted({host for host, _ in self._places.values()}))

    def nodes(self) -> Sequence[Node]:
        down = _down({host for host, _ in self._places.values()})
        return [
            Node(
                name,
                self._addresses.get(host),
                python=self._python,
                folder=str(Path.cwd()),
                roles=group.roles,
            )
            for name, (host, group) in self._places.items()
            if host not in down
        ]

    def connect(self, node: Node) -> AgentPipe:
        return ProcessPipe(self.command(node), step_environment(os.environ))

    def command(self, node: Node) -> Sequence[str]:
        host, group = self._places[node.name]
        own = [] if group.number is None else [f"--het-group={group.number}"]
        step = [
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
            "--cpu-bind=none",
            "--mem=0",
        ]
        return ["srun", *own, *step, sys.executable, *agent_words(self._silence_s), "told"]


_OF_THE_JOB = frozenset(
    (
        "SLURM_CLUSTER_NAME",
        "SLURM_CONF",
        "SLURM_CONF_SERVER",
        "SLURM_HET_SIZE",
        "SLURM_JOBID",
        "SLURM_JOB_ID",
        "SLURM_JWT",
        "SLURM_NODE_ALIASES",
        "SLURM_WORKING_CLUSTER",
    )
)


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of `srun`. Of Slurm's own it gets those that say which job it belongs to, and how Slurm is
    reached: it takes nearly all others for options, and they describe the job's first component."""
    return {
        name: value
        for name, value in environ.items()
        if name in _OF_THE_JOB or not name.startswith(("SLURM_", "SRUN_"))
    }


def open_backend(run: RunFile, silence_s: float) -> SlurmBackend:
    options = slurm_options(run)
    parts = components(run, options)
    python = options.get("python", sys.executable)
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UsageError("there is no SLURM_JOB_NODELIST: this is not the inside of a Slurm job")
    count = int(os.environ.get("SLURM_HET_SIZE", "0"))
    if not count:
        return SlurmBackend([JobComponent(None, tuple(_hostnames(nodes)))], python, silence_s)
    if count != len(parts):
        raise UsageError(f"this job has {count} components, and {run.path} asks for {len(parts)}")
    lists = [os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"] for number in range(count)]
    groups = [
        JobComponent(number, tuple(_hostnames(one)), part.roles)
        for number, (one, part) in enumerate(zip(lists, parts, strict=True))
    ]
    return SlurmBackend(groups, python, silence_s)


def hand_over(run: RunFile, words: Sequence[str], dry_run: bool) -> int | None:
    """Submits the job and follows it until it has ended; prints its script where `dry_run`; None inside of a job."""
    folder = Path(str(run.flags.get("output_dir") or "output")).absolute()
    script = job_script(run, words, folder)
    if dry_run:
        print(script, end="")
        return EXIT_OK
    if "SLURM_JOB_ID" in os.environ:
        return None
    if shutil.which("sbatch") is None:
        raise UsageError(
            "there is no sbatch on this machine: start on a login node of the cluster, or --dry_run"
        )
    folder.mkdir(parents=True, exist_ok=True)
    submitted = _call("sbatch", "--parsable", stdin=script)
    if submitted.returncode:
        raise UsageError(_one_line(submitted.stderr))
    job = submitted.stdout.strip().partition(";")[0]
    log = folder / f"slurm-{job}.log"
    say(f"job {job} is submitted; its output is in {log}", "launch")
    with _signals_heard() as heard:
        return _follow(job, log, heard)


def after(code: int, folder: Path, output_dir: Path, max_restarts: int) -> int:
    """Queues a job again that Slurm has told to end, after the driver's end inside it, unless more than
    `max_restarts` of its starts in a row have brought the run in `folder` no further. Returns the exit code."""
    job = os.environ.get("SLURM_JOB_ID")
    if code != EXIT_TERMINATED or job is None or _state(job).get("JobState") != "RUNNING":
        return code
    idle = _starts_without_a_step(folder, output_dir / f"slurm-{job}.steps")
    if idle > max_restarts:
        say(
            f"job {job} is not queued again, since starts without a step gained: {idle} (--max_restarts "
            f"{max_restarts}); slurm: time must be longer than start-up, a step and slurm: warning together",
            "launch",
        )
        return EXIT_RUN_FAILED
    with _signals_heard():  # Slurm ends this process for it
        requeued = _call("scontrol", "requeue", job)
        if requeued.returncode:
            say(f"job {job} cannot be queued again: {_one_line(requeued.stderr)}", "launch")
        else:
            say(f"job {job} is queued again; it resumes from its last checkpoint", "launch")
    return code


def _starts_without_a_step(folder: Path, log: Path) -> int:
    """Counts the starts of a job, this one included, that have ended with the same checkpoint; `log` has those
    before."""
    before = log.read_text(encoding="utf-8").split() if log.exists() else ["0"]
    step = str(max(checkpoints_of(folder), default=0))
    log.write_text("\n".join([*before, step]) + "\n", encoding="utf-8")
    return next((count for count, one in enumerate(reversed(before)) if one != step), len(before))


def _follow(job: str, log: Path, heard: Sequence[int]) -> int:
    """Passes on what the job prints, and says what it waits for; returns the run's exit code. The first signal asks
    the run to end with a checkpoint, the second ends the job."""
    shown = 0
    said = ""
    done = 0
    known = time.monotonic()
    while True:
        state = _state(job)
        if state:
            known = time.monotonic()
        elif time.monotonic() - known > _SILENT_S:
            raise RunFailed(
                f"Slurm has said nothing of job {job} for {_SILENT_S:g} s; it may still run"
            )
        shown = _pass_on(log, shown)
        what = state.get("JobState", "")
        if what and what not in (*_WAITING, *_AT_WORK):
            return _end(job, what, state, done)
        if what in _WAITING:
            line = _waiting(job, state)
            if line != said:
                say(line, "launch")
            said = line
        elif what == "RUNNING" and said != what:
            say(f"job {job} runs on {state.get('NodeList')}", "launch")
            said = what
        if len(heard) > done:
            done = len(heard)
            if what == "RUNNING" and done == 1:
                say(
                    f"job {job} is asked to end after this step, with a checkpoint; once more cancels it",
                    "launch",
                )
                _call("scancel", "--batch", "--signal=INT", job)
            else:
                _call("scancel", job)
        time.sleep(_ASK_S)


def _end(job: str, what: str, state: Mapping[str, str], interrupted: int) -> int:
    code, _, number = state.get("ExitCode", "0:0").partition(":")
    if what == "COMPLETED":
        return EXIT_OK
    if what == "CANCELLED" or interrupted:
        say(f"job {job}: {what.lower()}", "launch")
        return EXIT_INTERRUPTED
    reason = f" by signal {number}" if number != "0" else f" with exit code {code}"
    say(f"job {job}: {what.lower()}{reason} ({state.get('Reason', 'None')})", "launch")
    return int(code) or EXIT_RUN_FAILED


def _waiting(job: str, state: Mapping[str, str]) -> str:
    reason = state.get("Reason", "None")
    again = state.get("Restarts", "0")
    why = (
        "Slurm has not said yet for what"
        if reason == "None"
        else f"{reason}{_MEANINGS.get(reason, '')}"
    )
    begun = f", after {again} restarts" if again != "0" else ""
    start = state.get("StartTime", "Unknown")
    expected = f"; Slurm expects to start it at {start}" if start != "Unknown" else ""
    return f"job {job} waits{begun}: {why}{expected}"


_MEANINGS = {
    "Resources": " (it is the next one, and its nodes are busy)",
    "Priority": " (others are before it)",
    "PartitionNodeLimit": " (it asks for more nodes than the partition gives, or has: it will not start)",
    "PartitionTimeLimit": " (it asks for more time than the partition gives: it will not start)",
    "PartitionDown": " (the partition takes no jobs now)",
    "ReqNodeNotAvail": " (a node that it needs is down or reserved)",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": "",
    "QOSMaxJobsPerUserLimit": " (you have as many jobs as you may)",
    "BeginTime": " (Slurm waits a while before it starts a job again)",
}


def _state(job: str) -> dict[str, str]:
    """Returns what `scontrol` says of a job, of its first component; empty if it does not answer."""
    shown = _call("scontrol", "--oneliner", "show", "job", job)
    lines = shown.stdout.splitlines()
    return dict(word.split("=", 1) for word in lines[0].split() if "=" in word) if lines else {}


def _pass_on(log: Path, shown: int) -> int:
    """Prints what has come to the file after `shown` bytes; returns how many there are."""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(shown)
        text = file.read()
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        return shown + len(text)
    return shown


@contextlib.contextmanager
def _signals_heard() -> Iterator[list[int]]:
    """Yields a list that SIGINT and SIGTERM add to; they do nothing else."""
    heard: list[int] = []
    with handlers_kept(signal.SIGINT, signal.SIGTERM):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda got, _frame: heard.append(got))
        yield heard


def _hostnames(nodes: str) -> list[str]:
    return _asked("scontrol", "show", "hostnames", nodes).split()


def _addresses(hosts: Sequence[str]) -> dict[str, str]:
    found = {}
    for line in _asked("scontrol", "--oneliner", "show", "node", ",".join(hosts)).splitlines():
        words = dict(word.split("=", 1) for word in line.split() if "=" in word)
        found[words["NodeName"]] = words["NodeAddr"]
    return found


def _down(hosts: set[str]) -> set[str]:
    """Returns the hosts that Slurm has given up; none if it does not answer."""
    shown = _call("sinfo", "-h", "-N", "-n", ",".join(sorted(hosts)), "-o", "%N %t")
    states = (line.split() for line in shown.stdout.splitlines())
    return {host for host, state in states if state.startswith(("down", "fail"))}


def _asked(*words: str) -> str:
    done = _call(*words)
    if done.returncode:
        raise UsageError(_one_line(done.stderr))
    return done.stdout


def _call(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_CALL_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise UsageError(f"there is no {words[0]} on this machine") from error
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            words, 1, "", f"{words[0]} has not answered for {_CALL_S:g} s"
        )


def _one_line(text: str) -> str:
    return (
        "; ".join(line.strip() for line in text.splitlines() if line.strip())[:300]
        or "no reason was given"
    )
