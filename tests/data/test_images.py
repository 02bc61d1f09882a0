"""Images of rows: what they may be given as, what is made of them, and what is left out."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from swift_r1.data import image_files
from swift_r1.data.hubs import SetLocation, load_split, split_rows
from swift_r1.data.image_files import ImageRules, kept
from swift_r1.data.image_rows import place_images, take_images
from swift_r1.data.images import ImageFile, decoded, images_of
from swift_r1.data.loading import (
    LoadedData,
    have_images,
    load_rows,
    most_images,
    stream_of,
)
from swift_r1.data.preprocessors import RowFault
from swift_r1.data.prompts import data_columns
from swift_r1.data.sources import DataFlags
from swift_r1.data.streaming import chained
from swift_r1.errors import RunFailed, UsageError
from tests.vision import picture

RULES = ImageRules()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWIFT_R1_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ROOT_IMAGE_DIR", raising=False)
    return tmp_path / "cache" / "data"


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards: which way is up can be seen."""
    colours = np.zeros((height, width, 3), np.uint8)
    colours[..., 0] = np.linspace(0, 255, width, dtype=np.uint8)
    colours[..., 1] = np.linspace(0, 255, height, dtype=np.uint8)[:, None]
    return Image.fromarray(colours)


def pixels_of(image: ImageFile) -> np.ndarray:
    return np.asarray(decoded(image.read()))


def rows_of(folder: Path, *rows: dict[str, Any], **flags: Any) -> LoadedData:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(DataFlags([str(file)], dataset_shuffle=False, **flags))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_plain_file_stays_where_it_is(tmp_path: Path, own_cache: Path, kind: str) -> None:
    content = saved(gradient(31, 17), kind)
    (tmp_path / "a").write_bytes(content)
    image = kept("a", RULES, [tmp_path])
    assert (image.path, image.read()) == (str(tmp_path / "a"), content)
    assert (image.width, image.height) == (31, 17)
    assert not own_cache.exists()


def test_every_form_of_the_same_image_is_the_same(tmp_path: Path) -> None:
    content = picture()
    coded = base64.b64encode(content).decode()
    (tmp_path / "a.png").write_bytes(content)
    forms: list[Any] = [
        *(str(tmp_path / "a.png"), tmp_path / "a.png", f"file://{tmp_path / 'a.png'}"),
        *(content, bytearray(content), coded, f"data:image/png;base64,{coded}"),
        {"bytes": content, "path": None},
        {"bytes": None, "path": "a.png"},
        {"bytes": coded, "path": "elsewhere/b.png"},
        {"url": f"data:image/png;base64,{coded}"},
    ]
    images = [kept(form, RULES, [tmp_path]) for form in forms]
    assert len({image.sha256 for image in images}) == 1
    assert all(image.read() == content for image in images)
    assert {image.path for image in images[3:7]} == {images[3].path}  # one file of the cache


def test_where_a_path_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("data", "root", "here")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.png").write_bytes(picture(seed=number))
    (tmp_path / "root" / "data.png").write_bytes(picture(seed=9))
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(tmp_path / "root"))
    found = [kept(f"{name}.png", RULES, [tmp_path / "data"]) for name in ("data", "root", "here")]
    assert [image.read() for image in found] == [picture(seed=number) for number in range(3)]


def test_what_is_not_plain_becomes_a_png_that_is(own_cache: Path) -> None:
    plain = gradient(40, 30)
    colours = np.asarray(plain).astype(int)
    sideways = Image.Exif()
    sideways[0x0112] = 6  # turned by a quarter
    turned = kept(saved(plain, "PNG", exif=sideways), RULES, [])
    assert (turned.width, turned.height) == (30, 40)
    assert np.array_equal(pixels_of(turned), np.rot90(colours, -1))

    for other in (
        kept(saved(plain.convert("CMYK"), "TIFF"), RULES, []),
        kept(saved(plain, "BMP"), RULES, []),
        kept(plain, RULES, []),
    ):
        assert Path(other.path).is_relative_to(own_cache / "images")
        assert Image.open(other.path).format == "PNG"
        assert np.array_equal(pixels_of(other), colours)
    jpeg = kept(saved(plain.convert("CMYK"), "JPEG", quality=95), RULES, [])
    assert np.abs(pixels_of(jpeg) - colours).mean() < 4

    grey = kept(saved(plain.convert("L"), "PNG"), RULES, [])
    assert (pixels_of(grey).std(axis=2) == 0).all()
    still = kept(saved(plain.convert("P"), "GIF"), RULES, [])
    assert np.abs(pixels_of(still) - colours).mean() < 40


