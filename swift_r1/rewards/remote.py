"""The reward `api`: another process, reached over HTTP, gives the rewards (`--reward_api URL`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import TYPE_CHECKING, Any

from swift_r1.rewards.orm import AsyncORM, orms

if TYPE_CHECKING:
    import httpx

TOKEN_VARIABLE = "SWIFT_REWARD_API_TOKEN"
ATTEMPTS = 3
FIRST_PAUSE = 0.5  # seconds before the second attempt; doubled before each further one
_LONGEST_PAUSE = 10.0


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
        from swift_r1.workers.confine import own_key

        self.url: str = args.reward_api
        self.token = own_key(TOKEN_VARIABLE)
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
        return await posted(client, self.url, body, self.token, self.timeout)


async def posted(
    client: httpx.AsyncClient, url: str, body: bytes | None, token: str | None, timeout: float, patience: float = 0.0
) -> Any:
    """Returns the JSON that a server answers to a JSON `body`, or without one to a GET.

    An attempt has `timeout` seconds; one that finds no server, or gets 429 or 5xx, is repeated after a pause, or after
    the seconds of Retry-After where `timeout` has as many: three attempts, and more in the first `patience` seconds.
    Raises RemoteRewardError, whose text never has the `token`.
    """
    import httpx

    if token and not (token.isascii() and token.isprintable()):  # the error of httpx would quote it
        raise RemoteRewardError(f"the key for {url} has characters that no header can have")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    began = time.monotonic()
    for attempt in itertools.count(1):
        pause = min(FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE)
        cause: Exception | None = None
        try:
            request = client.build_request("GET" if body is None else "POST", url, content=body, headers=headers)
            response = await asyncio.wait_for(client.send(request), timeout)
        except (httpx.RequestError, TimeoutError) as error:
            cause = error
            failure = RemoteRewardError(f"no answer from {url}: {type(error).__name__} {error}")
        else:
            if response.status_code == 200:
                try:
                    return response.json()
                except ValueError as error:
                    raise RemoteRewardError(f"{url} answered with something that is not JSON") from error
            text = response.text.replace(token, "***") if token else response.text
            failure = RemoteRewardError(f"{url} answered {response.status_code}: {text[:200]}")
            wished = _retry_after(response)
            if wished > timeout or (response.status_code != 429 and response.status_code < 500):
                raise failure
            pause = max(pause, wished)
        if attempt >= ATTEMPTS and time.monotonic() + pause - began > patience:
            raise failure from cause
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")


def _retry_after(response: httpx.Response) -> float:
    """Seconds; 0 where the header is missing or has a date."""
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isdecimal() else 0.0


orms["api"] = RemoteReward
