"""Real vLLM with images: its log-probs are the model's own, before and after a push of another tower."""

from __future__ import annotations

import base64
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from swift_r1.data.vision import VisionProcessor
from swift_r1.models.expected import as_in_checkpoint, use_checkpoint_form
from swift_r1.models.multimodal import language_class, part_of_model
from swift_r1.models.shape import tied_names
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest, SamplingParams, ServerRefused
from tests import vision
from tests.live_servers import push_weights

WITHOUT_TORCHVISION = {"idefics3"}
NOT_ON_A_CPU = {"gemma3", "qwen3_5"}
SMALL, WIDE, TALL = (
    vision.picture(28, 28, 1),
    vision.picture(40, 28, 2),
    vision.picture(28, 60, 3),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt, and its images."""

    request: RolloutRequest
    images: Sequence[bytes]


class Sighted:
    """A tiny model in a folder, as transformers computes it."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        kind = language_class(config, towers=True)
        self.model: Any = kind.from_pretrained(folder, dtype=torch.float32).eval()
        use_checkpoint_form(self.model, str(folder))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.processor = VisionProcessor.load(str(folder), self.tokenizer)

    def seen(self, name: str, images: Sequence[bytes]) -> Seen:
        parts = [{"type": "text", "text": "Look:"}, *[{"type": "image"} for _ in images]]
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        plain = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        request = RolloutRequest(
            request_id=name,
            prompt_token_ids=self.processor.expand(text, images) if images else plain,
            n=2,
            seeds=(1, 2),
            sampling=SamplingParams(max_tokens=6, ignore_eos=True),
            images=tuple(hashlib.sha256(one).hexdigest() for one in images),
            unexpanded_token_ids=plain if images else (),
        )
        return Seen(request, images)

    @torch.no_grad()
    def logprobs(self, seen: Seen, token_ids: Sequence[int]) -> Tensor:
        """Those of a completion, by the model's own forward of prompt, completion and pixels."""
        ids = torch.tensor([[*seen.request.prompt_token_ids, *token_ids]])
        pixels: dict[str, Any] = self.processor.pixels(seen.images) if seen.images else {}
        types = (ids == self.processor.token_id).long()
        if "image_grid_thw" in pixels:
            pixels["mm_token_type_ids"] = types
        logits = self.model(input_ids=ids, **pixels).logits[0, -len(token_ids) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None]).squeeze(-1)

    def difference(self, asked: Sequence[Seen], outputs: Sequence[RolloutOutput]) -> float:
        """The largest one of an engine's log-probs from the model's own."""
        return max(
            float((self.logprobs(seen, one.token_ids) - torch.tensor(one.logprobs)).abs().max())
            for seen, output in zip(asked, outputs, strict=True)
            for one in output.completions
        )

    def weights(self, towers: bool) -> list[tuple[str, Tensor]]:
        """What a trainer sends: all, or what is no tower."""
        tied = tied_names(self.model)
        own = {
            name: weight
            for name, weight in (*self.model.named_parameters(), *_lasting(self.model))
            if name not in tied and (towers or part_of_model(name) == "llm")
        }
        return list(as_in_checkpoint(self.model, own).items())


def _lasting(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    state = model.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in model.named_buffers() if name in state)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted({*vision.SIGHTS} - NOT_ON_A_CPU))
def test_an_engine_sees_what_the_model_sees(
    launch_server: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    if family not in WITHOUT_TORCHVISION:
        pytest.importorskip("torchvision", reason="vLLM's class needs it (docs/images.md)")
    folder = vision.write_tiny(family, tmp_path / "model")
    own = Sighted(folder)
    server = launch_server(
        folder,
        torch_dtype="float32",
        max_model_len=256,
        vllm_limit_mm_per_prompt={"image": 2},
    )
    files = {hashlib.sha256(one).hexdigest(): one for one in (SMALL, WIDE, TALL)}

    def ask(client: RolloutClient, round_: str) -> tuple[list[Seen], list[RolloutOutput]]:
        sets = {"one": [SMALL], "several": [WIDE, TALL], "none": []}
        asked = [own.seen(f"{round_}/{name}", images) for name, images in sets.items()]
        return asked, client.generate([one.request for one in asked], read_image=files.__getitem__)

    try:
        with RolloutClient(server.url) as client:
            assert client.info().max_images == 2
            differences = [own.difference(*ask(client, "loaded"))]
            # A trainer of the language model alone sends no tower.
            with torch.no_grad():
                for name, weight in own.model.named_parameters():
                    if part_of_model(name) == "llm" and weight.dim() > 1:
                        weight.mul_(1.1)
            push_weights(client, 1, [own.weights(towers=False)])
            differences.append(own.difference(*ask(client, "language")))
            before = copy.deepcopy(own.model)
            with torch.no_grad():
                for name, weight in own.model.named_parameters():
                    if part_of_model(name) != "llm" and weight.dim() > 1:
                        weight.mul_(1.1)
            push_weights(client, 2, [own.weights(towers=True)])
            asked, outputs = ask(client, "tower")
            differences.append(own.difference(asked, outputs))
            print(family, *differences)
            assert max(differences) < 1e-4
            # A half of a tower is none.
            half = [item for item in own.weights(towers=True) if "bias" not in item[0]]
            with pytest.raises(ServerRefused, match="weights were not sent"):
                push_weights(client, 3, [half])
            answer = _chat(server.url, client.info().model, [WIDE, TALL])
            assert answer["usage"]["prompt_tokens"] == len(asked[1].request.prompt_token_ids)
            wrong = asked[0].request.model_copy(
                update={
                    "prompt_token_ids": (*asked[0].request.prompt_token_ids, 9),
                    "request_id": "w",
                }
            )
            with pytest.raises(ServerRefused, match="the engine's processor makes"):
                client.generate([wrong])
    finally:
        server.stop()
    own.model = before  # it would be seen that a tower had stayed
    assert own.difference(asked[:1], outputs[:1]) > 1e-3


def _chat(url: str, model: str, images: Sequence[bytes]) -> Any:
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in images]
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in urls]
    content = [{"type": "text", "text": "Look:"}, *parts]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
