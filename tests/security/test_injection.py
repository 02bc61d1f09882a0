"""A run in which everything is an attack, read by every command: nothing of it acts on a terminal or in a page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
import yaml
from markdown_it import MarkdownIt
from prometheus_client.parser import text_string_to_metric_families

from swift_r1.cli.main import main
from swift_r1.flags.server import RolloutArguments
from swift_r1.lab.report.card import model_card
from swift_r1.runtime.visible import log_visibly
from swift_r1.serving.routes import create_app
from swift_r1.serving.service import Lifecycle
from tests.security.hostile import ALL, NAME, TAKEN, TEXTS, UNSEEN, hostile_run
from tests.serving.test_malformed import EXPECTED, QuickEngine

COMMANDS = (
    *(
        "why {}",
        "why {} --json",
    ),
    *(
        "report {}",
        "replay {}",
        "view {} --trace trace.json",
        "eval --compare {} {}",
        "report {}/nothing",
        "why {}.json",
    ),
)
TAGS = """
html head meta title style body main header footer section article nav div h1 h2 h3 p pre code blockquote table
thead tbody tr th td details summary figure figcaption svg g path line rect text polyline polygon circle defs
clippath use tspan symbol a img hr br em strong ul ol li dl dt dd span b i
"""
HARMLESS = frozenset(TAGS.split())

LINKS = ("href", "src", "xlink:href", "action", "srcset")


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    @property
    def harmful(self) -> list[object]:
        """What could act, or would be fetched."""
        acts = [
            one
            for one in self.found
            if one[0] not in HARMLESS or any(name.startswith("on") for name in one[1])
        ]
        links = [attrs[name] for _, attrs in self.found for name in LINKS if attrs.get(name)]
        styles = [attrs["style"] for _, attrs in self.found if "//" in (attrs.get("style") or "")]
        return acts + styles + [link for link in links if ":" in str(link).partition("/")[0]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("command", COMMANDS)
def test_no_control_character_reaches_the_terminal(
    command: str,
    run: Path,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "")
    words = [word.format(run) for word in command.split()]
    assert main(words) in (0, 2)
    out, err = capfd.readouterr()
    assert UNSEEN.findall(out + err) == []
    assert out + err or "--trace" in command


def test_nor_by_a_log_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_visibly(logging.WARNING, "%(message)s")
    try:
        raise RuntimeError(ALL)
    except RuntimeError:
        logging.getLogger("swift_r1").warning("%s", ALL, exc_info=True)
    assert UNSEEN.findall(err := capfd.readouterr().err) == [] and err.count("␛") > 5


def test_a_report_and_a_model_card_hold_no_code(run: Path, tmp_path: Path) -> None:
    pages = {}
    for name in ("report.html", "report.md"):
        assert main(["report", str(run), "-o", str(tmp_path / name)]) == 0
        pages[name] = (tmp_path / name).read_text()
    content = json.loads((run / "args.json").read_text())
    content["args"] |= {"dataset": [ALL, *TEXTS], "train_type": "full"}
    (run / "args.json").write_text(json.dumps(content))
    pages["README.md"] = model_card(run, 4)
    header, _, rest = pages["README.md"].removeprefix("---\n").partition("\n---\n")
    assert set(yaml.safe_load(header)) == {
        "library_name",
        "pipeline_tag",
        "tags",
    } and rest.startswith("\n# ")
    for name, text in pages.items():
        html = (
            text
            if name.endswith("html")
            else MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
        )
        assert TAKEN in html and len(html) > 5_000, "it was shown"
        assert Tags(html).harmful == [], name
        assert UNSEEN.findall(text) == [], name
        for picture in tmp_path.rglob("*.svg"):
            assert Tags(picture.read_text()).harmful == []


def test_the_server_answers_json_and_counts_by_its_own_names() -> None:
    asyncio.run(attack_a_server())


async def attack_a_server() -> None:
    lifecycle = Lifecycle(RolloutArguments(model="none"), lambda: (QuickEngine(), EXPECTED))  # type: ignore[arg-type, return-value]
    life = asyncio.create_task(lifecycle.run())
    while lifecycle.service is None:
        await asyncio.sleep(0.01)
    transport = httpx.ASGITransport(create_app(lifecycle, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:

        async def ask(method: str, path: str, content: object = None) -> tuple[int, bytes]:
            sent = None if content is None else json.dumps(content)
            headers = {"Content-Type": "application/json"}
            answer = await http.request(method, path, content=sent, headers=headers)
            return answer.status_code, answer.content

        attacks = (
            "<script>",
            "%1b]0;x%07",
            '"} 1%0aswift_evil{a="',
            "..%2f..%2f..%2fetc%2fpasswd",
            "%00",
            "%e2%80%ae",
        )
        for attack in attacks:
            for path in (
                "/{}",
                "/v1/models/{}",
                "/v1/sessions/{}",
                "/v1/sessions/{}/v1/models",
                "/static/{}",
            ):
                status, body = await ask("GET", path.format(attack))
                assert 400 <= status < 500
                assert isinstance(json.loads(body)["error"], str | dict)
                body.decode("ascii")
        for text in TEXTS:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/rollouts"):
                message = {
                    "role": text,
                    "content": text,
                    "name": text,
                    "tool_calls": [{"function": {"name": text}}],
                }
                content = {"model": text, "messages": [message], "prompt": text, text: text}
                status, body = await ask("POST", path, content)
                assert 400 <= status < 500 and not UNSEEN.findall(body.decode())
        status, body = await ask("GET", "/metrics")
        assert status == 200 and b"evil" not in body
        assert all(one.name for one in text_string_to_metric_families(body.decode()))
    life.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await life
    lifecycle.close()


def test_what_is_hidden_from_a_reader_is_what_is_looked_for() -> None:
    """These tests can fail: each text has something that would act."""
    assert UNSEEN.search(NAME) and len(UNSEEN.findall(ALL)) > 15
    assert len(Tags(ALL).harmful) >= 4 and Tags(f"<p>{ALL}</p>").harmful
    assert Tags(MarkdownIt("commonmark").render(TEXTS[7])).harmful
