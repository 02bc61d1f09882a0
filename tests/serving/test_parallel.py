"""Several devices in one server: copies of the model behind one address, and one copy on several workers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swift_r1.errors import UsageError
from swift_r1.flags.server import RolloutArguments
from swift_r1.rollout.remote import mean_difference, probe_sequences
from swift_r1.serving.engines.base import (
    EngineInfo,
    EnginePrompt,
    Generated,
    PromptTokenizer,
    Replicas,
)
from swift_r1.serving.engines.vllm_start import replica_environments
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutRequest, SamplingParams
from tests.live_servers import push_weights

VLLM_WAIT_S = 600


class Copy:
    """An engine that says its `number` once it is released."""

    scores_alone = False
    prompts = PromptTokenizer(None)  # asked for no text
    dead = False

    def __init__(self, number: int) -> None:
        self.info = EngineInfo("copy", "0", 100, "hash", 64, "float32", nccl_workers=2)
        self.number, self.loads, self.fails = number, 0, False
        self.release = asyncio.Event()

    async def generate(self, prompt: EnginePrompt, sampling: Any, seed: int | None) -> Generated:
        await self.release.wait()
        return Generated((self.number,), (0.0,), "stop")

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        return (-float(self.number),) * (len(sequence) - 1)

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        await asyncio.sleep(0)
        if self.fails:
            raise RuntimeError(f"copy {self.number} cannot")
        self.loads += 1

    def shutdown(self) -> None: ...


def test_completions_are_spread_and_weights_go_to_all() -> None:
    async def play() -> None:
        copies = [Copy(number) for number in range(3)]
        engine = Replicas(copies)
        assert engine.info.nccl_workers == 0 and not engine.dead
        tasks = [asyncio.create_task(engine.generate((1,), None, None)) for _ in range(6)]
        await asyncio.sleep(0)
        copies[1].release.set()
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result().token_ids for task in done} == {(1,)}
        # What it has finished makes it the least loaded.
        await asyncio.gather(*done)
        more = await engine.generate((1,), None, None)
        assert more.token_ids == (1,)
        for one in copies:
            one.release.set()
        written = [(await task).token_ids[0] for task in tasks]
        assert sorted(written) == [0, 0, 1, 1, 2, 2]
        await engine.load_weights([], 1)
        copies[0].fails = True
        with pytest.raises(RuntimeError, match="copy 0 cannot"):
            await engine.load_weights([], 1)
        # None is left in the middle of it.
        assert [one.loads for one in copies] == [1, 2, 2]
        copies[2].dead = True
        assert engine.dead

    asyncio.run(play())


def test_each_copy_has_its_part_of_the_cpu() -> None:
    name = "VLLM_CPU_OMP_THREADS_BIND"

    def parts(copies: int, each: int, binding: str) -> list[dict[str, str]]:
        config = RolloutArguments(
            model="m", vllm_data_parallel_size=copies, vllm_tensor_parallel_size=each
        )
        return replica_environments({name: binding}, config, has_gpu=False)

    assert parts(1, 2, "0|1") == [{}]
    assert parts(2, 1, "0|1") == [{name: "0"}, {name: "1"}]
    assert parts(2, 2, "0|1|2|3") == [{name: "0|1"}, {name: "2|3"}]
    assert parts(2, 1, "0-7") == [{}, {}]  # the user's own


def test_each_copy_has_its_gpus() -> None:
    config = RolloutArguments(model="m", vllm_data_parallel_size=2, vllm_tensor_parallel_size=2)
    name = "CUDA_VISIBLE_DEVICES"
    assert replica_environments({name: "4,5,6,7"}, config, has_gpu=True) == [
        {name: "4,5"},
        {name: "6,7"},
    ]
    with pytest.raises(UsageError, match="2 copies of 2 GPUs each need 4 GPUs, and 3 are here"):
        replica_environments({name: "0,1,2"}, config, has_gpu=True)


def test_the_probe_asks_every_copy(serve_engine: Any) -> None:
    copies = [Copy(1), Copy(2)]
    with RolloutClient(serve_engine(Replicas(copies), {"w": (2,)})) as client:
        answer = client.score([(1, 2, 3)])
        assert answer.logprobs == ((-1.0, -1.0),) and answer.copies == (((-2.0, -2.0),),)
        assert client.score([(1, 2, 3)], every_copy=False).copies == ()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["vllm_tensor_parallel_size", "vllm_data_parallel_size"])
@pytest.mark.parametrize("tied", [True, False])
def test_vllm_on_two_workers_takes_new_weights(
    launch_server: Any, tiny_model: Path, tiny_model_untied: Path, how: str, tied: bool
) -> None:
    folder = tiny_model if tied else tiny_model_untied
    server = launch_server(folder, torch_dtype="float32", **{how: 2})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sequences = probe_sequences(model.config)
    ids = torch.tensor(sequences)
    generator = torch.Generator().manual_seed(1)
    with RolloutClient(server.url) as client, torch.no_grad():
        for version in (1, 2):
            for weight in model.parameters():
                weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
            own = (
                model(ids)
                .logits[:, :-1]
                .log_softmax(-1)
                .gather(-1, ids[:, 1:, None])
                .squeeze(-1)
                .tolist()
            )
            before = client.score(sequences)
            assert mean_difference(before.logprobs, own) > 0.1
            push_weights(
                client, version, [[(name, weight)] for name, weight in model.named_parameters()]
            )
            answer = client.score(sequences)
            assert len(answer.copies) == (how == "vllm_data_parallel_size")
            for rows in (answer.logprobs, *answer.copies):
                assert mean_difference(rows, own) < 1e-3
        requests = [
            RolloutRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=(1, 20, 31),
                n=2,
                seeds=(5, 5),
                sampling=SamplingParams(max_tokens=16, ignore_eos=True),
            )
            for _ in range(2)
        ]
        written = {
            one.token_ids for output in client.generate(requests) for one in output.completions
        }
        assert len(written) == 1  # whichever copy writes it


@pytest.mark.long
def test_engine_arguments_that_vllm_does_not_take(tiny_model: Path) -> None:
    argument = '{"max_num_batched_tokens": "many"}'
    line = f"vLLM does not take --vllm_engine_kwargs {argument}: "
    words = [
        "rollout",
        "--model",
        str(tiny_model),
        "--port",
        "18432",
        "--vllm_engine_kwargs",
        argument,
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "swift_r1", *words],
        capture_output=True,
        text=True,
        timeout=VLLM_WAIT_S,
        check=False,
    )
    assert ended.returncode == 2 and ended.stderr.splitlines()[-1].startswith(line)
    assert "Traceback" not in ended.stderr
