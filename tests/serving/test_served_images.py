"""Images on their way: sent once by their hash, kept while they are used, refused in a sentence."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from swift_r1.data.images import ImageFile, decoded
from swift_r1.data.vision import VisionProcessor
from swift_r1.errors import RunFailed, UsageError
from swift_r1.launch.servers import wait_for_servers
from swift_r1.models.expected import expected_weights
from swift_r1.rollout.calls import OpenCalls
from swift_r1.rollout.pool.session import Expected
from swift_r1.serving.images import ImageStore
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import (
    ImagesMissing,
    RolloutOutput,
    RolloutRequest,
    SamplingParams,
    ServerRefused,
    tokenizer_hash,
)
from tests.live_servers import pool_of
from tests.tiny_server import TinyEngine
from tests.vision import picture, write_tiny

SMALL, WIDE, TALL = picture(28, 28, 1), picture(40, 28, 2), picture(28, 60, 3)
SETS = {"one": [SMALL], "two": [WIDE, TALL], "none": []}


def named(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("idefics3", tmp_path_factory.mktemp("sighted"))


@pytest.fixture(scope="module")
def tokenizer(sighted: Path) -> Any:
    return AutoTokenizer.from_pretrained(sighted)


@pytest.fixture(scope="module")
def processor(sighted: Path, tokenizer: Any) -> VisionProcessor:
    return VisionProcessor.load(str(sighted), tokenizer)


@pytest.fixture(scope="module")
def seeing(sighted: Path) -> TinyEngine:
    return TinyEngine(str(sighted), max_images=2)


@pytest.fixture
def serve(
    serve_engine: Callable[..., str], sighted: Path, seeing: TinyEngine
) -> Callable[..., str]:
    def one(engine: Any = None, max_images: int = 2) -> str:
        limits = {"image": max_images}
        if engine is None:
            engine = seeing
            if max_images != 2:
                engine = TinyEngine(str(sighted), max_images=max_images)
        weights = expected_weights(str(sighted), towers=max_images > 0)
        return serve_engine(engine, weights, vllm_limit_mm_per_prompt=limits)

    return one


@pytest.fixture
def asked(processor: VisionProcessor, tokenizer: Any) -> Callable[..., RolloutRequest]:
    def request(images: list[bytes], name: str = "r", n: int = 2) -> RolloutRequest:
        parts = [{"type": "text", "text": "Look:"}, *[{"type": "image"} for _ in images]]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        plain = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        return RolloutRequest(
            request_id=name,
            prompt_token_ids=processor.expand(text, images) if images else plain,
            n=n,
            seeds=tuple(range(n)),
            sampling=SamplingParams(max_tokens=6, ignore_eos=True),
            images=tuple(map(named, images)),
            unexpanded_token_ids=plain if images else (),
        )

    return request


class Shelf:
    """Gives images, and counts how often each was taken."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def read(self, name: str) -> bytes:
        [found] = [one for one in (SMALL, WIDE, TALL) if named(one) == name]
        self.taken.append(found)
        return found


