"""Secrets in every place where a user can put one: none is in a file, a log, a page or on a command line.

The two tests do the same. The short one forks its processes; the long one starts them as a user does, with two ranks,
vLLM behind the server, the trackers that are installed, and a launch.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests import forks
from tests.conftest import (
    REPO,
    ServerProcess,
    free_port,
    start_server,
    start_tiny_server,
    until,
    wait_until_serving,
)
from tests.security import planted

PLUGIN = Path(__file__).parent / "plugin.py"
JUDGE = {"api_key_env": "JUDGE_OF_OURS_KEY", "model": "judge", "timeout": 20}
PAGES = (
    "/",
    "/completions",
    "/group?step=1&group=0",
    "/tokens",
    "/time",
)
ROUTES = ("/info", "/metrics", "/openapi.json", "/v1/models", "/v1/weights/update", "/nothing")
FLAGS = {
    "rlhf_type": "grpo",
    "external_plugins": PLUGIN,
    "dataset": "counting#200",
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "gradient_checkpointing": "false",
    "logging_steps": 1,
    "report_to": "tensorboard",
    "use_vllm": "true",
    "vllm_mode": "server",
    "max_steps": 2,
    "save_steps": 1,
    "add_version": "false",
}
CLUSTERS: dict[str, dict[str, Any]] = {
    "local": {},
    "ssh": {"hosts": ["gen1", "gen2"]},
    "slurm": {"partition": "p"},
    "kubernetes": {"image": "i", "claim": "c"},
}


class Place:
    """A folder in which commands run; what they say is kept there."""

    def __init__(self, folder: Path, cold: bool) -> None:
        self.folder, self.cold = folder, cold
        self.texts: dict[str, str] = {}

    def start(self, name: str, *words: object, forked: bool = False, **flags: Any) -> Any:
        values = {
            flag: value if isinstance(value, list) else [value] for flag, value in flags.items()
        }
        more = [word for flag, listed in values.items() for word in (f"--{flag}", *listed)]
        command = ["-m", "swift_r1", *map(str, (*words, *more))]
        with (self.folder / f"{name}.said").open("w") as out:
            if forked and not self.cold:
                return forks.start(command, cwd=self.folder, stdout=out, stderr=forks.STDOUT)
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, name: str, *words: object, **more: Any) -> int:
        code: int = self.start(name, *words, **more).wait(240)
        return code

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.said").read_text()

    def asked(self, url: str, key: str, paths: tuple[str, ...]) -> None:
        """Keeps what an address answers, with the key and without."""
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
            for path in paths:
                with_key = http.get(path, headers={"Authorization": f"Bearer {key}"})
                assert with_key.status_code == (404 if path == "/nothing" else 200), path
                without = http.get(path)
                assert without.status_code == 401, path
                for answer in (with_key, without):
                    self.texts[f"{url}{path} {answer.status_code}"] = (
                        f"{answer.headers}{answer.text}"
                    )


@pytest.mark.timeout(900)  # the cold one starts each command's Python anew
@pytest.mark.parametrize(
    "cold", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forked", "cold"]
)
def test_no_secret_is_told(
    cold: bool, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in planted.environ().items():
        monkeypatch.setenv(name, value)
    for name, value in {
        "HOME": "home",
        "SWIFT_R1_CACHE": "cache",
        "TMPDIR": "tmp",
        "WANDB_DIR": "wandb",
    }.items():
        (tmp_path / value).mkdir()
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    place, service = Place(tmp_path, cold), planted.Service()
    start: Any = start_server if cold else start_tiny_server
    server: ServerProcess = start(tmp_path / "server", tiny_model)
    try:
        key = planted.secret("SWIFT_API_KEY")
        wait_until_serving(server, key)
        with planted.CommandLines(planted.EVERYTHING) as lines:
            _train(place, tiny_model, server.url, service)
            _read(place, key)
            place.asked(server.url, key, ROUTES)
            _launch(place, tiny_model)
            _refused(place, tiny_model, server.url, monkeypatch)
        assert not lines.found and len(lines.looked_at) > 5
    finally:
        server.stop()
        service.shutdown()
    assert service.keys == {
        "/rewards": {f"Bearer {planted.secret('SWIFT_REWARD_API_TOKEN')}"},
        "/v1/chat/completions": {f"Bearer {planted.secret('JUDGE_OF_OURS_KEY')}"},
    }
    assert planted.leaks(tmp_path, place.texts, planted.EVERYTHING) == []


def _train(place: Place, model: Path, url: str, service: planted.Service) -> None:
    """Two steps with a judge, a server of rewards and a reward that tells all; then a run that crashes."""
    flags = FLAGS | {"model": model, "vllm_server_base_url": url}
    judge = json.dumps(JUDGE | {"url": f"{service.url}/v1"})
    more: dict[str, Any] = {
        "reward_funcs": ["judge", "api", "tells"],
        "judge": judge,
        "reward_api": f"{service.url}/rewards",
    }
    if place.cold:
        more |= {
            "report_to": ["tensorboard", "wandb"],
            "deepspeed": "zero2",
            "per_device_train_batch_size": 2,
        }
        os.environ["NPROC_PER_NODE"] = "2"
    run = place.folder / "run"
    page = {"view": "true", "view_port": free_port()}
    code = place.run(
        "train",
        "rlhf",
        forked=True,
        **(flags | more | page | {"log_tokens": "all", "output_dir": run}),
    )
    os.environ.pop("NPROC_PER_NODE", None)
    assert code == 0, place.said("train")
    assert "RuntimeError: failed with" in (run / "invalid_rewards.jsonl").read_text()
    assert "'SWIFT_R1_REWARD_POOL'" in place.said("train")  # the reward's variables are in the log

    words = flags | {
        "reward_funcs": "tells",
        "max_steps": 100_000,
        "output_dir": place.folder / "crashed",
    }
    crashed = place.start("crashed", "rlhf", forked=True, **words)
    until(
        lambda: (place.folder / "crashed" / "checkpoint-1").exists() or crashed.poll() is not None,
        120,
    )
    crashed.send_signal(signal.SIGABRT)
    assert crashed.wait(60) != 0


def _read(place: Place, key: str) -> None:
    """All that reads a run."""
    run = place.folder / "run"
    for number, words in enumerate(
        (
            ("report",),
            ("report", "-o", "report.md"),
            ("why",),
            ("why", "--json"),
        )
    ):
        assert place.run(f"read-{number}", words[0], run, *words[1:], forked=True) == 0, place.said(
            f"read-{number}"
        )
    page = place.start("page", "view", run, "--port", free_port(), forked=True)
    try:
        url = until(
            lambda: page.poll() is not None or re.search(r"http://\S+?(?=[; ])", place.said("page"))
        )[0]
        place.asked(url, key, PAGES)
        place.texts["a visit"] = str(httpx.get(f"{url}/?key={key}", trust_env=False).headers)
    finally:
        page.send_signal(signal.SIGTERM)
        page.wait(30)


def _launch(place: Place, model: Path) -> None:
    rlhf = {name: str(value) for name, value in FLAGS.items() if "vllm" not in name}
    content: dict[str, Any] = {
        "rlhf": rlhf | {"model": str(model), "reward_funcs": "tells", "output_dir": "launched"},
        "roles": {"train": {}, "rollout": {}},
        "environ": {
            "AWS_SECRET_ACCESS_KEY": None,
            "PGPASSWORD": None,
            "HTTPS_PROXY": None,
            "HF_TOKEN": None,
        },
    }
    for name, options in CLUSTERS.items():
        (place.folder / f"{name}.yaml").write_text(yaml.safe_dump(content | {name: options}))
        code = place.run(
            f"dry-{name}", "launch", f"{name}.yaml", "--on", name, "--dry_run", forked=True
        )
        assert code == 0, place.said(f"dry-{name}")
    assert "HF_TOKEN=***" in place.said("dry-ssh")
    if place.cold:
        assert place.run("launched", "launch", "local.yaml", "--on", "local") == 0, place.said(
            "launched"
        )


def _refused(place: Place, model: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys on a command line of the user's own, and wrong ones: what is said of them."""
    flags = FLAGS | {"model": model, "reward_funcs": "tells", "vllm_server_base_url": url}
    wrong = planted.secret("VLLM_API_KEY")
    monkeypatch.setenv("SWIFT_API_KEY", wrong)
    assert place.run("wrong", "rlhf", forked=True, **flags, output_dir="wrong") == 2, place.said(
        "wrong"
    )
    assert "wants another API key" in place.said("wrong")
    monkeypatch.delenv("SWIFT_API_KEY")
    assert place.run("keyless", "rlhf", forked=True, **flags, output_dir="keyless") == 2, (
        place.said("keyless")
    )
    assert "wants an API key: put it into SWIFT_API_KEY" in place.said("keyless")
    asked = {
        "benchmarks": "counting#2",
        "reward_func": "tells",
        "external_plugins": PLUGIN,
        "output_dir": "evaluated",
    }
    assert place.run("eval-wrong", "eval", forked=True, model=url, **asked) == 2
    monkeypatch.setenv("SWIFT_API_KEY", planted.secret("SWIFT_API_KEY"))
    assert (
        place.run("eval", "eval", forked=True, model=url, max_completion_length=4, **asked) == 0
    ), place.said("eval")
