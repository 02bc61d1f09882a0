"""`python tests/tiny_server.py MODEL PORT [CONFIG_JSON]`: the real server over a small engine that starts in seconds.

HTTP, weight updates and signals are those of `swift rollout`; the engine is transformers in this process instead of
vLLM, so that tests can afford to kill it often.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from swift_r1.data.vision import VisionProcessor
from swift_r1.flags.server import RolloutArguments
from swift_r1.models.expected import as_in_checkpoint, expected_weights, use_checkpoint_form
from swift_r1.models.multimodal import language_class, placeholders
from swift_r1.models.vision import Vision
from swift_r1.runtime.processes import leave, stop_at_once
from swift_r1.serving import server
from swift_r1.serving.engines.base import (
    EngineInfo,
    EnginePrompt,
    Generated,
    Piece,
    PromptTokenizer,
    Scored,
    TokenLogprob,
    check_expansion,
)
from swift_r1.serving.engines.transformers import TransformersEngine
from swift_r1.wire.protocol import HTTPError, RolloutRequest, SamplingParams, tokenizer_hash

MAX_MODEL_LEN = 1024


class TinyEngine:
    """One completion at a time, in a thread."""

    dead = False
    scores_alone = False

    def __init__(
        self,
        folder: str,
        can_sleep: bool = True,
        length: int = MAX_MODEL_LEN,
        max_images: int = 0,
        routes: bool = False,
    ) -> None:
        config = AutoConfig.from_pretrained(folder)
        kind = language_class(config, towers=max_images > 0)
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        use_checkpoint_form(self.model, folder)
        tokenizer = self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = PromptTokenizer(tokenizer)
        self.vision: Vision | None = None
        if max_images:
            self.vision = Vision(VisionProcessor.load(folder, tokenizer), self.model)
        ends = (tokenizer.eos_token_id,)
        self.engine = TransformersEngine(self.model, tokenizer, ends, 0, self.vision)
        self.info = EngineInfo(
            "tiny",
            "0",
            config.get_text_config().vocab_size,
            tokenizer_hash(tokenizer),
            length,
            "float32",
            can_sleep=can_sleep,
            max_images=max_images,
            placeholders=frozenset(placeholders(config)),
            routes=routes,
        )
        if routes:  # it chooses other experts than the trainer would
            import tests.e2e.noisy_routes_plugin  # noqa: F401
        self.one_at_a_time = threading.Lock()
        self.version, self.temperature = 0, 1.0
        self.asleep: set[str] = set()

    async def generate(
        self, prompt: EnginePrompt, sampling: SamplingParams, seed: int | None
    ) -> Generated:
        images = {image.name: image.data for image in prompt.images}
        request = RolloutRequest(
            request_id="-",
            prompt_token_ids=prompt.token_ids,
            seeds=(seed or 0,),
            sampling=sampling,
            images=tuple(image.name for image in prompt.images),
            routes=prompt.routes,
        )
        if images:
            check_expansion(prompt, await self.expanded(prompt))

        def work() -> Generated:
            with self.one_at_a_time:
                assert not self.asleep
                versions = ((0, self.version),)
                [output] = self.engine.generate([request], self.version, images=images)
                [completion] = output.completions
            return Generated(
                completion.token_ids,
                completion.logprobs,
                completion.finish_reason,
                versions,
                completion.routes,
            )

        return await asyncio.to_thread(work)

    async def stream(
        self,
        prompt: EnginePrompt,
        sampling: SamplingParams,
        seed: int | None,
        top_logprobs: int | None,
        special_tokens: bool = False,
    ) -> AsyncIterator[Piece]:
        one = await self.generate(prompt, sampling, seed)
        shown = one.token_ids[: -1 if one.finish_reason == "stop" else None]
        text = self.tokenizer.decode(shown, skip_special_tokens=not special_tokens)
        logprobs: tuple[TokenLogprob, ...] = ()
        if top_logprobs is not None:
            texts = [self.tokenizer.decode([token]) for token in one.token_ids]
            logprobs = tuple(map(TokenLogprob, texts, one.logprobs))
        yield Piece(one.token_ids, text, logprobs, one.finish_reason, one.versions)

    async def expanded(self, prompt: EnginePrompt) -> tuple[int, ...]:
        assert self.vision is not None
        text = self.tokenizer.decode(prompt.unexpanded_ids)
        try:
            return self.vision.processor.expand(text, [image.data for image in prompt.images])
        except ValueError as error:
            raise HTTPError(422, str(error)) from error

    async def score(self, sequence: Sequence[int]) -> tuple[float, ...]:
        return (await self.score_top(sequence, 1)).logprobs

    async def score_top(self, sequence: Sequence[int], top: int) -> Scored:
        def work() -> Scored:
            # the engine has the model attend its own way while it generates
            with self.one_at_a_time:
                assert not self.asleep
                ids = torch.tensor([list(sequence)])
                logps = (self.model(ids).logits[0, :-1] / self.temperature).log_softmax(-1)
            found = logps.topk(top)
            own = logps.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
            return Scored(
                tuple(own),
                *(tuple(map(tuple, one.tolist())) for one in (found.indices, found.values)),
            )

        return await asyncio.to_thread(work)

    async def set_score_temperature(self, temperature: float) -> None:
        self.temperature = temperature

    async def load_weights(self, files: Sequence[Path], version: int) -> None:
        assert "weights" not in self.asleep
        own = as_in_checkpoint(self.model, dict(self.model.named_parameters()))

        def load() -> None:
            with self.one_at_a_time:  # between two completions: each is of one version
                for file in files:
                    for name, tensor in load_file(file).items():
                        own[name].copy_(tensor)
                self.version = version

        await asyncio.to_thread(load)

    async def sleep(self, level: int) -> None:
        """As vLLM: at level 2 weights are memory that comes back with anything in it."""
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            for weight in self.model.parameters():
                weight.data = torch.full_like(weight, torch.nan)

    async def wake(self, weights_only: bool = False) -> None:
        self.asleep -= {"weights"} if weights_only else {"weights", "kv_cache"}

    def shutdown(self) -> None: ...


def main(folder: str, port: int, more: str = "{}") -> int:
    stop_at_once()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)

    def load(config: RolloutArguments) -> tuple[TinyEngine, Any]:
        can_sleep = config.vllm_engine_kwargs.get("enable_sleep_mode", True)
        length = config.max_model_len or MAX_MODEL_LEN
        routes = config.vllm_engine_kwargs.get("enable_return_routed_experts", False)
        engine = TinyEngine(config.model, can_sleep, length, config.max_images, routes)
        return engine, expected_weights(config.model, towers=config.max_images > 0)

    server.load_engine = load
    given = {"model": folder, "port": port, "update_timeout": 20} | json.loads(more)
    config = RolloutArguments(**given).with_secrets(os.environ)
    return asyncio.run(server.serve(config, server.bind(config.host, port)))


if __name__ == "__main__":
    leave(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