def test_completions_see_the_images_which_go_once_for_a_prompt(
    serve: Callable[..., str],
    asked: Callable[..., RolloutRequest],
    sighted: Path,
    processor: VisionProcessor,
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(sighted, dtype=torch.float32).eval()
    shelf = Shelf()
    with RolloutClient(serve()) as client:
        assert client.info().max_images == 2
        requests = [asked(images, name) for name, images in SETS.items()]
        outputs = client.generate(requests, read_image=shelf.read)
        assert sorted(shelf.taken) == sorted([SMALL, WIDE, TALL])
        # Repeated, or for other completions: they are there.
        again = client.generate([asked(SETS["two"], "again"), requests[0]], read_image=shelf.read)
    assert len(shelf.taken) == 3 and again[1] == outputs[0]
    assert [one.token_ids for one in again[0].completions] == [
        one.token_ids for one in outputs[1].completions
    ]
    for request, output, images in zip(requests, outputs, SETS.values(), strict=True):
        for one in output.completions:
            ids = torch.tensor([[*request.prompt_token_ids, *one.token_ids]])
            with torch.no_grad():
                seen = processor.pixels(images) if images else {}
                logits = model(input_ids=ids, **seen).logits[0, -len(one.token_ids) - 1 : -1]
            logits[:, model.config.image_token_id] = -1e4
            own = logits.log_softmax(-1).gather(-1, torch.tensor(one.token_ids)[:, None])
            torch.testing.assert_close(
                torch.tensor(one.logprobs), own.squeeze(-1), atol=1e-4, rtol=0
            )


def test_each_server_of_a_pool_asks_for_what_it_lacks(
    serve: Callable[..., str],
    asked: Callable[..., RolloutRequest],
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    """As does one that comes in the place of another."""
    files = {}
    for number, data in enumerate((SMALL, WIDE, TALL)):
        path = tmp_path / f"{number}.png"
        path.write_bytes(data)
        files[named(data)] = ImageFile(str(path), named(data), *decoded(data).size)
    outputs: list[RolloutOutput] = []
    requests = [asked(SETS["two"], f"r/{number}", n=1) for number in range(8)]
    urls = [serve(), serve()]
    clients = [RolloutClient(url) for url in urls]
    size = clients[0].info().vocab_size
    pool = pool_of(clients, Expected("none", tokenizer_hash(tokenizer), size, None), 60)
    try:
        pool.ask(OpenCalls(outputs.append, requests=requests, images=files), (0,))
    finally:
        pool.close()
    for url in urls:
        with RolloutClient(url) as client:  # which gives no image
            client.generate([asked(SETS["two"], "last")])
    assert len(outputs) == 8
    assert len({one.completions[0].token_ids for one in outputs}) == 1


def test_an_image_that_is_gone_ends_the_run(
    serve: Callable[..., str], asked: Callable[..., RolloutRequest]
) -> None:
    with RolloutClient(serve()) as client, pytest.raises(RunFailed, match="is not known here"):
        client.generate([asked([SMALL])])


def test_what_the_engine_expands_otherwise_is_refused(
    serve: Callable[..., str], asked: Callable[..., RolloutRequest]
) -> None:
    request = asked([SMALL])
    longer = request.model_copy(
        update={"prompt_token_ids": (*request.prompt_token_ids, 5), "request_id": "longer"}
    )
    with RolloutClient(serve()) as client:
        with pytest.raises(ServerRefused, match="the engine's processor makes") as raised:
            client.generate([longer], read_image=Shelf().read)
        assert raised.value.status == 422
        # As is a placeholder that no image stands behind.
        blind = request.model_copy(update={"images": (), "request_id": "blind"})
        with pytest.raises(ServerRefused, match="stands for an image, without one"):
            client.generate([blind])
        with pytest.raises(ServerRefused, match="stands for an image, without one"):
            client.score([request.prompt_token_ids])


def test_more_images_than_the_server_takes_name_its_flag(
    serve: Callable[..., str], asked: Callable[..., RolloutRequest], tiny_model: Path
) -> None:
    for most, said in ((1, "takes 1 in a prompt"), (0, "takes none in a prompt")):
        with (
            RolloutClient(serve(max_images=most)) as client,
            pytest.raises(ServerRefused, match=said) as raised,
        ):
            client.generate([asked(SETS["two"])], read_image=Shelf().read)
        assert "--vllm_limit_mm_per_prompt '{\"image\": 2}'" in str(raised.value)


def test_a_run_whose_rows_have_more_does_not_begin(serve: Callable[..., str]) -> None:
    args: Any = SimpleNamespace(
        rollout_base_urls=[serve()], vllm_server_file=None, vllm_server_timeout=60, api_key=None
    )
    with pytest.raises(UsageError, match=r"3 images, and .* takes 2 in a prompt") as said:
        wait_for_servers(args, None, images=3)
    assert "--vllm_limit_mm_per_prompt '{\"image\": 3}'" in str(said.value)


def test_files_that_are_no_images_are_refused(serve: Callable[..., str]) -> None:
    url = serve()

    def put(data: bytes, name: str | None = None) -> tuple[int, str]:
        answer = httpx.put(f"{url}/v1/images/{name or named(data)}", content=data)
        return answer.status_code, answer.json().get("error", "")

    assert put(SMALL) == (200, "")
    assert httpx.put(f"{url}/v1/images/{named(SMALL)}", content=SMALL).json() == {
        "width": 28,
        "height": 28,
    }
    assert put(SMALL, "0" * 64)[0] == 400 and "SHA-256" in put(SMALL, "0" * 64)[1]
    assert put(SMALL, "up")[0] == 422
    assert put(b"")[0] == 400
    assert put(SMALL[:200])[0] == 400
    animated = io.BytesIO()
    Image.new("RGB", (8, 8)).save(animated, "GIF")
    assert put(animated.getvalue())[0] == 400
    large = io.BytesIO()
    Image.new("1", (9500, 9500)).save(large, "PNG")
    status, why = put(large.getvalue())
    assert status == 400 and "9,500 x 9,500" in why
    grey = io.BytesIO()
    Image.new("L", (8, 8)).save(grey, "PNG")
    assert "RGB, upright" in put(grey.getvalue())[1]


def test_what_is_used_is_not_forgotten() -> None:
    store = ImageStore(max_bytes=len(SMALL) + len(WIDE))
    first, second = store.add(SMALL), store.add(WIDE)
    with store.using([first]):
        third = store.add(TALL)  # of the others, and of itself the newest
        assert [one.data for one in store.of([first, third])] == [SMALL, TALL]
        with pytest.raises(ImagesMissing) as raised, store.using([second, first, second]):
            pass
        assert raised.value.missing == (second,)
    store.add(WIDE)
    assert store.bytes <= len(SMALL) + len(WIDE) or len(store) == 1
    with pytest.raises(ImagesMissing):
        store.of([first])


def chat(url: str, images: list[str], **more: Any) -> httpx.Response:
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in images]
    content = [{"type": "text", "text": "Look:"}, *parts]
    body = {"model": "none", "messages": [{"role": "user", "content": content}], "max_tokens": 6}
    return httpx.post(f"{url}/v1/chat/completions", json=body | more, timeout=60)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_chats_with_data_urls_are_those_of_rollouts(
    serve: Callable[..., str], asked: Callable[..., RolloutRequest], tokenizer: Any
) -> None:
    url = serve()
    with RolloutClient(url) as client:
        request = asked(SETS["two"], n=1)
        sampling = request.sampling.model_copy(update={"ignore_eos": False})
        greedy = request.model_copy(
            update={"sampling": sampling.model_copy(update={"temperature": 0.0})}
        )
        [output] = client.generate([greedy], read_image=Shelf().read)
    answer = chat(url, [data_url(WIDE), data_url(TALL)], temperature=0.0).json()
    text = tokenizer.decode(output.completions[0].token_ids, skip_special_tokens=True)
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
    # One that is not plain is made so, as rows are.
    clear = io.BytesIO()
    Image.open(io.BytesIO(TALL)).convert("RGBA").save(clear, "PNG")
    same = chat(url, [data_url(WIDE), data_url(clear.getvalue())], temperature=0.0).json()
    assert same["choices"] == answer["choices"]
    swapped = chat(url, [data_url(TALL), data_url(WIDE)], temperature=0.0, logprobs=True).json()
    straight = chat(url, [data_url(WIDE), data_url(TALL)], temperature=0.0, logprobs=True).json()
    assert swapped["choices"][0]["logprobs"] != straight["choices"][0]["logprobs"]


def test_chats_refuse_images_in_a_sentence(serve: Callable[..., str]) -> None:
    url = serve()

    def refusal(images: list[str]) -> str:
        answer = chat(url, images)
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    assert "nothing is fetched" in refusal(["https://example.com/cat.png"])
    assert "not base64" in refusal(["data:image/png;base64,%%"])
    assert "cannot be decoded" in refusal([data_url(SMALL[:200])])
    assert "--vllm_limit_mm_per_prompt" in refusal([data_url(SMALL)] * 3)
    session = httpx.post(f"{url}/v1/sessions", json={"id": "s"}).json()
    answer = httpx.post(
        f"{session['base_url']}/chat/completions",
        headers={"Authorization": f"Bearer {session['api_key']}"},
        json={
            "model": "any",
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": data_url(SMALL)}}],
                }
            ],
        },
    )
    assert answer.status_code == 400 and "records no images" in answer.text
