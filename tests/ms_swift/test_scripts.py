"""ms-swift's own scripts run: MS_SWIFT_SOURCE names a checkout of its sources (or several, with colons between).

Each script's own commands run in that folder, with small sizes (`smaller.py` lists what is replaced): `swift rollout`
as often as the script has it, then `swift rlhf`, which ends with exit code 0 and a checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, chdir
from pathlib import Path

import pytest

from tests.conftest import REPO, ServerProcess, free_port, save_tiny_model, wait_until_serving
from tests.data.hub_stand_in import Hub
from tests.ms_swift.scripts import (
    NO_SOURCE,
    NODES_OF,
    SOURCES,
    ScriptCommand,
    case_of,
    commands,
    faults,
    scripts,
    sees,
    stops_at,
)
from tests.ms_swift.smaller import Place, smaller, write_hub
from tests.vision import write_tiny

SECONDS = 900  # for the trainer's processes

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.skipif(not SOURCES, reason=NO_SOURCE),
]


def cases() -> list[object]:
    return [
        pytest.param(source, path, id=case_of(source, path))
        for source in SOURCES
        for path in scripts(source)
        if path.name not in NODES_OF
    ]


def started(
    words: list[str], environ: dict[str, str], log: Path, cwd: Path
) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name != "MS_SWIFT_SOURCE"}
    path = f"{REPO}:{inherited.get('PYTHONPATH', '')}"
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "swift_r1", *words],
            cwd=cwd,
            env={**inherited, "PYTHONPATH": path, **environ},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that lead to a hub with the scripts' data sets."""
    folder = tmp_path_factory.mktemp("hub")
    write_hub(folder / "files")
    with Hub(folder / "files") as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield {
            "USE_HF": "1",
            "HF_ENDPOINT": served.url,
            "HF_HOME": str(folder / "cache"),
            "HF_HUB_OFFLINE": "0",
        }
        served.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", kind="qwen2", max_position_embeddings=4096
    )


@pytest.fixture(scope="module")
def sighted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(
        "idefics3", tmp_path_factory.mktemp("models") / "sighted", max_position_embeddings=4096
    )


@pytest.mark.parametrize(("source", "path"), cases())
def test_script(
    source: Path,
    path: Path,
    model: Path,
    sighted_model: Path,
    hub: dict[str, str],
    tmp_path: Path,
) -> None:
    with chdir(source):
        others = [path.with_name(second) for second, first in NODES_OF.items() if first == path]
        called = [command for one in (path, *others) for command in commands(one)]
        refused = [fault for one in called for fault in faults(one)]
    if refused:
        pytest.skip(f"refused: {'; '.join(refused)}")
    if stop := next(filter(None, map(stops_at, called)), None):
        pytest.skip(f"it is refused for {stop}")
    run_commands(called, source, sighted_model if sees(called[0]) else model, hub, tmp_path)


def run_commands(
    called: list[ScriptCommand], source: Path, model: Path, hub: dict[str, str], folder: Path
) -> None:
    """Runs the servers, then the trainer's nodes; fails with the end of the log of what fails."""
    ports, master_port = [], free_port()
    with ExitStack() as cleanup:
        for number, command in enumerate(one for one in called if one.name == "rollout"):
            port, log = free_port(), folder / f"rollout-{number}.log"
            words, environ = smaller(command, Place(model, folder, [port]))
            process = started(words, environ, log, source)
            server = ServerProcess(f"http://127.0.0.1:{port}", port, process, log)
            cleanup.callback(server.stop)
            wait_until_serving(server)
            ports.append(port)
        nodes: list[tuple[subprocess.Popen[bytes], Path]] = []
        trainers = [one for one in called if one.name == "rlhf"]
        for number, command in enumerate(trainers):
            place = Place(model, folder / "run", ports, master_port, len(trainers))
            words, environ = smaller(command, place)
            log = folder / f"rlhf-{number}.log"
            process = started(words, environ | hub, log, source)
            cleanup.callback(process.kill)
            nodes.append((process, log))
        for process, log in nodes:
            assert process.wait(SECONDS) == 0, log.read_text()[-6000:]
    assert list((folder / "run").glob("**/checkpoint-2/model.safetensors")) or list(
        (folder / "run").glob("**/checkpoint-2/adapter_model.safetensors")
    )