def test_a_photograph_with_others_behind_it_is_the_first() -> None:
    """As telephones save them, in JPEG's name."""
    own = gradient(40, 30)
    content = saved(own, "MPO", save_all=True, append_images=[Image.new("RGB", (40, 30))])
    image = kept(content, RULES, [])
    assert Image.open(image.path).format == "PNG"
    assert np.abs(pixels_of(image) - np.asarray(own).astype(int)).mean() < 10


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    image = Image.new("RGBA", (20, 10), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 10, 10))
    if mode == "P":
        content = saved(image.convert("P"), "PNG", transparency=0)
        image = Image.open(io.BytesIO(content)).convert("RGBA")
        white = np.asarray(image)[..., 3] == 0
    else:
        content = saved(image.convert(mode), "PNG")
        white = np.arange(20)[None, :].repeat(10, 0) >= 10
    seen = pixels_of(kept(content, RULES, []))
    assert (seen[white] == 255).all() and white.any()
    assert (seen[~white] == 0).all()


@pytest.mark.parametrize(
    ("size", "rules", "wanted"),
    [
        ((100, 50), ImageRules(max_pixels=5_000), (100, 50)),
        ((100, 50), ImageRules(max_pixels=4_999), (99, 49)),
        ((100, 50), ImageRules(min_pixels=20_000), (200, 100)),
        ((100, 50), ImageRules(min_pixels=5_001), (101, 51)),
        ((20_000, 1), ImageRules(max_pixels=100), (100, 1)),
        ((1, 1), ImageRules(min_pixels=64), (8, 8)),
    ],
)
def test_sizes(size: tuple[int, int], rules: ImageRules, wanted: tuple[int, int]) -> None:
    image = kept(saved(gradient(*size), "PNG"), rules, [])
    assert (image.width, image.height) == wanted
    assert decoded(image.read()).size == wanted


def test_scaling_is_that_of_ms_swift() -> None:
    """`torchvision.transforms.Resize` on PIL's object is PIL's own bilinear scaling."""
    own = gradient(100, 60)
    image = kept(saved(own, "PNG"), ImageRules(max_pixels=1_500), [])
    assert np.array_equal(
        pixels_of(image), np.asarray(own.resize((50, 30), Image.Resampling.BILINEAR))
    )


def bomb(side: int) -> bytes:
    """A small file that says it is large."""
    content = bytearray(saved(Image.new("RGB", (1, 1)), "PNG"))
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + bytes(content[24:29])
    content[12:33] = header + zlib.crc32(header).to_bytes(4, "big")
    return bytes(content)


def animated(kind: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    return saved(frames[0], kind, save_all=True, append_images=frames[1:])


BAD: list[tuple[Any, str]] = [
    (picture()[:-40], "it cannot be decoded: "),
    (saved(gradient(99, 99), "JPEG")[:-200], "it cannot be decoded: image file is truncated"),
    (b"hello, this is text", "it is no image, or of a kind that is not read"),
    (b"", "it is empty"),
    (bomb(10_000), "10,000 x 10,000 pixels, and 89,478,485 are the most"),
    (bomb(30_000), "it cannot be decoded: Image size (900000000 pixels) exceeds limit"),
    (animated("GIF"), "it is animated, or has several pages: 2 frames"),
    (animated("TIFF"), "it is animated, or has several pages: 2 frames"),
    (saved(Image.new("I;16", (9, 9)), "PNG"), "it has more than 8 bits per colour (I;16)"),
    ("none.png", "there is no file none.png (looked in "),
    ("", "it is empty"),
    (7, "it is an int, and neither a path nor the bytes of an image"),
    ([[0, 1], [1, 0]], "it is a list, and neither"),
    ({"bytes": None, "path": None}, "it has neither bytes nor a path"),
    ("data:image/png,plain", "it is a data URL without base64"),
    ("data:image/png;base64,AAA", "it is no base64: "),
    ("http://127.0.0.1:9/a.png?key=1", "http://127.0.0.1:9/a.png?*** is not downloaded without"),
]


@pytest.mark.parametrize(("given", "cause"), BAD, ids=lambda value: str(value)[:30])
def test_what_cannot_be_trained_on_is_a_fault_of_its_row(given: Any, cause: str) -> None:
    with pytest.raises(RowFault) as caught:
        kept(given, RULES, [])
    assert cause in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_and_a_file_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RowFault, match="Is a directory"):
        kept(str(tmp_path), RULES, [])
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RowFault, match="link cannot be read: No such file"):
        kept("link", RULES, [tmp_path])
    (tmp_path / "large").write_bytes(b"1" * 100)
    monkeypatch.setattr(image_files, "MOST_BYTES", 99)
    with pytest.raises(RowFault, match="has more than"):
        kept("large", RULES, [tmp_path])


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe would stop the reader, and a device without an end take all memory."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    for given in ("pipe.png", "zero.png", "/dev/zero", "file:///dev/zero", {"path": "/dev/zero"}):
        with pytest.raises(RowFault, match="cannot be read: not a regular file"):
            kept(given, RULES, [tmp_path])
    image = ImageFile(str(tmp_path / "pipe.png"), "", 1, 1)
    with pytest.raises(RunFailed, match="not a regular file"):
        image.read()


