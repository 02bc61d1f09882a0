"""Keys where they would be written to files: refused, and not shown."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from swift_r1.cli.main import main
from swift_r1.errors import UsageError
from swift_r1.flags.evaluation import EvalArguments
from swift_r1.flags.parser import parse_arguments
from swift_r1.flags.rlhf import RlhfArguments
from swift_r1.flags.server import RolloutArguments
from swift_r1.fleet.run_file import read_run_file
from swift_r1.rewards.judge_config import read_judge
from swift_r1.runtime.visible import log_visibly
from swift_r1.wire.server_file import servers_of
from swift_r1.wire.urls import is_secret_name, why_no_url

RLHF = (
    "--rlhf_type",
    "grpo",
    "--model",
    "m",
    "--dataset",
    "d",
    "--reward_funcs",
    "format",
    "--use_vllm",
    "true",
)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (RlhfArguments, (*RLHF, "--vllm_server_base_url", "http://me:pl4nted@h:8000")),
        (RlhfArguments, (*RLHF, "--vllm_server_base_url", "http://pl4nted@h h")),
        (RlhfArguments, (*RLHF, "--vllm_server_base_url", "https://h:8000/?api_key=pl4nted")),
        (
            RlhfArguments,
            (*RLHF, "--reward_funcs", "remote", "--reward_api", "https://me:pl4nted@h/score"),
        ),
        (RlhfArguments, (*RLHF, "--teacher_model_server", "https://me:pl4nted@h")),
        (
            RlhfArguments,
            (*RLHF, "--teacher_model_server", '{"url": "https://me:pl4nted@h", "tags": ["a"]}'),
        ),
        (RlhfArguments, (*RLHF, "--env", "openenv:http://me:pl4nted@h:8001")),
        (
            RlhfArguments,
            (*RLHF, "--env", "verifiers:x", "--env_args", '{"judge": {"api_key": "pl4nted"}}'),
        ),
        (
            RlhfArguments,
            (
                *RLHF,
                "--env",
                "verifiers:x",
                "--env_args",
                '{"judges": [{"headers": {"Authorization": "pl4nted"}}]}',
            ),
        ),
        (RolloutArguments, ("--model", "m", "--vllm_engine_kwargs", '{"hf_token": "pl4nted"}')),
        (EvalArguments, ("--model", "https://me:pl4nted@h/v1", "--benchmarks", "gsm8k")),
    ],
)
def test_a_key_in_a_flag_that_is_written_down_is_refused(cls: type, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as refused:
        parse_arguments(cls, words, {})
    assert "written to files" in str(refused.value)
    assert "pl4nted" not in str(refused.value)


def test_so_it_is_in_the_file_of_servers(tmp_path: Path) -> None:
    file = tmp_path / "servers.txt"
    file.write_text("http://me:pl4nted@h:8000\nhttp://h:8001\n")
    found = servers_of(str(file))
    assert found.urls == ("http://h:8001",)
    assert "has a user or a password in it" in found.faults[0] and "pl4nted" not in found.faults[0]


def test_what_only_looks_like_a_key_is_taken() -> None:
    taken = (
        "eos_token_id",
        "stop_token",
        "pad_token",
        "max_tokens",
        "tokenizer",
        "judge_api_key_var",
        "key",
        "monkey",
        "tokens",
    )
    assert not [name for name in taken if is_secret_name(name)]
    keys = (
        "api_key",
        "OPENAI_API_KEY",
        "hf_token",
        "token",
        "client_secret",
        "PGPASSWORD",
        "apikey",
        "x-api-key",
        "Authorization",
    )
    assert [name for name in keys if is_secret_name(name)] == list(keys)
    assert why_no_url("http://h:8000/a@b?n=1") is None


@pytest.mark.parametrize(
    "text", ["api_key: pl4nted: x", "url: http://me:pl4nted@h/v1", "extra: {api_key: pl4nted}"]
)
def test_so_it_is_in_the_file_of_a_judge(tmp_path: Path, text: str) -> None:
    file = tmp_path / "judge.yaml"
    file.write_text(text if text.startswith("url") else f"url: http://h/v1\n{text}\n")
    with pytest.raises(UsageError) as refused:
        read_judge(str(file))
    assert "pl4nted" not in str(refused.value)


@pytest.mark.parametrize(
    "environ",
    ["HTTPS_PROXY: http://me:pl4nted@h:3128", "PGPASSWORD: pl4nted", "OPENAI_API_KEY: pl4nted: x"],
)
def test_so_it_is_in_the_file_of_a_launch(tmp_path: Path, environ: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"rlhf: {{model: m}}\nenviron:\n  {environ}\n")
    with pytest.raises(UsageError) as refused:
        read_run_file(file)
    assert "pl4nted" not in str(refused.value)
    assert ("a key has no place in a file" if environ[-1] != "x" else "is not valid YAML") in str(
        refused.value
    )


@pytest.mark.parametrize(
    "words",
    [
        "rollout --model m --api_key a pl4nted",
        "rollout --model m --api-ky pl4nted",
        "rollout --model https://me:pl4nted@h/x",
        "rlhf --model m --rlhf_type grpo --reward_funcs format --dataset https://me:pl4nted@h/rows.jsonl",
        "eval --model m --benchmarks gsm8k=https://me:pl4nted@h/x",
    ],
)
def test_no_message_quotes_one(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capfd.readouterr()
    assert said.err and "pl4nted" not in said.err + said.out


def test_no_log_line_does(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log_visibly(logging.WARNING, "%(message)s")
    logging.warning("ProxyError: http://me:pl4nted@proxy:3128/ and a@b, https://h/x@y")
    assert capfd.readouterr().err == "ProxyError: http://***@proxy:3128/ and a@b, https://h/x@y\n"
