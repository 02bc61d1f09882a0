"""Tokens as one block of HTML, each with the colour of one of its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from swift_r1.lab.report import colours
from swift_r1.lab.view.markup import token_markup

LEVELS = 16  # steps of a scale on each side of 0
# quantile of the sizes at which a scale ends, so that one outlier does not pale the rest
_SATURATED = 0.99
# tokens; a block ends with a line, where lines are not very long
_BLOCK = 200
_LONGEST_BLOCK = 2_000
_COLUMNS = {
    "ratio": "ratios",
    "entropy": "entropies",
    "version": "weight_versions",
    "advantage": "advantages",
    "logp": "rollout_logps",
    "logp_diff": "logps",
}
"""The column of a colour, where it has another name."""
_NUMBERS = (
    "rollout_logps",
    "logps",
    "ref_logps",
    "ratios",
    "clipped",
    "entropies",
    "advantages",
    "weight_versions",
)


@dataclass(frozen=True, slots=True)
class Colouring:
    """The meaning of a colour: `title` of the values; the kind of scale; what stands at its ends."""

    title: str
    kind: Literal["diverging", "sequential"]
    ends: tuple[str, str]


COLOURINGS: Mapping[str, Colouring] = {
    "entropy": Colouring("entropy (nats)", "sequential", ("sure", "unsure")),
    "logp": Colouring("engine's log-prob, negated", "sequential", ("sure", "unlikely")),
    "advantage": Colouring("advantage", "diverging", ("less likely", "more likely")),
    "ratio": Colouring(
        "importance ratio (log scale)", "diverging", ("became less likely", "became more likely")
    ),
    "clipped": Colouring("clipping", "diverging", ("clipped low", "clipped high")),
    "logp_diff": Colouring(
        "trainer's log-prob - engine's", "diverging", ("engine higher", "trainer higher")
    ),
    "version": Colouring("weight version", "sequential", ("oldest", "newest")),
}
"""What tokens can show; the first that the record has is shown at first."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A scale from `low` to `high`, as it is shown in the legend; values outside have the colour of its end."""

    colouring: Colouring
    low: float
    high: float

    def level(self, value: float | None) -> str:
        """Returns the CSS class of a value: `d-16` ... `d16`, or `x` for none."""
        if value is None or not math.isfinite(value):
            return "x"
        span = self.high - self.low
        share = min(1.0, max(0.0, (value - self.low) / span)) if span > 0 else 0.5
        if self.colouring.kind == "diverging":
            share = 2 * share - 1
        return f"d{round(share * LEVELS)}"


def values_of(row: Mapping[str, Any], colour: str) -> list[float | None] | None:
    """Returns the values that `colour` (a key of `COLOURINGS`) shows, one a token; None if the record has no such
    column."""
    values = row.get(_COLUMNS.get(colour, colour))
    if not values:
        return None
    if colour == "logp_diff":
        engine = row.get("rollout_logps")
        if not engine:
            return None
        return [
            None if a is None or b is None else a - b for a, b in zip(values, engine, strict=True)
        ]
    if colour == "ratio":
        return [math.log(value) if value is not None and value > 0 else None for value in values]
    if colour == "logp":
        return [None if value is None else -value for value in values]
    return list(values)


def scale_of(colour: str, values: Sequence[float | None]) -> Scale:
    """Returns the scale for these values: to the 99th percentile of their sizes, rounded up to 1, 2 or 5 times a power
    of ten; from the oldest weight version to the newest."""
    sizes = sorted(
        abs(value) for value in values if value is not None and math.isfinite(value)
    ) or [0.0]
    kind = COLOURINGS[colour]
    if colour == "version":
        return Scale(kind, sizes[0], sizes[-1])
    limit = 1.0
    if colour != "clipped":
        limit = _rounded_up(sizes[math.ceil(_SATURATED * len(sizes)) - 1])
    return Scale(kind, -limit if kind.kind == "diverging" else 0.0, limit)


