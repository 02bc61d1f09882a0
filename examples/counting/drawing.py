"""Pictures of discs and squares on a board."""

from __future__ import annotations

import io
import random
from typing import NamedTuple

from PIL import Image, ImageDraw

SIDE = 3  # squares of the board in a row
SQUARE = 8  # pixels: what the tower makes one feature of
MOST = 5
COLOURS = ((220, 40, 40), (40, 180, 60), (50, 80, 230))
PAPER = (245, 245, 240)
QUESTION = "how many discs?<image>"


class Problem(NamedTuple):
    picture: bytes  # a PNG
    count: int


def problem(seed: int) -> Problem:
    """Draws a board for a seed: 1 to 5 discs, squares on about half of the other places, each of any colour."""
    rng = random.Random(seed)
    count = rng.randint(1, MOST)
    places = list(range(SIDE * SIDE))
    rng.shuffle(places)
    image = Image.new("RGB", (SIDE * SQUARE, SIDE * SQUARE), PAPER)
    draw = ImageDraw.Draw(image)
    for number, place in enumerate(places):
        if number >= count and rng.random() < 0.5:
            continue
        left = place % SIDE * SQUARE
        top = place // SIDE * SQUARE
        box = (left + 1, top + 1, left + SQUARE - 2, top + SQUARE - 2)
        shape = draw.ellipse if number < count else draw.rectangle
        shape(box, fill=rng.choice(COLOURS))
    file = io.BytesIO()
    image.save(file, "PNG")
    return Problem(file.getvalue(), count)
