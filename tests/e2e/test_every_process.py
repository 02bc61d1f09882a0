"""Every process of a run is killed and paused, one by one and never a group, at random moments: the run holds.

Each fault is drawn from those that were tried least.

`SWIFT_R1_STEPS` (500) is the length of the runs, `SWIFT_R1_SEED` (0) chooses the faults, and `SWIFT_R1_FAULTS` names a
file to which each fault is added as a line of JSON: layout, process, fault, held.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import KillableServer, ServerProcess, start_server, start_tiny_server
from tests.e2e.live_run import (
    SOAK_S,
    STEPS,
    LiveRun,
    Traces,
    check_every_prompt_once,
    steps_of,
    what_was_learned,
    words_of,
)

SEED = int(os.environ.get("SWIFT_R1_SEED", "0"))
PAUSES_S = (0.5, 8.0)
TRACKER = "tracker of shared memory"
SERVER_ENDS_WITH = ("server", "engine core", "engine worker")
ENDS_IN_S = 60.0  # a run of which a process was killed, where that ends it

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * SOAK_S)]


@dataclass
class Layout:
    """How the processes of a run are laid out.

    Attributes:
        flags: of `swift rlhf`.
        server: starts the server that the run asks, at a port or a free one; None where it has none of its own.
        every: steps between two faults, at least and at most.
        equal: the completions are the undisturbed run's, one for one.
    """

    name: str
    processes: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    server: Callable[[Path, Path, int | None], Any] | None = None
    every: tuple[int, int] = (8, 16)
    equal: bool = True


SERVED = {"use_vllm": "true", "vllm_server_timeout": 300}
COLOCATED = {
    "use_vllm": "true",
    "vllm_mode": "colocate",
    "torch_dtype": "float32",
    "vllm_engine_kwargs": json.dumps({"kv_cache_memory_bytes": 64 << 20}),
    "vllm_server_timeout": 300,
}
LAYOUTS = [
    Layout(
        "two ranks",
        2,
        {"deepspeed": "zero2", "deterministic": "true", "per_device_train_batch_size": 8},
    ),
    Layout(
        "a server", 1, SERVED, lambda folder, model, port: start_tiny_server(folder, model, port)
    ),
    Layout(
        "two rounds ahead",
        1,
        SERVED | {"async_generate": "true", "max_staleness": 2},
        lambda folder, model, port: start_tiny_server(folder, model, port),
        equal=False,
    ),
    Layout(
        "a server with vLLM",
        1,
        SERVED,
        lambda folder, model, port: start_server(
            folder, model, torch_dtype="float32", vllm_tensor_parallel_size=2, port=port
        ),
        every=(20, 40),
        equal=False,
    ),
    Layout("colocated", 1, COLOCATED, every=(20, 40), equal=False),
]


class Soak:
    """A run that is brought to its end through all its faults."""

    def __init__(
        self, layout: Layout, model: Path, folder: Path, temporary: Path, rng: random.Random
    ) -> None:
        self.layout, self.model, self.folder, self.temporary, self.rng = (
            layout,
            model,
            folder,
            temporary,
            rng,
        )
        self.server: KillableServer | None = None
        self.servers: dict[int, Traces] = {}
        self.faults: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None
        self.due = rng.randint(*layout.every)
        self.pauses: list[threading.Timer] = []

    def start_server(self) -> None:
        start = self.layout.server
        if start is None:
            return

        def start_here(model: Path, port: int | None) -> ServerProcess:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TMPDIR", str(self.temporary))
                return start(self.folder.parent / "server", model, port)

        self.server = KillableServer(start_here, self.model)
        self.server.wait()

    def run(self, disturbed: bool) -> None:
        while True:
            url = {} if self.server is None else {"vllm_server_base_url": self.server.url}
            more = {
                "max_steps": STEPS,
                "save_steps": 10,
                "save_total_limit": 2,
            }
            more |= (
                {
                    "learning_rate": 1e-3,
                    "resume_from_checkpoint": "last",
                    "reward_isolation": "process",
                }
                | self.layout.flags
                | url
            )
            self.live = LiveRun(
                words_of(self.model, self.folder, **more),
                self.layout.processes,
                self.temporary,
                cold=True,
            )
            code = self.live.follow(self.at_step if disturbed else lambda _step: None, SOAK_S)
            left = self.live.traces.left(ENDS_IN_S)
            print(self.live.said)
            assert not left, (self.faults[-1:], code, left)
            if code == 0:
                self.settle()
                return
            assert self.open is not None, (code, self.live.said[-3000:])
            self.open["code"] = code

    def at_step(self, step: int) -> None:
        if step < self.taken():  # it was said a while ago
            return
        self.live.traces.look()
        if step < self.due or step >= STEPS - 1:
            return
        self.settle()
        time.sleep(self.rng.random() * 0.3)  # anywhere in the step that follows
        found = self.processes()
        self.due = max(step, self.taken()) + self.rng.randint(*self.layout.every)
        if not found:  # it has ended
            return
        tried = Counter((one["process"], one["fault"]) for one in self.faults)
        choices = [(who, what) for who in sorted(found) for what in ("killed", "paused")]
        fewest = min(tried[choice] for choice in choices)
        who, what = self.rng.choice([choice for choice in choices if tried[choice] == fewest])
        self.open = {
            "layout": self.layout.name,
            "process": who,
            "fault": what,
            "step": step,
            "held": False,
        }
        self.faults.append(self.open)
        victim = self.rng.choice(found[who])
        if (who, what) == (TRACKER, "killed"):
            for traces in (self.live.traces, *self.servers.values()):
                traces.untracked |= victim in traces.processes
        if what == "paused":
            victim.send_signal(signal.SIGSTOP)
            self.pauses.append(threading.Timer(self.rng.uniform(*PAUSES_S), go_on, [victim]))
            self.pauses[-1].start()
        else:
            victim.kill()
            if who in SERVER_ENDS_WITH and self.server is not None:
                self.server.kill()
                self.server.start()

    def taken(self) -> int:
        """Steps so far; what the run says of them is read later."""
        return (self.folder / "logging.jsonl").read_bytes().count(b"\n")

    def settle(self) -> None:
        """Several steps were taken since, or the end was reached: what was done last was borne."""
        if self.open is not None:
            self.open["held"] = True
            self.open = None

    def processes(self) -> dict[str, list[psutil.Process]]:
        """All that run now, by what they are."""
        found: dict[str, list[psutil.Process]] = {}
        for one in self.live.traces.look():
            found.setdefault(kind_of(one, self.live.process.pid), []).append(one)
        if self.server is not None:
            traces = self.servers.setdefault(self.server.pid, Traces(self.server.pid))
            for one in traces.look():
                kind = "server" if one.pid == self.server.pid else kind_of(one, self.server.pid)
                found.setdefault(kind, []).append(one)
        return found

    def close(self) -> None:
        for timer in self.pauses:
            timer.join()
        self.live.close()
        if self.server is not None:
            self.server.server.stop()


def go_on(paused: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # the run has ended meanwhile
        paused.send_signal(signal.SIGCONT)


def kind_of(process: psutil.Process, first: int) -> str:
    """What a process is, by what it runs, and by its place."""
    words = " ".join(process.cmdline())
    group = os.getpgid(process.pid)
    if "resource_tracker" in words:
        return TRACKER
    if "EngineCore" in words:
        return "engine core"
    if "Worker" in words:
        return "engine worker"
    if "swift_r1.launch.supervisor" in words:
        return "supervisor"
    if "swift_r1.serving.server" in words or "swift_r1 rollout" in words:
        return "server"
    if "spawn_main" in words:
        parent = process.parent()
        forked = parent is not None and "spawn_main" in " ".join(parent.cmdline())
        return "reward worker" if forked else "reward host" if group == process.pid else "spawned"
    if process.pid == first:
        return "launcher" if "elastic" in words else "trainer"
    if "swift_r1.cli.rank" in words:
        return f"rank {process.environ().get('RANK')}"
    return words[:60] or process.name()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose name is short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_process_killed_and_paused(
    layout: Layout, tiny_model: Path, tmp_path: Path, temporary: Path
) -> None:
    rng = random.Random(f"{SEED} {layout.name}")
    calm, soak = (
        Soak(layout, tiny_model, tmp_path / name / "run", temporary, rng)
        for name in ("calm", "soak")
    )
    if layout.equal:
        calm.folder.parent.mkdir()
        calm.start_server()
        try:
            calm.run(disturbed=False)
        finally:
            calm.close()
    soak.folder.parent.mkdir()
    soak.start_server()
    try:
        soak.run(disturbed=True)
    finally:
        soak.close()
        tell(soak.faults)
    left = [what for traces in soak.servers.values() for what in traces.left()]
    assert not left, left
    # docs/reliability.md says why vLLM's file stays.
    found = [one.name for one in temporary.iterdir() if not one.name.startswith("vllm_dist_")]
    assert not found
    assert all(fault["held"] for fault in soak.faults)
    check_every_prompt_once(soak.folder, STEPS)
    steps = steps_of(soak.folder)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert max(step.get("rollout/staleness/max", 0) for step in steps) <= 2
    if layout.equal:
        assert what_was_learned(soak.folder) == what_was_learned(calm.folder)


def tell(faults: list[dict[str, Any]]) -> None:
    """A line a kind of fault, on stdout; each as JSON in the file that SWIFT_R1_FAULTS names."""
    kinds = sorted({(one["layout"], one["process"], one["fault"]) for one in faults})
    for kind in kinds:
        same = [one for one in faults if (one["layout"], one["process"], one["fault"]) == kind]
        print(f"{' | '.join(kind)} | {len(same)} | {sum(one['held'] for one in same)}")
    if path := os.environ.get("SWIFT_R1_FAULTS"):
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(one) + "\n" for one in faults)
