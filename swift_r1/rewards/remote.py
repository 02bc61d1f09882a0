"""The reward `api`: another process, reached over HTTP, gives the rewards (`--reward_api URL`)."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from swift_r1.rewards.orm import AsyncORM, Rewards, orms

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
        self._client = JsonClient(own_key(TOKEN_VARIABLE), float(args.reward_timeout))

    async def __call__(self, completions: list[str], **columns: Any) -> Rewards:
        state = columns.pop("trainer_state", None)
        about = {} if state is None else vars(state)
        body = {"completions": completions, "columns": columns, "trainer_state": about}
        # A lone surrogate is no UTF-8: it goes as an escape.
        answer = await self._client.ask(self.url, json.dumps(body, default=str).encode())
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise RemoteRewardError(
                f"{self.url} did not answer with an object that has a list of rewards"
            )
        return rewards


class JsonClient:
    """Asks HTTP servers that answer with JSON, over connections that it keeps: all calls share one event loop.

    Args:
        token: sent as a bearer token; no error has it in its text.
        timeout: seconds of an attempt.
        patience: seconds in which there may be more than three attempts.
    """

    def __init__(self, token: str | None, timeout: float, patience: float = 0.0) -> None:
        self._token = token
        self._timeout = timeout
        self._patience = patience
        self._client: httpx.AsyncClient | None = None

    async def ask(self, url: str, body: bytes | None = None) -> Any:
        """Returns the JSON that `url` answers to a JSON `body`, or without one to a GET.

        An attempt that finds no server, or gets 429 or 5xx, is repeated after a pause, or after the seconds of
        Retry-After where the timeout has as many. Raises RemoteRewardError.
        """
        import httpx  # only where it is used: everybody imports this module

        headers = {"Content-Type": "application/json"}
        if self._token:
            # the error of httpx would quote it
            if not (self._token.isascii() and self._token.isprintable()):
                raise RemoteRewardError(f"the key for {url} has characters that no header can have")
            headers["Authorization"] = f"Bearer {self._token}"

        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self._timeout, trust_env=False)
        method = "GET" if body is None else "POST"
        began = time.monotonic()
        attempts = 0
        while True:
            pause = min(FIRST_PAUSE * 2**attempts, _LONGEST_PAUSE)
            attempts += 1
            cause: Exception | None = None
            try:
                request = self._client.build_request(method, url, content=body, headers=headers)
                response = await asyncio.wait_for(self._client.send(request), self._timeout)
            except (httpx.RequestError, TimeoutError) as error:
                cause = error
                failure = RemoteRewardError(f"no answer from {url}: {type(error).__name__} {error}")
            else:
                if response.status_code == 200:
                    try:
                        return response.json()
                    except ValueError as error:
                        raise RemoteRewardError(
                            f"{url} answered with something that is not JSON"
                        ) from error
                text = response.text.replace(self._token, "***") if self._token else response.text
                failure = RemoteRewardError(f"{url} answered {response.status_code}: {text[:200]}")
                wished = _retry_after(response)
                if wished > self._timeout or (
                    response.status_code != 429 and response.status_code < 500
                ):
                    raise failure
                pause = max(pause, wished)
            if attempts >= ATTEMPTS and time.monotonic() + pause - began > self._patience:
                raise failure from cause
            await asyncio.sleep(pause)


def _retry_after(response: httpx.Response) -> float:
    """Returns the seconds of Retry-After; 0 where the header is missing or has a date."""
    seconds = response.headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else 0.0


orms["api"] = RemoteReward
