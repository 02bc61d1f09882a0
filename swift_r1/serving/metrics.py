"""`GET /metrics`: what an operator watches, in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_UPDATE_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServerMetrics:
    """Metrics in a registry of their own, so that several servers in one process do not clash."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self.requests = Counter(
            "swift_http_requests", "Answers by route and status", ["route", "status"], registry=own
        )
        what = "Completions of /v1/rollouts by reason of their end"
        self.completions = Counter("swift_completions", what, ["reason"], registry=own)
        self.tokens = Counter("swift_completion_tokens", "Tokens in them", registry=own)
        what = "Weight updates that were loaded or failed"
        self.updates = Counter("swift_weight_updates", what, ["result"], registry=own)
        what = "Commit to served, waiting included"
        self.update_seconds = Histogram(
            "swift_weight_update_seconds", what, buckets=_UPDATE_SECONDS, registry=own
        )

    def count_update(self, result: str, seconds: float) -> None:
        """Counts a weight update that was `loaded`, with its time, or `failed`."""
        self.updates.labels(result).inc()
        if result == "loaded":
            self.update_seconds.observe(seconds)

    def gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(name, what, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class CountAnswers:
    """Counts answers by route; unknown paths share one, or a scanner would fill the memory with labels."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.requests.labels(route, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, count if scope["type"] == "http" else send)
