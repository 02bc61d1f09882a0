"""What `GET /openapi.json` says beside types: how a route may refuse, by which key it is called, and examples.
docs/http.md is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

# Of the examples.
MODEL = "models/smollm2-135m"
TOKEN = "6c6f6e6720616e642072616e646f6d21"


class Refusal(BaseModel):
    """Why a request was not served, in one plain sentence."""

    error: str


class OpenAIFault(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIRefusal(BaseModel):
    """The same in OpenAI's shape."""

    error: OpenAIFault


WHY = {
    400: "the body is not text in UTF-8; on OpenAI's routes also: the request is not valid, or asks what the model "
    "cannot do",
    401: "the key is missing or wrong",
    403: "a limit of the session is reached",
    404: "there is no such model or session",
    409: "the call does not fit the state of the server; the sentence says why",
    410: "the session has expired",
    413: "the body is too large",
    422: "the request is not valid: the sentence names the first field that is wrong",
    431: "the headers are larger than 32 KiB",
    499: "the client hung up (it does not see this answer)",
    500: "a defect of the server, or a load that failed; the server's log says more",
    502: "the other server did not take the weights",
    503: "not now: loading, updating, asleep, full, or the engine is dead; `Retry-After` says when to ask again",
    507: "neither memory nor disk has room for the weights",
}
_EVERYWHERE = (401, 431, 500)  # without its body; `/health` needs no key

_SAMPLING = {"max_tokens": 16, "temperature": 1.0}
_CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is 33 + 37?"}], "max_tokens": 20}
_TEXT = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8}
_HEAD = {"created": 1763900000, "model": MODEL, "system_fingerprint": "weights-3", "weight_version": 3}
_USAGE = {"prompt_tokens": 36, "completion_tokens": 9, "total_tokens": 45}
_MODEL = {
    **{"id": MODEL, "object": "model", "created": 1763900000, "owned_by": "swift-r1", "max_model_len": 8192},
    "weight_version": 3,
}
BODIES: Mapping[str, Any] = {
    "/v1/rollouts": {
        "requests": [
            {"request_id": "an-example", "prompt_token_ids": [1, 2, 3], "n": 2, "seeds": [7, 8], "sampling": _SAMPLING}
        ]
    },
    "/v1/score": {"sequences": [[1, 2, 3, 4]], "temperature": 1.0},
    "/v1/weights/lease": {"owner": "me", "ttl_seconds": 60, "token": TOKEN},
    "/v1/weights/begin": {"version": 1000},
    "/v1/weights/abort": {"version": 1000},
    "/v1/sleep": {"level": 1},
    "/v1/sessions": {"id": "task-17", "seed": 1, "limits": {"calls": 20, "seconds": 600}},
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _TEXT,
    "/v1/sessions/{session}/v1/chat/completions": _CHAT,
    "/v1/sessions/{session}/v1/completions": _TEXT,
}
"""Examples of request bodies by path."""
_CHOICE = {"index": 0, "logprobs": None, "finish_reason": "stop"}
_SAID = {"message": {"role": "assistant", "content": "33 + 37 = 70.", "refusal": None}}
ANSWERS: Mapping[str, Any] = {
    "/health": {"status": "ok"},
    "/ready": {"status": "ready"},
    "/v1/models": {"object": "list", "data": [_MODEL]},
    "/v1/models/{name}": _MODEL,
    "/v1/chat/completions": {"id": "chatcmpl-1", "object": "chat.completion"}
    | _HEAD
    | {"choices": [_CHOICE | _SAID], "usage": _USAGE},
    "/v1/completions": {"id": "cmpl-1", "object": "text_completion"}
    | _HEAD
    | {"choices": [_CHOICE | {"text": " Paris."}], "usage": _USAGE},
}
"""Examples of answers that have no model of their own."""


def refusals(*statuses: int | tuple[int, str], openai: bool = False) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` of a route that refuses with these statuses, each with its own reason or that of `WHY`."""
    known = [one if isinstance(one, tuple) else (one, WHY[one]) for one in statuses]
    shape = OpenAIRefusal if openai else Refusal
    return {status: {"model": shape, "description": why} for status, why in known}


def describe(app: FastAPI, needs_key: bool) -> None:
    """Completes the document that the app makes of its routes."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
            _complete(document, needs_key)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any], needs_key: bool) -> None:
    shapes = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which is not what is answered
        shapes.pop(unused, None)
    shapes.setdefault("Refusal", Refusal.model_json_schema())
    document["components"]["securitySchemes"] = {
        "server": {"type": "http", "scheme": "bearer", "description": "the server's --api_key"},
        "session": {"type": "http", "scheme": "bearer", "description": "the key of the session, for its address alone"},
    }
    for path, operations in document["paths"].items():
        inside = path.startswith("/v1/sessions/{session}/v1")
        openai = inside or path.startswith(("/v1/models", "/v1/chat", "/v1/completions"))
        shape = {"$ref": f"#/components/schemas/{'OpenAIRefusal' if openai else 'Refusal'}"}
        for operation in operations.values():
            _name(operation)
            answers = operation["responses"]
            body = operation.get("requestBody")
            answers.pop("422", None)
            invalid = bool(body or operation.get("parameters")) and not openai
            for status in (*_EVERYWHERE, *([400, 413] if body else []), *([422] if invalid else [])):
                if status != 401 or path != "/health":
                    content = {"application/json": {"schema": shape}}
                    answers.setdefault(str(status), {"description": WHY[status], "content": content})
            operation["responses"] = dict(sorted(answers.items()))
            if body is not None and path in BODIES:
                body["content"]["application/json"]["example"] = BODIES[path]
            example = ANSWERS.get(path.removeprefix("/v1/sessions/{session}"))
            if example is not None:
                answers["200"]["content"]["application/json"]["example"] = example
            if needs_key and path != "/health":
                operation["security"] = [{"server": []}, *([{"session": []}] if inside else [])]


def _name(operation: dict[str, Any]) -> None:
    """The first sentence of a route's docstring is its summary."""
    summary, dot, more = " ".join(operation.pop("description", "").split()).partition(". ")
    operation["summary"] = summary.rstrip(".") or operation["summary"]
    if dot:
        operation["description"] = more
