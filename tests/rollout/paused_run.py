"""`python paused_run.py MODEL WHO TTL_S SILENCE_S URL=PID...`: a trainer that stops itself, or its first server.

In each phase in turn SIGSTOP goes to WHO (`trainer` or `server`) just before the phase's request; whoever started this
sends SIGCONT. A line on stdout says what is stopped now, and one for each phase whether its completions are the same as
without a stop.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from swift_r1.models.loading import load_model
from swift_r1.rollout.base import ignore_output
from swift_r1.rollout.pool.session import Expected
from swift_r1.rollout.remote import ServerRollouts
from swift_r1.runtime.ranks import Ranks
from swift_r1.training.optimizer import OptimizerConfig
from swift_r1.wire import client as client_module
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest, SamplingParams, tokenizer_hash
from tests.live_servers import OneWeightABucket, pool_of

PHASES = ("begin", "bucket", "commit", "generation", "idle")
WAIT_S = 300
_CALLS = {"begin": "begin", "file": "bucket", "bucket": "bucket", "commit": "commit"}


class Pauses:
    """Stops `pid` once in the phase that is `armed`."""

    def __init__(self, pid: int) -> None:
        self._pid, self.armed = pid, ""

    def at(self, phase: str) -> None:
        if phase and phase == self.armed:
            self.armed = ""
            print(f"stopped in {phase}", flush=True)
            os.kill(self._pid, signal.SIGSTOP)


class Client(RolloutClient):
    pauses: Pauses | None = None

    def call(self, method: str, path: str, *args: Any, **more: Any) -> Any:
        if self.pauses is not None:
            self.pauses.at(_CALLS.get(path.rsplit("/", 1)[-1], ""))
        return super().call(method, path, *args, **more)


def requests(name: str) -> list[RolloutRequest]:
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    return [
        RolloutRequest(
            request_id=f"{os.getpid()}/{name}/{number}",
            prompt_token_ids=(1, 20 + number),
            seeds=(number,),
            sampling=sampling,
        )
        for number in range(6)
    ]


def main(model: str, who: str, ttl: float, silence: float, servers: Sequence[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    client_module._HEALTH_EVERY_S = min(client_module._HEALTH_EVERY_S, silence / 4)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = Expected(model, tokenizer_hash(tokenizer), len(tokenizer), None)
    backend = OneWeightABucket(
        load_model(model, "float32", False), OptimizerConfig(1e-3, 0.0, 0.9, 0.99, 1e-8, 1.0)
    )
    urls = [server.split("=")[0] for server in servers]
    pauses = Pauses(int(servers[0].split("=")[1]) if who == "server" else os.getpid())
    clients = [Client(url, silence_s=silence) for url in urls]
    pool = pool_of(clients, expected, WAIT_S, ttl_s=ttl)
    rollouts = ServerRollouts(pool, backend, Ranks(0, 1, torch.device("cpu"), None))

    def completions(name: str, phase: str = "") -> list[tuple[int, ...]]:
        told: list[int] = []

        def on_done(count: int) -> None:
            told.append(count)
            pauses.at(phase)

        outputs: list[RolloutOutput] | None = rollouts.generate(
            requests(name), on_done, ignore_output
        )
        assert outputs is not None and len(told) == len(outputs) == 6
        assert all(
            one.weight_version == rollouts.weight_version
            for output in outputs
            for one in output.completions
        )
        return [one.token_ids for output in outputs for one in output.completions]

    rollouts.publish_weights()
    undisturbed = completions("undisturbed")
    clients[0].pauses = pauses
    for phase in PHASES:
        end = time.monotonic() + WAIT_S
        # those that were given up for silence in the phase before
        while len(pool.health.ready) < len(clients):
            assert time.monotonic() < end
            time.sleep(0.05)
        pauses.armed = phase
        rollouts.publish_weights()
        pauses.at("idle")
        same = completions(phase, "generation") == undisturbed
        print(f"{phase} same={same} paused={not pauses.armed}", flush=True)
    # What was lost in the last phase may still be on its way back.
    rollouts.publish_weights()
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
