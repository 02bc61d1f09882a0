"""Pictures of shapes on a board, and the questions about them."""

from __future__ import annotations

import io
import random
from typing import NamedTuple

from PIL import Image, ImageDraw

SIDE = 3  # squares of the board in a row
SQUARE = 8  # pixels: what the tower makes one feature of
MOST = 5
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
PAPER = (245, 245, 240)


class Problem(NamedTuple):
    picture: bytes  # a PNG
    colour: str
    count: int


def problem(seed: int) -> Problem:
    """Draws a board for a seed: 1 to 5 discs of the colour that is asked for, others of other colours, and squares."""
    rng = random.Random(seed)
    colour = rng.choice(list(COLOURS))
    count = rng.randint(1, MOST)
    others = [(shape, one) for shape in ("disc", "square") for one in COLOURS]
    others.remove(("disc", colour))
    places = list(range(SIDE * SIDE))
    rng.shuffle(places)
    image = Image.new("RGB", (SIDE * SQUARE, SIDE * SQUARE), PAPER)
    draw = ImageDraw.Draw(image)
    for number, place in enumerate(places):
        if number < count:
            shape, drawn = "disc", colour
        elif rng.random() < 0.5:
            shape, drawn = rng.choice(others)
        else:
            continue
        left = place % SIDE * SQUARE
        top = place // SIDE * SQUARE
        box = (left + 1, top + 1, left + SQUARE - 2, top + SQUARE - 2)
        (draw.ellipse if shape == "disc" else draw.rectangle)(box, fill=COLOURS[drawn])
    file = io.BytesIO()
    image.save(file, "PNG")
    return Problem(file.getvalue(), colour, count)


def question(colour: str) -> str:
    return f"<image>how many {colour} discs?"
