"""A rank whose weights are spread over ranks holds two gathered buckets at most, in a push and in a save."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swift_r1.training.backends.base import BUCKET_BYTES

SCRIPT = """
import ctypes, json, sys
from contextlib import contextmanager
from pathlib import Path
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from swift_r1.models.weights import policy_weights
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.backends.local import LocalBackend
from swift_r1.training.checkpoint.saving import one_each
from swift_r1.training.checkpoint.tensors import ModelShards, write_tensors
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.sync.snapshot import WeightSnapshot
from swift_r1.sync.transport import overlapped

class Gathers(LocalBackend):
    partitioned = True  # all parts are here, and gathering them takes memory as it does elsewhere

    @contextmanager
    def gathered(self, parameters, write=False):
        kept = [one.data for one in parameters]
        for one in parameters:
            one.data = one.data.clone()
        yield
        for one, data in zip(parameters, kept, strict=True):
            one.data = data

    def _state_value(self, kind, parameter):
        return super()._state_value(kind, parameter).clone()

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

def more(work):
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = memory("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    work()
    return memory("VmHWM:") - before

def push():
    snapshot.begin(1, None, False, True)
    overlapped(backend.weight_buckets(policy_weights(model)), lambda _, bucket: snapshot.add(bucket))
    snapshot.end(True)

def save():
    shards.write(folder / "model", shards.tensors(backend))
    for bucket in one_each(backend.training_state(), 1):
        write_tensors(folder / "state", dict(bucket))

folder = Path(sys.argv[1])
config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, vocab_size=100)
model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
backend = Gathers(model, OptimizerConfig(1e-6, 0.0, 0.9, 0.95, 1e-8, 1.0, "sgd"))

snapshot, shards = WeightSnapshot(), ModelShards(model, policy_weights(model), Ranks(0, 1, torch.device("cpu"), None))
print(json.dumps([more(push), more(save)]))
"""


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc"
)
def test_two_gathered_buckets_at_most(tmp_path: Path) -> None:
    """Of 3 buckets of weights and 5 of the state."""
    environ = {
        "PYTHONPATH": ":".join(sys.path),
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    push, save = json.loads(done.stdout)
    assert 0.9 * BUCKET_BYTES < push < 2.2 * BUCKET_BYTES, push / BUCKET_BYTES
    assert 0.9 * BUCKET_BYTES < save < 2.2 * BUCKET_BYTES, save / BUCKET_BYTES
