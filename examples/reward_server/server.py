"""A reward server for `--reward_funcs api --reward_api http://127.0.0.1:8100/rewards`: GSM8K answers, as an example.

    SWIFT_REWARD_API_TOKEN=secret python examples/reward_server/server.py --port 8100

The trainer needs the same variable. Without it the server takes every request; keep it on 127.0.0.1 then.
"""

from __future__ import annotations

import argparse
import os
import secrets
from typing import Any

import uvicorn
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

from swift_r1.rewards.graders import grade_gsm8k

app = FastAPI()


class Request(BaseModel):
    """Whole groups of completions; every column is as long as `completions`."""

    completions: list[str]
    columns: dict[str, list[Any]]
    trainer_state: dict[str, int] = {}


@app.post("/rewards")
def rewards(request: Request, authorization: str = Header("")) -> dict[str, list[float | None]]:
    """One number a completion, or null for no opinion."""
    token = os.environ.get("SWIFT_REWARD_API_TOKEN", "")
    if token and not secrets.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, "wrong token")
    if "solution" not in request.columns:
        raise HTTPException(422, "the data has no column solution")
    pairs = zip(request.completions, request.columns["solution"], strict=True)
    return {"rewards": [grade_gsm8k(completion, solution).score for completion, solution in pairs]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    arguments = parser.parse_args()
    uvicorn.run(app, host=arguments.host, port=arguments.port)
