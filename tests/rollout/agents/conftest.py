"""Agents over a real engine, whose log says what it was asked and gave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from swift_r1.data.prompts import PromptEncoder
from swift_r1.models.loading import load_model
from swift_r1.rollout.agents.gateway import AgentGateway, AgentModel
from swift_r1.rollout.agents.parent import Order
from swift_r1.rollout.agents.processes import AgentProcesses
from swift_r1.rollout.agents.runner import AgentLimits, AgentRunner
from swift_r1.rollout.base import OnDone, OnOutput
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.multi_turn import BatchedTurns, ServedTurns
from swift_r1.rollout.trajectory import Trajectory
from swift_r1.runtime.ranks import Ranks
from swift_r1.serving.engines.base import PromptTokenizer
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.serving.openai_messages import ToolCalls
from swift_r1.wire.protocol import (
    Completion,
    RolloutOutput,
    RolloutRequest,
    RoutesAsked,
    SamplingParams,
)
from tests.serving.session_engine import Entry

PLUGIN = Path(__file__).with_name("agents_plugin.py")
ALONE = Ranks(0, 1, torch.device("cpu"), None)


class LoggedRollouts:
    """The transformers engine: in batches (`generate`), or call by call as a pool of servers answers (`answer`)."""

    weight_version, max_model_length = 0, 1024

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine, self.log, self._one = engine, list[Entry](), threading.Lock()
        self.says: list[str] = []  # in the place of what the model would say, by number of the call
        self.tokenizer: Any = None

    def publish_weights(self) -> None: ...

    def resume(self, weight_version: int) -> None: ...

    def take_metrics(self) -> dict[str, float]:
        return {}

    def generate(
        self,
        requests: Sequence[RolloutRequest] | None,
        on_done: OnDone,
        on_output: OnOutput,
        images: Any,
    ) -> list[RolloutOutput] | None:
        assert requests is not None
        return [self.one(request) for request in requests]

    def one(self, request: RolloutRequest) -> RolloutOutput:
        """Alone, so that batches change no token; each by other weights, as they say."""
        with self._one:
            version = 3 + len(self.log)
            [output] = (
                self._said(request, version)
                if self.says
                else self.engine.generate([request], version)
            )
            [done] = output.completions
            seed = None if request.seeds is None else request.seeds[0]
            versions = ((0, version),)
            ids = (request.prompt_token_ids, request.sampling, seed, done.token_ids)
            self.log.append(Entry(*ids, done.logprobs, versions, done.finish_reason))
            return output

    def _said(self, request: RolloutRequest, version: int) -> list[RolloutOutput]:
        text = self.says[int(request.request_id.rpartition("/")[2]) % len(self.says)]
        ids = (
            *self.tokenizer(text, add_special_tokens=False)["input_ids"],
            self.tokenizer.eos_token_id,
        )
        assert len(ids) <= request.sampling.max_tokens <= 1024 - len(request.prompt_token_ids)
        done = Completion(
            token_ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop", weight_version=version
        )
        return [RolloutOutput(request_id=request.request_id, completions=(done,))]

    def answer(self, calls: OpenCalls | None) -> None:
        assert calls is not None
        woken = threading.Event()
        calls.begin(woken.set)
        with ThreadPoolExecutor(4) as threads:
            while not calls.closed:
                for request in calls.take():
                    threads.submit(lambda one=request: calls.answered(self.one(one)))
                calls.look()
                woken.wait(0.05)
                woken.clear()


@dataclass
class Stage:
    """One kind of agent over one engine."""

    rollouts: LoggedRollouts
    tokenizer: Any
    gateway: AgentGateway
    processes: AgentProcesses
    done: list[int] = field(default_factory=list)

    def play(
        self,
        rows: Sequence[Mapping[str, Any]],
        n: int = 2,
        served: bool = True,
        timeout: float = 60.0,
        at_once: int = 8,
        calls: int | None = None,
        total: bool = False,
        max_tokens: int = 8,
        seeded: bool = True,
        needs_reward: bool = False,
        routes: RoutesAsked | None = None,
        **sampling: Any,
    ) -> list[list[Trajectory]]:
        """The groups, in the order of the rows."""
        encoder = PromptEncoder(self.tokenizer)
        asked = []
        for number, row in enumerate(rows):
            own = {
                "messages": [{"role": "user", "content": f"say {number}"}],
                "prompt_id": f"p{number}",
                "dataset": "d",
            }
            prompt = encoder.encode(own | row)
            request = RolloutRequest(
                request_id=f"run/{number}",
                prompt_token_ids=prompt.token_ids,
                n=n,
                seeds=tuple(range(number * n, number * n + n)) if seeded else None,
                sampling=SamplingParams(max_tokens=max_tokens, **sampling),
                routes=routes,
            )
            asked.append((prompt, request))
        limits = AgentLimits(timeout, calls, total, needs_reward)
        runner = AgentRunner(self.gateway, self.processes, limits, at_once)
        found = list[Sequence[Trajectory]]()
        turns: Any = (
            ServedTurns(self.rollouts, {"": runner}, str)
            if served
            else BatchedTurns(self.rollouts, ALONE, {"": runner}, str)
        )
        self.rollouts.log.clear()
        self.done = []
        turns.generate(asked, self.done.append, found.append)
        assert sum(self.done) == n * len(rows)
        return sorted(
            map(list, found), key=lambda group: int(group[0].request_id.partition("/")[2])
        )


@pytest.fixture(scope="module")
def stages(tiny_model: Path) -> Iterator[Callable[..., Stage]]:
    """`stages(agent)` or `stages(command=[...])`."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = load_model(str(tiny_model), "float32", False)
    engine = TransformersEngine(model, tokenizer, (tokenizer.eos_token_id,), tokenizer.pad_token_id)
    known: dict[Any, Stage] = {}
    with ExitStack() as cleanup:
        cleanup.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # agents need the cores too

        def stage(
            agent: str | None = None,
            command: Sequence[str] = (),
            memory: float = 2.0,
            template: str | None = None,
        ) -> Stage:
            key = agent, tuple(command), template
            if key not in known:
                tokenizer = AutoTokenizer.from_pretrained(tiny_model)
                tokenizer.chat_template = template or tokenizer.chat_template
                prompts, ends = PromptTokenizer(tokenizer), (tokenizer.eos_token_id,)
                served = AgentModel(
                    prompts,
                    ToolCalls(None, tokenizer),
                    1024,
                    len(tokenizer),
                    ends,
                    forces_calls=False,
                )
                gateway = AgentGateway(served)
                cleanup.callback(gateway.close)
                order = Order([str(PLUGIN)], agent, list(command) or None, memory, [])
                processes = AgentProcesses(order)
                cleanup.callback(lambda: gateway.call(processes.close()).result(30))
                gateway.call(processes.start()).result(60)
                known[key] = Stage(LoggedRollouts(engine), tokenizer, gateway, processes)
            return known[key]

        yield stage
