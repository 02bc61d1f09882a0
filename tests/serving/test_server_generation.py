"""Generation and scoring over real HTTP with real vLLM: log-probs, seeds, idempotency, bad input."""

from __future__ import annotations

import re
import threading
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swift_r1.errors import RunFailed
from swift_r1.wire.client import RolloutClient
from swift_r1.wire.protocol import RolloutRequest, SamplingParams, tokenizer_hash
from tests.cuts import CUTS, check_first_tokens
from tests.live_servers import push_weights

PROMPT = (1, 20, 31, 42, 7)


def request(n: int = 1, seeds: tuple[int, ...] | None = None, **sampling: Any) -> RolloutRequest:
    params = SamplingParams(**({"max_tokens": 24} | sampling))
    return RolloutRequest(
        request_id=uuid.uuid4().hex, prompt_token_ids=PROMPT, n=n, seeds=seeds, sampling=params
    )


@pytest.fixture
def policy(client: RolloutClient, tiny_model: Path) -> torch.nn.Module:
    """The folder's model, whose weights the shared server is brought to."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    push_weights(client, client.info().weight_version + 1, [list(model.named_parameters())])
    return model


@torch.no_grad()
def trainer_logprobs(
    model: torch.nn.Module, tokens: tuple[int, ...], temperature: float
) -> torch.Tensor:
    ids = torch.tensor([tokens])
    logits = model(ids).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_after_temperature(
    client: RolloutClient, policy: torch.nn.Module, temperature: float
) -> None:
    [output] = client.generate(
        [request(n=4, seeds=(1, 2, 3, 4), temperature=temperature, ignore_eos=True)]
    )
    for completion in output.completions:
        sequence = PROMPT + completion.token_ids
        expected = trainer_logprobs(policy, sequence, temperature)
        sampled = torch.tensor(completion.logprobs)
        torch.testing.assert_close(sampled, expected[len(PROMPT) - 1 :], atol=2e-3, rtol=0)
        answer = client.score([sequence], temperature, top=3)
        torch.testing.assert_close(torch.tensor(answer.logprobs[0]), expected, atol=2e-3, rtol=0)
        with torch.no_grad():
            known = (
                policy(torch.tensor([sequence])).logits[0, :-1].float() / temperature
            ).log_softmax(-1)
        tops, ids = torch.tensor(answer.top_logprobs[0]), torch.tensor(answer.top_ids[0])
        torch.testing.assert_close(tops, known.topk(3).values, atol=2e-3, rtol=0)
        torch.testing.assert_close(tops, known.gather(-1, ids), atol=2e-3, rtol=0)
    # Scoring at another temperature must not leave it behind.
    plain = torch.tensor(client.score([PROMPT]).logprobs[0])
    torch.testing.assert_close(plain, trainer_logprobs(policy, PROMPT, 1.0), atol=2e-3, rtol=0)


def test_logprobs_are_those_of_what_was_sampled_from(
    client: RolloutClient, policy: torch.nn.Module
) -> None:
    """With a penalty and min-p, as in the trainer's own engine."""
    ways = {"temperature": 1.3, "min_p": 0.2, "repetition_penalty": 1.7}
    [output] = client.generate([request(n=8, seeds=tuple(range(8)), ignore_eos=True, **ways)])
    for completion in output.completions:
        sequence = PROMPT + completion.token_ids
        with torch.no_grad():
            logits = policy(torch.tensor([sequence])).logits[0].float()
        for place, sampled in enumerate(completion.logprobs, start=len(PROMPT)):
            seen, row = list(set(sequence[:place])), logits[place - 1]
            row[seen] = torch.where(row[seen] > 0, row[seen] / 1.7, row[seen] * 1.7)
            probs = (row / 1.3).softmax(-1)
            probs[probs < 0.2 * probs.max()] = 0.0
            assert sampled == pytest.approx(
                (probs[sequence[place]] / probs.sum()).log().item(), abs=2e-3
            )


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_cuts_leave_the_same_distribution_as_the_trainers_own_engine(
    client: RolloutClient, policy: torch.nn.Module, cuts: dict[str, Any]
) -> None:
    asked = request(n=1000, seeds=tuple(range(1000)), max_tokens=1, **cuts)
    [output] = client.generate([asked])
    with torch.no_grad():
        logits = policy(torch.tensor([PROMPT])).logits[0, -1].float().tolist()
    check_first_tokens(output.completions, logits, asked.sampling, abs_error=2e-3)


