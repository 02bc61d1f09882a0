"""Requests that come one by one while earlier ones are answered."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swift_r1.data.images import ImageFile
from swift_r1.rollout.base import NO_IMAGES, OnDone, OnOutput
from swift_r1.wire.client import no_image
from swift_r1.wire.protocol import RolloutOutput, RolloutRequest


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A request under the name that it is asked under now, and its own one."""

    asked: RolloutRequest
    name: str
    times: int = 0  # that it was asked again


class OpenCalls:
    """Takes requests until it is closed, and each one's answer; what was not answered by then is dropped. Thread-safe.

    Args:
        on_answer: called with each answer, in the thread that asks.
        look: called there again and again.
        requests: all that will come; then it is closed with the last answer.
        images: those that requests name.
    """

    def __init__(
        self,
        on_answer: Callable[[RolloutOutput], None],
        look: Callable[[], None] = lambda: None,
        requests: Sequence[RolloutRequest] | None = None,
        images: Mapping[str, ImageFile] = NO_IMAGES,
    ) -> None:
        self._on_answer = on_answer
        self._images = images
        self.look = look
        self._lock = threading.Lock()
        self._open: dict[str, _OpenCall] = {}  # by the name that it is asked under
        self._new: deque[RolloutRequest] = deque()
        self._wake: Callable[[], object] | None = None
        self._all_are_known = requests is not None
        self._closed = requests is not None and not requests
        for request in requests or ():
            self.put(request)

    def __len__(self) -> int:
        """Counts the requests without an answer."""
        return len(self._open)

    @property
    def closed(self) -> bool:
        return self._closed

    def read_image(self, name: str) -> bytes:
        """Returns the bytes of an image that a request names. Raises RunFailed."""
        image = self._images.get(name)
        return no_image(name) if image is None else image.read()

    def put(self, request: RolloutRequest) -> None:
        self._add(_OpenCall(request, request.request_id))

    def _add(self, call: _OpenCall) -> None:
        with self._lock:
            self._open[call.asked.request_id] = call
            self._new.append(call.asked)
            self._notify()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._notify()

    def begin(self, wake: Callable[[], object]) -> None:
        """Somebody begins to answer: all that is open is to be taken (again); `wake` is called when more has come."""
        with self._lock:
            self._new = deque(call.asked for call in self._open.values())
            self._wake = wake

    def end(self) -> None:
        """Nobody answers any more."""
        with self._lock:
            self._wake = None

    def take(self) -> list[RolloutRequest]:
        """Returns the requests that have come since."""
        with self._lock:
            taken = list(self._new)
            self._new.clear()
            return taken

    def answered(self, output: RolloutOutput) -> None:
        with self._lock:
            call = self._open.pop(output.request_id)
        self._on_answer(output.model_copy(update={"request_id": call.name}))
        if self._all_are_known and not self._open:
            self.close()

    def again(self, name: str) -> int:
        """Has a request asked again whose answer was no good, under another name: under the same one a server would
        give that answer again, from its cache. Returns how often this was so."""
        with self._lock:
            call = self._open.pop(name)
        times = call.times + 1
        again = call.asked.model_copy(update={"request_id": f"{call.name}~{times}"})
        self._add(_OpenCall(again, call.name, times))
        return times

    def wake(self) -> None:
        """Has whoever answers look again."""
        with self._lock:
            self._notify()

    def _notify(self) -> None:
        if self._wake is not None:
            self._wake()


def answers_of(
    requests: Sequence[RolloutRequest],
    answer: Callable[[OpenCalls], None],
    on_done: OnDone,
    on_output: OnOutput,
    images: Mapping[str, ImageFile] = NO_IMAGES,
) -> dict[str, RolloutOutput]:
    """Returns what `answer` says to the requests, by their ids; each output is handed on as it comes. `images` are those
    that the requests name."""
    answers: dict[str, RolloutOutput] = {}

    def answered(output: RolloutOutput) -> None:
        answers[output.request_id] = output
        on_done(len(output.completions))
        on_output(output)

    answer(OpenCalls(answered, requests=requests, images=images))
    return answers
