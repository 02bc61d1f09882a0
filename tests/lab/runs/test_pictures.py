"""What a line of completions.jsonl may have pages and reports show: images that the run was given, and no other file."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from swift_r1.data.images import ImageFile
from swift_r1.lab.report.blocks import Passages, Report, Section
from swift_r1.lab.report.completions import extremes
from swift_r1.lab.report.html import html
from swift_r1.lab.report.markdown import markdown
from swift_r1.lab.runs.completions import CompletionTable
from swift_r1.lab.runs.pictures import pictures_of
from swift_r1.lab.view.completion_html import data_columns, rows_table
from swift_r1.lab.view.message_html import prompt_block
from tests.lab.runs.made import completions, write_rows
from tests.vision import image_file, picture


@pytest.fixture
def image(tmp_path: Path) -> ImageFile:
    return image_file(tmp_path, picture(640, 480), (640, 480))


def line(**given: Any) -> dict[str, Any]:
    return {"prompt": "how many?", "images": [given]}


def test_a_picture_is_drawn_small(image: ImageFile) -> None:
    [shown] = pictures_of(line(**image.stored()))
    assert shown.title == f"{image.sha256}, 640 x 480 pixels"
    assert shown.url is not None
    kind, _, data = shown.url.partition(",")
    drawn = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (kind, drawn.format, drawn.size) == ("data:image/jpeg;base64", "JPEG", (320, 240))


def test_a_line_makes_nothing_read_any_other_file(image: ImageFile, tmp_path: Path) -> None:
    """Neither a file without its hash, nor one that is no image, nor what never ends."""
    secret = tmp_path / "secret"
    secret.write_text("the key")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    known = hashlib.sha256(secret.read_bytes()).hexdigest()
    Path(image.path).write_bytes(picture(640, 480, seed=1))  # another than was trained on
    for path, name, why in (
        ("/etc/passwd", image.sha256, "has changed"),
        (image.path, image.sha256, "has changed"),
        (str(secret), known, "cannot be decoded"),
        (str(pipe), known, "has changed"),
        ("/dev/zero", known, "has changed"),
        (str(tmp_path), known, "has changed"),
        ("\0", known, "has changed"),
        ("", known, "has changed"),
    ):
        [shown] = pictures_of(line(path=path, sha256=name, width=640, height=480))
        assert shown.url is None and why in shown.title
    other = [None, 3, [], "x", {}, {"path": 3, "sha256": "x", "width": 1, "height": 1}]
    assert pictures_of({"images": other}) == pictures_of({"images": "x"}) == pictures_of({}) == []


def test_pages_and_reports_show_it_with_its_completions(image: ImageFile, tmp_path: Path) -> None:
    gone = {"path": "<img src=x>", "sha256": "0", "width": 1, "height": 1}
    rows = [row | {"images": [image.stored(), gone]} for row in completions(4, 2, 4, 8)]
    [first, _] = pictures_of(rows[0])
    assert first.url is not None
    block = prompt_block(rows[0])
    table = rows_table(rows[:1], ["prompt"], None, False, {})
    for page in (block, table):
        assert first.url in page and "&lt;img src=x&gt;, 1 x 1 pixels" in page
        assert "<img src=x" not in page
    assert "images" not in data_columns(rows[0])
    write_rows(tmp_path / "completions.jsonl", rows)
    with CompletionTable(tmp_path / "completions.jsonl") as found:
        found.refresh()
        blocks = extremes(found, best=True)
    assert all(isinstance(one, Passages) and first in one.pictures for one in blocks)
    report = Report("r", [Section("s", blocks)])
    assert first.url in html(report) and "<img src=x" not in html(report)
    text, _ = markdown(report, "files")
    assert f"Images: {image.sha256}, 640 x 480 pixels; \\<img src=x\\>" in text