def test_a_pattern_is_followed(
    client: RolloutClient, policy: torch.nn.Module, tiny_model: Path
) -> None:
    pattern = "<answer>[0-9]{2,4}</answer>"
    [output] = client.generate(
        [request(n=8, seeds=tuple(range(8)), structured_outputs_regex=pattern)]
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for completion in output.completions:
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert re.fullmatch(pattern, text) and completion.finish_reason == "stop"
        free = trainer_logprobs(policy, PROMPT + completion.token_ids, 1.0)[len(PROMPT) - 1 :]
        # of the part that may follow
        assert (torch.tensor(completion.logprobs) > free - 2e-3).all()


def test_a_seed_pins_its_completion(client: RolloutClient) -> None:
    [first] = client.generate([request(n=3, seeds=(7, 8, 7))])
    [second] = client.generate([request(n=2, seeds=(8, 7))])
    assert (
        first.completions[0].token_ids
        == first.completions[2].token_ids
        == second.completions[1].token_ids
    )
    assert first.completions[1].token_ids == second.completions[0].token_ids
    assert first.completions[0].token_ids != first.completions[1].token_ids


def test_seeded_prompts_longer_than_one_engine_step_together(client: RolloutClient) -> None:
    """vLLM's CPU engine dies of a seeded prompt that is read in parts; 24 x 200 tokens do not fit one step."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)

    def asked(number: int) -> RolloutRequest:
        prompt = (number, *(3 + (number * 7 + place * 11) % 99 for place in range(199)))
        return RolloutRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            n=2,
            seeds=(number, number + 1),
            sampling=sampling,
        )

    outputs = client.generate([asked(number) for number in range(24)])
    [alone] = client.generate([asked(11)])
    assert [c.token_ids for c in alone.completions] == [
        c.token_ids for c in outputs[11].completions
    ]


def test_stop_tokens_and_strings_end_a_completion(client: RolloutClient, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    [free] = client.generate([request(seeds=(3,), ignore_eos=True)])
    tokens = free.completions[0].token_ids
    [stopped] = client.generate([request(seeds=(3,), ignore_eos=True, stop_token_ids=(tokens[5],))])
    end = tokens.index(tokens[5]) + 1
    assert stopped.completions[0].token_ids == tokens[:end]
    assert stopped.completions[0].finish_reason == "stop"
    word = tokenizer.decode(tokens[4:6])
    [by_word] = client.generate([request(seeds=(3,), ignore_eos=True, stop=(word,))])
    text = tokenizer.decode(by_word.completions[0].token_ids)
    assert text.endswith(word) and text.count(word) == 1
    assert len(by_word.completions[0].logprobs) == len(by_word.completions[0].token_ids)


def test_info_describes_the_model(client: RolloutClient, tiny_model: Path) -> None:
    info = client.info()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert (info.engine, info.vocab_size, info.max_model_len) == ("vllm", len(tokenizer), 1024)
    assert info.tokenizer_hash == tokenizer_hash(tokenizer)


def test_the_same_request_id_is_generated_once(client: RolloutClient) -> None:
    unseeded = request(n=2)
    [first], [again] = client.generate([unseeded]), client.generate([unseeded])
    assert first == again
    joined = request(n=1, max_tokens=200, ignore_eos=True)
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.generate([joined]))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 3 and answers[0] == answers[1] == answers[2]
    with pytest.raises(RunFailed, match="was used before for a different request"):
        client.generate([unseeded.model_copy(update={"n": 1})])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt_token_ids": [1, 103]}, "has token 103, the vocabulary ends at 102"),
        (
            {"sampling": {"max_tokens": 1020}},
            "is too long: 5 prompt + 1020 new tokens, max_model_len is 1024",
        ),
        ({"seeds": [1, 2]}, "has 2 seeds for n = 1 completions"),
        ({"best_of": 4}, "requests.0.best_of: Extra inputs are not permitted"),
        ({"sampling": {"max_tokens": 4, "temperature": -1}}, "greater than or equal to 0"),
        ({"sampling": {"max_tokens": 4, "stop": [""]}}, "has an empty stop string"),
    ],
)
def test_bad_input_is_answered_with_one_sentence(
    server_url: str, change: dict[str, Any], sentence: str
) -> None:
    good = {
        "request_id": uuid.uuid4().hex,
        "prompt_token_ids": list(PROMPT),
        "sampling": {"max_tokens": 4},
    }
    answer = httpx.post(
        f"{server_url}/v1/rollouts", json={"requests": [good | change]}, trust_env=False
    )
    assert answer.status_code == 422
    assert sentence in answer.json()["error"] and "\n" not in answer.json()["error"]


def test_what_is_no_json_or_no_route_is_said_plainly(server_url: str) -> None:
    with httpx.Client(base_url=server_url, trust_env=False) as http:
        garbled = http.post(
            "/v1/rollouts", content=b"{{", headers={"Content-Type": "application/json"}
        )
        assert garbled.status_code == 422
        assert garbled.json()["error"].startswith("the body is not JSON: Expecting property name")
        assert http.get("/v2").json() == {"error": "Not Found"}
        assert "can be scored" in http.post("/v1/score", json={"sequences": [[1]]}).json()["error"]
