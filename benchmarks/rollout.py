"""Tokens a second through `swift rollout` (HTTP) against vLLM's own offline `generate`, on the same prompts in one run.

    python benchmarks/rollout.py --model models/smollm2-135m                       # 8 prompts x 8, 128 new tokens
    python benchmarks/rollout.py --vllm_enforce_eager false                        # compiled, both sides
    python benchmarks/rollout.py --vllm_data_parallel_size 2 --offline plain       # without seeds and log-probs there

Both sides are started with the same engine arguments and environment (those of `swift rollout`; but on a CPU its engine
computes in its own process, and vLLM's in a worker's), then take turns round by round, each round with prompts that
neither has seen. `same`: offline does the same work, a seed and log-probs for each completion; `plain`: it does
neither. The HTTP side is timed in the client, from the first request to the last answer read. On a GPU the two need one
each (CUDA_VISIBLE_DEVICES is not divided here).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from swift_r1.launch.environment import has_gpu, server_environment, usable_cpus
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutRequest, SamplingParams

START_S = 600
END_S = 30


def prompts_of(args: argparse.Namespace, number: int, vocab_size: int) -> list[tuple[int, ...]]:
    generator = random.Random(f"{args.seed}/{number}")
    return [
        tuple(generator.randrange(vocab_size) for _ in range(args.prompt_tokens))
        for _ in range(args.prompts)
    ]


def lengths_of(args: argparse.Namespace, number: int) -> list[int]:
    """New tokens of each prompt's completions; they differ with --ragged, as those of a model that stops do."""
    generator = random.Random(f"{args.seed}/{number}/lengths")
    least = args.new_tokens // 4 if args.ragged else args.new_tokens
    return [generator.randint(least, args.new_tokens) for _ in range(args.prompts)]


def offline(args: argparse.Namespace) -> None:
    """The other process: answers each line on stdin, a round's number, with its seconds and tokens."""
    from vllm import LLM
    from vllm import SamplingParams as VllmSampling
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    from swift_r1.flags.server import RolloutArguments
    from swift_r1.serving.engines.vllm_start import engine_arguments, engine_environment

    config = RolloutArguments(
        model=args.model, torch_dtype=args.torch_dtype, vllm_enforce_eager=args.vllm_enforce_eager
    )
    gpu = not current_platform.is_cpu()
    arguments = engine_arguments(config, gpu)
    # as vLLM comes: on a CPU a worker in a process of its own
    arguments.pop("distributed_executor_backend", None)
    os.environ.update(engine_environment(os.environ, gpu, arguments["enforce_eager"]))
    llm = LLM(**arguments)
    vocab_size = llm.llm_engine.model_config.get_vocab_size()
    print(json.dumps({"vocab_size": vocab_size}), flush=True)
    for line in sys.stdin:
        number = int(line)
        same = args.offline == "same"
        params = [
            VllmSampling(
                n=args.generations,
                max_tokens=length,
                ignore_eos=True,
                seed=number * args.prompts + place if same else None,
                logprobs=0 if same else None,
                detokenize=False,
            )
            for place, length in enumerate(lengths_of(args, number))
        ]
        asked = [
            TokensPrompt(prompt_token_ids=list(one)) for one in prompts_of(args, number, vocab_size)
        ]
        started = time.perf_counter()
        outputs = llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


def over_http(
    client: RolloutClient, args: argparse.Namespace, number: int, vocab_size: int
) -> dict[str, float]:
    requests = [
        RolloutRequest(
            request_id=f"{os.getpid()}/{number}/{place}",
            prompt_token_ids=prompt,
            n=args.generations,
            seeds=tuple(
                (number * args.prompts + place) * args.generations + one
                for one in range(args.generations)
            ),
            sampling=SamplingParams(max_tokens=length, ignore_eos=True),
        )
        for place, (prompt, length) in enumerate(
            zip(prompts_of(args, number, vocab_size), lengths_of(args, number), strict=True)
        )
    ]
    started = time.perf_counter()
    outputs = client.generate(requests)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "tokens": sum(len(one.token_ids) for output in outputs for one in output.completions),
    }


@contextmanager
def started(
    words: list[str], environ: dict[str, str], talks: bool, log: str
) -> Iterator[subprocess.Popen[str]]:
    with open(log, "w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            env=environ,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else out,
            stderr=out,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with suppress(ProcessLookupError):
            # vLLM's workers outlive a process that ends by SIGTERM
            os.killpg(process.pid, signal.SIGKILL)


def answer(out: IO[str]) -> dict[str, Any]:
    """vLLM prints beside it."""
    while line := out.readline():
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit("the offline side ended: see its log")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--torch_dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt_tokens", type=int, default=79)
    parser.add_argument("--new_tokens", type=int, default=128)
    parser.add_argument(
        "--ragged",
        action="store_true",
        help="lengths from a quarter of --new_tokens up to all of it",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds of each side; one more warms up"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vllm_enforce_eager", type=lambda word: word == "true", default=None)
    parser.add_argument("--vllm_tensor_parallel_size", type=int, default=1, help="of the HTTP side")
    parser.add_argument("--vllm_data_parallel_size", type=int, default=1, help="of the HTTP side")
    parser.add_argument("--offline", choices=("same", "plain"), default="same")
    parser.add_argument("--side", choices=("offline",), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        offline(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends both sides
    added = server_environment(
        os.environ, offline=True, cpus=usable_cpus(), gpu=has_gpu(os.environ)
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--model", args.model, "--torch_dtype", args.torch_dtype, "--port", str(port)]
    flags += [f"--vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}"]
    flags += [f"--vllm_data_parallel_size={args.vllm_data_parallel_size}"]
    if args.vllm_enforce_eager is not None:
        flags += [f"--vllm_enforce_eager={str(args.vllm_enforce_eager).lower()}"]
    logs = tempfile.mkdtemp(prefix="benchmark-rollout-")
    print(f"logs: {logs}", file=sys.stderr)
    found: dict[str, list[dict[str, float]]] = {"HTTP": [], "offline": []}
    with (
        started(["-m", "swift_r1", "rollout", *flags], dict(os.environ), False, f"{logs}/http.log"),
        started(
            [__file__, "--side", "offline", *sys.argv[1:]],
            {**os.environ, **added},
            True,
            f"{logs}/offline.log",
        ) as other,
        RolloutClient(f"http://127.0.0.1:{port}") as client,
    ):
        vocab_size = int(answer(other.stdout)["vocab_size"])
        client.wait_until_ready(START_S, report=lambda line: print(line, file=sys.stderr))
        for number in range(args.repeats + 1):
            order = ("HTTP", "offline") if number % 2 else ("offline", "HTTP")
            for side in order:
                if side == "HTTP":
                    done = over_http(client, args, number, vocab_size)
                else:
                    other.stdin.write(f"{number}\n")
                    other.stdin.flush()
                    done = answer(other.stdout)
                print(
                    f"round {number} {side}: {done['seconds']:.2f} s, {done['tokens'] / done['seconds']:.0f} tokens/s"
                )
                if number:
                    found[side].append(done)
    rates = {
        side: [one["tokens"] / one["seconds"] for one in rounds] for side, rounds in found.items()
    }
    ratios = [http / own for http, own in zip(rates["HTTP"], rates["offline"], strict=True)]
    for side, values in rates.items():
        print(f"{side}: median {statistics.median(values):.0f} tokens/s, best {max(values):.0f}")
    shown = ", ".join(f"{one:.3f}" for one in ratios)
    print(
        f"HTTP / offline ({args.offline}): median {statistics.median(ratios):.3f}, by round {shown}"
    )


if __name__ == "__main__":
    main()
