"""The official `openai` client against real vLLM, while the weights change under it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swift_r1.wire.client import RolloutClient
from tests.live_servers import push_weights

MESSAGES = [{"role": "user", "content": "count from 7"}]


@pytest.fixture
def name(client: RolloutClient) -> str:
    return client.info().model


@pytest.fixture
def talk(server_url: str, client: RolloutClient) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server_url}/v1", api_key="none", timeout=120, max_retries=0
    ) as talk:
        yield talk


def test_the_model_is_listed(talk: openai.OpenAI, name: str) -> None:
    [model] = talk.models.list().data
    assert model.id == name and model.owned_by == "swift-r1"
    assert talk.models.retrieve(name).id == name


def test_chat_with_logprobs_that_are_the_models(
    talk: openai.OpenAI, name: str, client: RolloutClient, tiny_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    push_weights(client, client.info().weight_version + 1, [list(model.named_parameters())])
    answer = talk.chat.completions.create(
        model=name, messages=MESSAGES, max_tokens=12, n=2, seed=3, logprobs=True, top_logprobs=2
    )
    again = talk.chat.completions.create(model=name, messages=MESSAGES, max_tokens=12, n=2, seed=3)
    assert [one.message.content for one in answer.choices] == [
        one.message.content for one in again.choices
    ]
    assert [one.index for one in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    for choice in answer.choices:
        assert choice.finish_reason in ("length", "stop")
        tokens = [tokenizer.convert_tokens_to_ids(one.token) for one in choice.logprobs.content]
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            table = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = table.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
        said = torch.tensor([one.logprob for one in choice.logprobs.content])
        torch.testing.assert_close(said, own, atol=2e-3, rtol=0)
        best = torch.tensor(
            [[other.logprob for other in one.top_logprobs] for one in choice.logprobs.content]
        )
        torch.testing.assert_close(best, table.topk(2).values, atol=2e-3, rtol=0)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(
        len(one.logprobs.content) for one in answer.choices
    )
    assert answer.system_fingerprint == f"weights-{client.info().weight_version}"


def test_plain_completions_stop_and_tell_offsets(talk: openai.OpenAI, name: str) -> None:
    free = talk.completions.create(
        model=name, prompt=["ab", "cd"], max_tokens=20, seed=5, logprobs=1
    )
    assert [one.index for one in free.choices] == [0, 1] and free.usage.completion_tokens <= 40
    text, logprobs = free.choices[0].text, free.choices[0].logprobs
    starts = dict(zip(logprobs.text_offset, logprobs.tokens, strict=True))
    assert all(
        text[start:].startswith(token)
        for start, token in starts.items()
        if not token.startswith("<|")
    )
    word = text[6:8]
    stopped = talk.completions.create(model=name, prompt="ab", max_tokens=20, seed=5, stop=[word])
    assert (
        stopped.choices[0].text == text[: text.index(word)]
        and stopped.choices[0].finish_reason == "stop"
    )
    by_ids = talk.completions.create(model=name, prompt=[40, 41], max_tokens=3, temperature=0)
    streamed = talk.completions.create(
        model=name, prompt=[40, 41], max_tokens=3, temperature=0, stream=True
    )
    assert (
        "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
        == by_ids.choices[0].text
    )


def test_talking_while_the_weights_change(
    talk: openai.OpenAI, name: str, client: RolloutClient, tiny_model: Path
) -> None:
    """Every answer is whole and of one version; streams that run hold the update up, none is cut."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    first = client.info().weight_version
    stop, faults, versions = threading.Event(), [], []

    def chat() -> None:
        try:
            while not stop.is_set():
                chunks = list(
                    talk.chat.completions.create(
                        model=name, messages=MESSAGES, max_tokens=16, stream=True
                    )
                )
                assert chunks[-1].choices[0].finish_reason in ("stop", "length")
                assert len({chunk.system_fingerprint for chunk in chunks}) == 1
                versions.append(int(chunks[0].system_fingerprint.removeprefix("weights-")))
        except Exception as error:  # noqa: BLE001 - whatever it was, the test shows it
            faults.append(error)

    threads = [threading.Thread(target=chat) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(first + 1, first + 6):
        push_weights(client, version, [list(model.named_parameters())])
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not faults
    assert versions and set(versions) <= set(range(first, first + 6))


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"model": "gpt-99"}, openai.NotFoundError, "there is no model 'gpt-99' here"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"top_logprobs": 3}, openai.BadRequestError, "needs logprobs"),
        (
            {"extra_body": {"best_of": 3}},
            openai.BadRequestError,
            "best_of: Extra inputs are not permitted",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 2000}]},
            openai.BadRequestError,
            "maximum context length is 1024",
        ),
    ],
)
def test_faults_are_the_clients_own_exceptions(
    talk: openai.OpenAI, name: str, change: dict, kind: type[openai.APIStatusError], said: str
) -> None:
    with pytest.raises(kind) as error:
        talk.chat.completions.create(**{"model": name, "messages": MESSAGES} | change)
    assert said in error.value.body["message"] and error.value.body["type"]