def test_damaged_files_are_faults_or_images() -> None:
    """Some of their bytes are other ones: whatever Pillow raises is a fault of the row."""
    rng = random.Random(0)
    own = gradient(20, 24)
    whole = [
        *(saved(own, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")),
        *(saved(own.convert(mode), "PNG") for mode in ("P", "LA", "RGBA")),
    ]
    found = Counter[str]()
    for _ in range(300):
        content = bytearray(rng.choice(whole))
        for place in rng.choices(range(len(content)), k=rng.choice((1, 5, 20))):
            content[place] = rng.randrange(256)
        try:
            image = kept(bytes(content[: rng.choice((len(content), 99))]), RULES, [])
            found[str(pixels_of(image).shape == (image.height, image.width, 3))] += 1
        except RowFault:
            found["fault"] += 1
    assert found.keys() == {"True", "fault"} and min(found.values()) > 20


def test_a_cache_that_cannot_be_written_ends_the_run(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_cache.mkdir(parents=True)
    (own_cache / "images").write_text("a file in its place")
    with pytest.raises(UsageError, match="an image of a row cannot be kept in the cache"):
        rows_of(tmp_path, {"images": [base64.b64encode(picture()).decode()], "query": "q"})


@pytest.fixture
def address() -> Iterator[tuple[str, list[str]]]:
    """A server with `/a.png` that fails once, `/b.png` whose answer is another address, and no others."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path == "/b.png":
                self.send_response(302)
                self.send_header("Location", "/a.png")
                return self.end_headers()
            failed = asked.count("/a.png") == 1
            self.send_response((503 if failed else 200) if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(picture())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join(30)


def test_addresses(address: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    base, asked = address
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not meant for this machine
    with pytest.raises(RowFault, match="is not downloaded without --load_images_from_urls true"):
        kept(f"{base}/a.png", RULES, [])
    assert not asked
    rules = ImageRules(from_urls=True)
    assert kept(f"{base}/b.png", rules, []).read() == picture()
    assert asked == ["/b.png", "/a.png", "/b.png", "/a.png"]
    with pytest.raises(RowFault, match=r"c\.png cannot be downloaded: the server answered 404"):
        kept(f"{base}/c.png", rules, [])
    assert asked.count("/c.png") == 1
    monkeypatch.setattr(image_files, "MOST_BYTES", 99)
    with pytest.raises(RowFault, match="has more than"):
        kept(f"{base}/a.png", rules, [])


def placed(row: dict[str, Any]) -> tuple[str, int]:
    given = take_images(row)
    messages, files = place_images(row["messages"], given, RULES, [])
    return "".join(message["content"] for message in messages), len(files)


def asking(content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **columns}


def test_tags_and_parts() -> None:
    one = picture()
    assert placed(asking("what?", images=[one])) == ("<image>what?", 1)
    assert placed(asking("what?", images=[one, one])) == ("<image><image>what?", 2)
    assert placed(asking("a <image> b <image>", images=[one, one])) == ("a <image> b <image>", 2)
    assert placed(asking("what?", image=one)) == ("<image>what?", 1)
    system = [{"role": "system", "content": "be"}, {"role": "user", "content": "q"}]
    assert placed({"messages": system, "images": one}) == ("be<image>q", 1)
    for tags, count in ((1, 2), (2, 1)):
        with pytest.raises(RowFault, match=f"have {tags} <image> tags for {count} images"):
            placed(asking("<image>" * tags, images=[one] * count))


def test_order_of_images_is_that_of_their_tags() -> None:
    pictures = [picture(seed=number) for number in range(3)]
    row = asking("<image>a<image>b<image>", images=pictures)
    _, files = place_images(row["messages"], take_images(row), RULES, [])
    assert [image.read() for image in images_of({"images": files})] == pictures


@pytest.mark.parametrize(
    "part",
    [
        lambda url: {"type": "image_url", "image_url": {"url": url}},
        lambda url: {"type": "image_url", "image_url": url},
        lambda url: {"type": "image", "image": url, "text": None},
        lambda url: {"type": "image", "url": url},
        lambda url: {"type": "input_image", "image_url": url},
    ],
)
def test_parts_of_messages(tmp_path: Path, part: Any) -> None:
    url = "data:image/png;base64," + base64.b64encode(picture()).decode()
    content = [{"type": "text", "text": "see "}, part(url), {"type": "text", "text": "?"}]
    data = rows_of(tmp_path, asking(content))
    assert data.train[0]["messages"] == [{"role": "user", "content": "see <image>?"}]
    assert images_of(data.train[0])[0].read() == picture()
    placeholder = [{"type": "image"}, {"type": "text", "text": "?"}]
    (tmp_path / "a.png").write_bytes(picture())
    assert len(rows_of(tmp_path, asking(placeholder, images=["a.png"])).train) == 1
    with pytest.raises(UsageError, match="images in a column and others in its messages"):
        rows_of(tmp_path, asking(content, images=["a.png"]))


def test_rows_without_images_are_text(tmp_path: Path) -> None:
    data = rows_of(tmp_path, asking("the tag <image> of HTML", images=[]), asking("<image>"))
    assert [row["messages"][0]["content"] for row in data.train] == [
        "the tag <image> of HTML",
        "<image>",
    ]
    assert not have_images(data.train) and not have_images(list(data.train))


def test_images_of_answers_are_not_asked_about(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    answer = {"role": "assistant", "content": "it is <image>"}
    row = asking("what is <image>?", images=["a.png"])
    row["messages"].append(answer)
    assert len(rows_of(tmp_path, row).train) == 1


def test_a_row_is_left_out_and_counted_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "cut.png").write_bytes(picture()[:-40])
    good = {"images": ["a.png"], "query": "q", "solution": "1"}
    data = rows_of(tmp_path, good, {"images": ["a.png", "cut.png"], "query": "q"}, good)
    assert (len(data.train), data.drops.broken) == (2, 1)
    assert "rows.jsonl:2: image 2 of 2: it cannot be decoded" in caplog.text
    with pytest.raises(UsageError, match=r"--strict true: .*rows.jsonl:2: image 2 of 2"):
        rows_of(tmp_path, good, {"images": ["a.png", "cut.png"], "query": "q"}, strict=True)


def test_rows_on_disk_name_files_and_a_hash(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    coded = base64.b64encode(picture(seed=1)).decode()
    data = rows_of(tmp_path, {"images": ["a.png", coded], "query": "q"}, {"query": "text"})
    assert have_images(data.train) and have_images(list(data.train))
    assert most_images(data.train) == most_images(data.train, list(data.train)) == 2
    first, second = images_of(data.train[0])
    assert first == ImageFile(str(tmp_path / "a.png"), first.sha256, 28, 28)
    assert Path(second.path).parent.parent == own_cache / "images"
    assert data_columns(data.train[0])["images"] == [
        {"bytes": None, "path": image.path} for image in (first, second)
    ]
    assert images_of(data.train[1]) == () and "images" not in data.train[1]


def test_rows_are_the_same_wherever_their_images_are(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(picture(seed=seed))
        digests.append(rows_of(tmp_path / name, {"images": ["a.png"], "query": "q"}).train.digest())
    assert digests[0] == digests[1] != digests[2]


def test_prepared_rows_are_used_again_while_their_images_are_as_they_were(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "swift_r1.data")
    file = tmp_path / "a.png"
    file.write_bytes(picture())
    then = 1_700_000_000
    os.utime(file, (then, then))
    row = {"images": ["a.png", base64.b64encode(picture(seed=1)).decode()], "query": "q"}

    def read(**flags: Any) -> list[ImageFile]:
        caplog.clear()
        return list(images_of(rows_of(tmp_path, row, **flags).train[0]))

    first, second = read()
    assert "from the cache" not in caplog.text
    os.utime(second.path, (then, then))
    assert read() == [first, second] and "prepared rows from the cache" in caplog.text
    assert Path(second.path).stat().st_mtime > then  # used again
    assert read(max_pixels=100)[0].width == 10 and "from the cache" not in caplog.text
    Path(second.path).unlink()
    assert read() == [first, second] and f"the image {second.path} is gone" in caplog.text
    file.write_bytes(picture(seed=2))
    with pytest.raises(RunFailed, match="has changed since the rows were read"):
        first.read()
    assert read()[0].sha256 != first.sha256 and f"the image {file} is gone" in caplog.text


def test_old_images_go(own_cache: Path) -> None:
    from swift_r1.data.cache import remove_old

    image = Path(kept(picture(), RULES, []).path)
    images = own_cache / "images"
    old = 1_700_000_000
    os.utime(image, (old, old))
    remove_old(own_cache)  # they were looked through less than a day ago
    assert image.exists()
    os.utime(images, (old, old))
    remove_old(own_cache)
    assert not image.exists() and images.exists()


def test_parquet_of_the_hubs_form(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    content = saved(gradient(9, 9), "JPEG")
    table = pa.Table.from_pylist(
        [{"image": {"bytes": content, "path": "x.jpg"}, "problem": "q", "solution": "1"}]
    )
    parquet.write_table(table, tmp_path / "rows.parquet")
    (row,) = load_rows(DataFlags([str(tmp_path / "rows.parquet")])).train
    assert images_of(row)[0].read() == content and "image" not in row
    assert row["messages"] == [{"role": "user", "content": "<image>q"}]


def test_a_folder_of_datasets(tmp_path: Path) -> None:
    """What `datasets` would decode (`Image` columns, and lists of them) comes as its bytes; a broken one is a fault of
    its row."""
    import datasets

    good = {"bytes": picture(), "path": None}
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "query": datasets.Value("string"),
        }
    )
    rows = [
        {"images": [good, good], "query": "q"},
        {"images": [{"bytes": picture()[:-40], "path": None}], "query": "q"},
    ]
    made = datasets.Dataset.from_list(rows, features=features)
    made.save_to_disk(tmp_path / "set")
    data = load_rows(DataFlags([str(tmp_path / "set")]))
    assert [image.read() for image in images_of(data.train[0])] == [picture(), picture()]
    assert (len(data.train), data.drops.broken) == (1, 1)


def test_a_stream_of_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    rows = [{"images": [name], "query": "q"} for name in ("a.png", "none.png", "a.png")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = DataFlags([str(tmp_path / "rows.jsonl")], streaming=True, dataset_shuffle=False)
    assert have_images(load_rows(flags).train)
    first, second = islice(stream_of(flags, lambda row: True), 2)
    assert [row["prompt_id"] for row in (first, second)] == ["rows:0", "rows:2"]
    assert images_of(first) == images_of(second)
    assert "a row is left out: " in caplog.text and "there is no file none.png" in caplog.text
    elsewhere = {**first, "images": [{**first["images"][0], "path": "/other.png"}]}
    assert chained("", first) == chained("", elsewhere)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hubs_columns_of_images_come_as_files(tmp_path: Path, streaming: bool) -> None:
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    features = datasets.Features({"image": datasets.Image(), "query": datasets.Value("string")})
    table = pa.Table.from_pylist(
        [{"image": {"bytes": picture(), "path": None}, "query": "q"}],
        schema=features.arrow_schema,
    )
    (tmp_path / "data").mkdir()
    parquet.write_table(table, tmp_path / "data" / "train-0.parquet")
    place = SetLocation(str(tmp_path))
    data = load_split(place, "default", "train", streaming=streaming)
    found = split_rows(place, "default", "train", data)
    assert list(found) == [({"image": {"bytes": picture()}, "query": "q"}, None)]


def test_columns_rename_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    row = {"figure": "a.png", "query": "q"}
    (named,) = rows_of(tmp_path, row, columns={"figure": "images"}).train
    assert len(images_of(named)) == 1 and "figure" not in named
    (kept_,) = rows_of(tmp_path, {"image": "a.png", "query": "q"}, columns={"image": "file"}).train
    assert kept_["file"] == "a.png" and not images_of(kept_)
