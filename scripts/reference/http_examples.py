"""Requests and answers that docs/http.md shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL = "models/smollm2-135m"
TOKEN = "6c6f6e6720616e642072616e646f6d21"

_SAMPLING = {"max_tokens": 16, "temperature": 1.0}
_CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is 33 + 37?"}],
    "max_tokens": 20,
}
_TEXT = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 8}
_HEAD = {
    "created": 1763900000,
    "model": MODEL,
    "system_fingerprint": "weights-3",
    "weight_version": 3,
}
_USAGE = {"prompt_tokens": 36, "completion_tokens": 9, "total_tokens": 45}
_MODEL = {
    **{
        "id": MODEL,
        "object": "model",
        "created": 1763900000,
        "owned_by": "swift-r1",
        "max_model_len": 8192,
    },
    "weight_version": 3,
}
BODIES: Mapping[str, Any] = {
    "/v1/rollouts": {
        "requests": [
            {
                "request_id": "an-example",
                "prompt_token_ids": [1, 2, 3],
                "n": 2,
                "seeds": [7, 8],
                "sampling": _SAMPLING,
            }
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
    "/v1/sessions/{session}/v1/messages": _CHAT,
    "/v1/sessions/{session}/v1/messages/count_tokens": {
        name: _CHAT[name] for name in ("model", "messages")
    },
    "/v1/sessions/{session}/v1/responses": {
        "model": MODEL,
        "input": "What is 33 + 37?",
        "max_output_tokens": 20,
    },
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
