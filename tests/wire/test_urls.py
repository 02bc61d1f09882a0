"""Addresses of this machine, which no proxy of the environment is meant for."""

from __future__ import annotations

import asyncio

import pytest

from swift_r1.plugins.environments.scripted import ScriptedModel
from swift_r1.wire.urls import is_loopback


def test_loopback_is_this_machine_alone() -> None:
    here = (
        "127.0.0.1:8000",
        "127.9.8.7",
        "[::1]:8000/v1",
        "localhost",
        "LOCALHOST.:1",
        "0.0.0.0:1",
    )
    away = ("10.0.0.1", "128.0.0.1", "localhost.example.com", "127.0.0.1.example.com", "[fe80::1]")
    assert [is_loopback(f"http://{one}") for one in (*here, *away)] == [True] * 6 + [False] * 5


def test_a_scripted_model_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def asked() -> str | None:
        with ScriptedModel(lambda _chance: "7", 0).client() as client:
            said = [{"role": "user", "content": "?"}]
            answer = await client.chat.completions.create(model="policy", messages=said)  # type: ignore[arg-type]
            return answer.choices[0].message.content

    assert asyncio.run(asked()) == "7"
