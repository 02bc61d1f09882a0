"""`examples/minimal_grpo.py`: its update does what it should, and (long) it learns the demo's task."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path += [str(EXAMPLES), str(EXAMPLES / "countdown_demo")]

import minimal_grpo  # noqa: E402
import task  # noqa: E402
import tiny_model  # noqa: E402


def test_updates_raise_what_was_rewarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimal_grpo, "MAX_TOKENS", 12)
    monkeypatch.setattr(minimal_grpo, "MICRO_BATCH", 3)
    model = tiny_model.make_model(0)
    policy = minimal_grpo.Policy(model)
    samples = minimal_grpo.Sampler(model, tiny_model.make_tokenizer(), 0).sample(
        task.split()[0][:2], 4
    )
    advantages = torch.tensor([1.0, -1.0] * 4)

    def advantage_weighted() -> float:
        """The mean log-prob of each completion, times its advantage."""
        inputs, mask = minimal_grpo.collate(samples)
        logps = torch.zeros(mask.shape).masked_scatter(mask, policy(1.0, *inputs).logps)
        return (logps.sum(1) / mask.sum(1) * advantages).sum().item()

    before = advantage_weighted()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    first, *_ = (minimal_grpo.update(policy, optimizer, samples, advantages) for _ in range(3))
    assert first["rollout/logp_diff"] < 1e-5
    assert advantage_weighted() > before + 0.1


@pytest.mark.long
def test_it_learns_the_demos_task(tmp_path: Path) -> None:
    environment = os.environ | {
        "GOMP_SPINCOUNT": "10000",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(*words: str | Path) -> str:
        return subprocess.run(
            [*map(str, words)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=True,
        ).stdout

    run(EXAMPLES / "mini/make_model.sh", "countdown", tmp_path / "model")
    said = run(sys.executable, EXAMPLES / "minimal_grpo.py", tmp_path / "model")
    before, after = map(float, re.findall(r"held-out accuracy \w+: ([0-9.]+)", said))
    assert after > before + 0.15
