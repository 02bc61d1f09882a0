"""What a page in the browser of the server's own machine can do with a server that has no key: nothing."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.serving.test_malformed import EXPECTED, QuickEngine

LEASE = {"owner": "page", "ttl_seconds": 0.1}


@pytest.fixture
def http(serve_engine: Callable[..., str]) -> httpx.Client:
    return httpx.Client(base_url=serve_engine(QuickEngine(), EXPECTED), trust_env=False, timeout=30)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "127.0.0.2", "", "[::1"]
)
def test_a_name_that_points_here_gives_no_access(http: httpx.Client, host: str) -> None:
    for path in ("/info", "/v1/models"):
        answer = http.get(path, headers={"Host": host})
        assert answer.status_code == 421 and "--api_key" in answer.text
    assert http.post("/v1/weights/lease", json=LEASE, headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "localhost:1", "[::1]:8000"])
def test_it_answers_to_its_own_names(http: httpx.Client, host: str) -> None:
    assert http.get("/info", headers={"Host": host}).status_code == 200
    assert http.get("/info", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 200


def test_another_sites_page_may_not_ask(http: httpx.Client) -> None:
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert http.get("/info", headers={"Origin": origin}).status_code == 403
        assert (
            http.post("/v1/weights/lease", json=LEASE, headers={"Origin": origin}).status_code
            == 403
        )


def test_what_a_form_could_send_is_not_taken_for_json(http: httpx.Client) -> None:
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ):
        answer = http.post(
            "/v1/weights/lease", content=b'{"owner": "page"}', headers={"Content-Type": kind}
        )
        assert answer.status_code == 422


def test_with_a_key_any_name_is_the_servers(serve_engine: Callable[..., str]) -> None:
    url = serve_engine(QuickEngine(), EXPECTED, api_key="k")
    with httpx.Client(
        base_url=url, trust_env=False, timeout=30, headers={"Authorization": "Bearer k"}
    ) as http:
        assert (
            http.get(
                "/info", headers={"Host": "gpu7:8000", "Origin": "http://evil.example"}
            ).status_code
            == 200
        )