def classes(
    values: Sequence[float | None] | None, scale: Scale | None, mask: Sequence[bool] | None
) -> list[str]:
    """Returns the CSS classes of each token: its level, and `m` where it is not in the loss."""
    levels = ["x"] * len(mask or ())
    if values is not None and scale is not None:
        levels = [scale.level(value) for value in values]
    return [
        level if mask is None or mask[place] else f"{level} m" for place, level in enumerate(levels)
    ]


def tokens_html(pieces: Sequence[str], special: Sequence[bool], marks: Sequence[str]) -> str:
    """Returns one `<i>` a token, which holds no other `<i>`; `special` tokens have the class `sp`. A piece without text
    is part of the character that another token completes. The tokens stand in blocks, of which a browser styles and
    lays out only those in view."""
    return "".join(_blocks(pieces, special, marks))


def _blocks(pieces: Sequence[str], special: Sequence[bool], marks: Sequence[str]) -> Iterator[str]:
    block: list[str] = []
    for piece, is_special, mark in zip(pieces, special, marks, strict=True):
        before = "<wbr>" if piece[:1] == " " else ""
        shown = token_markup(piece) if piece else "‥"
        block.append(f'{before}<i class="{mark}{" sp" if is_special else ""}">{shown}</i>')
        if (len(block) >= _BLOCK and piece.endswith("\n")) or len(block) >= _LONGEST_BLOCK:
            yield f"<div>{''.join(block)}</div>"
            block = []
    if block:
        yield f"<div>{''.join(block)}</div>"


def numbers_json(row: Mapping[str, Any], pieces: Sequence[str]) -> str:
    """Returns what the page says of a token under the pointer: a list for each column that the record has, one entry a
    token, to five digits."""
    columns: dict[str, Any] = {"token": [repr(piece) for piece in pieces]}
    logps = row.get("rollout_logps")
    if logps:
        columns["probability"] = [_percent(value) for value in logps]
    ids = row.get("token_ids")
    if ids:
        columns["id"] = list(ids)
    for name in _NUMBERS:
        values = row.get(name)
        if values:
            columns[name] = [_short(value) for value in values]
    mask = row.get("mask")
    if mask:
        columns["in the loss"] = ["yes" if one else "no" for one in mask]
    return json.dumps(columns, separators=(",", ":"))


def _percent(logp: float | None) -> str | None:
    """Returns a log-prob as a probability in percent, to three digits."""
    if logp is None or not math.isfinite(logp):
        return None
    return f"{100 * math.exp(min(0.0, logp)):.3g} %"


def legend_html(scale: Scale) -> str:
    """Returns the scale's colours with what they stand for at both ends and in the middle."""
    kind = scale.colouring
    shown = math.exp if scale.colouring is COLOURINGS["ratio"] else float
    middle = (scale.low + scale.high) / 2
    places = [scale.low + (scale.high - scale.low) * step / 8 for step in range(9)]
    boxes = "".join(f'<i class="{scale.level(place)}">&nbsp;</i>' for place in places)
    numbers = "".join(
        f"<span>{shown(value):.4g}</span>" for value in (scale.low, middle, scale.high)
    )
    low, high = kind.ends
    return (
        f'<span class="tokens legend"><span>{kind.title}: {low}</span>'
        f"<span class=bar><span>{boxes}</span><span class=numbers>{numbers}</span></span><span>{high}</span></span>"
    )


def token_css() -> str:
    """Returns the classes of `Scale.level`, for light and dark pages (Quasar marks these with `body--dark`). What is 0
    has the page's colour: only what stands out is coloured."""
    rules = []
    for place in range(-LEVELS, LEVELS + 1):
        for dark in (False, True):
            rules.append(_rule(f"d{place}", colours.diverging(place / LEVELS, dark=dark), dark))
    return "\n".join(rules)


def _rule(name: str, background: str, dark: bool) -> str:
    where = ".body--dark " if dark else ""
    return f"{where}.tokens .{name} {{ background: {background}; color: {colours.text_on(background)} }}"


def _rounded_up(value: float) -> float:
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _short(value: float | int | None) -> float | int | str | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
