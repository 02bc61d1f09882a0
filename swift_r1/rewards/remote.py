"""The reward `api`: another process, reached over HTTP, gives the rewards (`--reward_api URL`)."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

from swift_r1.rewards.orm import AsyncORM, orms

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE = "SWIFT_REWARD_API_TOKEN"
ATTEMPTS = 3
FIRST_PAUSE = 0.5  # seconds before the second attempt; doubled before each further one


class RemoteRewardError(RuntimeError):
    """The server refused, or did not answer with a list of rewards."""


class RemoteReward(AsyncORM):
    """Posts `{"completions": [...], "columns": {...}, "trainer_state": {...}}` and takes `{"rewards": [...]}`.

    A reward is a number, or null for no opinion. Each attempt has `--reward_timeout` seconds; one that finds no server,
    or gets 429 or 5xx, is repeated after a pause. A token in the environment variable SWIFT_REWARD_API_TOKEN is sent as
    a bearer token. Proxies are not used. Raises ValueError: constructed without `--reward_api`.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args)
        if getattr(args, "reward_api", None) is None:
            raise ValueError("the reward api needs --reward_api URL")
        self.url: str = args.reward_api
        self.timeout = float(args.reward_timeout)
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, completions: list[str], **columns: Any) -> list[float | None]:
        state = columns.pop("trainer_state", None)
        told = {} if state is None else vars(state)
        body = {"completions": completions, "columns": columns, "trainer_state": told}
        # A lone surrogate is no UTF-8: it goes as an escape.
        answer = await self._post(json.dumps(body, default=str).encode())
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise RemoteRewardError(f"{self.url} did not answer with an object that has a list of rewards")
        return rewards

    async def _post(self, body: bytes) -> Any:
        import httpx  # only where it is used: everybody imports this module

        # Kept: all calls share one event loop, so the next one finds the connection open.
        client = self._client = self._client or httpx.AsyncClient(timeout=self.timeout, trust_env=False)
        return await posted(client, self.url, body, os.environ.get(TOKEN_VARIABLE), self.timeout)


async def posted(client: httpx.AsyncClient, url: str, body: bytes | None, token: str | None, timeout: float) -> Any:
    """The JSON that a server answers to a JSON `body`, or without one to a GET. An attempt has `timeout` seconds; one
    that finds no server, or gets 429 or 5xx, is repeated after a pause. Raises RemoteRewardError, whose text never has
    the `token`."""
    import httpx

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    for attempt in range(ATTEMPTS):
        last = attempt == ATTEMPTS - 1
        try:
            request = client.build_request("GET" if body is None else "POST", url, content=body, headers=headers)
            response = await asyncio.wait_for(client.send(request), timeout)
        except (httpx.TransportError, TimeoutError) as error:
            if last:
                raise RemoteRewardError(f"no answer from {url}: {type(error).__name__} {error}") from error
        else:
            if response.status_code == 200:
                try:
                    return response.json()
                except ValueError as error:
                    raise RemoteRewardError(f"{url} answered with something that is no JSON") from error
            if last or (response.status_code != 429 and response.status_code < 500):
                text = response.text.replace(token, "***") if token else response.text
                raise RemoteRewardError(f"{url} answered {response.status_code}: {text[:200]}")
        await asyncio.sleep(FIRST_PAUSE * 2**attempt)
    raise AssertionError("unreachable")


orms["api"] = RemoteReward
