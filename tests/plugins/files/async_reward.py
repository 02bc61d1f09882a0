"""A coroutine: its calls run together. Each waits until all calls of the round are there, so one alone would hang."""

import asyncio

from swift.rewards import AsyncORM, orms

waiting = 0
together = None


class Meeting(AsyncORM):
    """1 for each completion, once two calls are under way at the same time."""

    async def __call__(self, completions, **kwargs):
        global waiting, together
        together = together or asyncio.Event()
        waiting += 1
        if waiting == 2:
            together.set()
        await together.wait()
        return [1.0] * len(completions)


orms["meeting"] = Meeting
