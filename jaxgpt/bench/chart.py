"""Small line charts side by side, with logarithmic axes, drawn into a PNG by Pillow.

Pillow comes with TensorBoard, so a chart needs no further library. A panel knows nothing of what
its numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.durable import storage_errors
from jaxgpt.errors import ConfigError

WIDTH, HEIGHT = 360, 300  # pixels of a panel
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 52, 44  # around its plot
SMOOTH = 3  # drawn so much larger, and scaled down
COLOURS = ("#0072b2", "#d55e00", "#009e73")  # told apart by all eyes (Okabe and Ito)
GREY, BLACK = "#d0d0d0", "#202020"


class Line(NamedTuple):
    """A named curve through points (x, y), all above 0."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


class Panel(NamedTuple):
    """One plot; `x` and `y` name its axes."""

    title: str
    x: str
    y: str
    lines: tuple[Line, ...]


def check(path: Path) -> None:
    """Raise ConfigError unless a chart can be written to a path, before anything is measured."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"{path}: a chart is a .png file")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ConfigError(f"{path}: drawing needs Pillow: pip install pillow") from None


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels side by side; raises StorageError where the file cannot be written."""
    from PIL import Image, ImageDraw

    size = WIDTH * len(panels), HEIGHT
    image = Image.new("RGB", (size[0] * SMOOTH, size[1] * SMOOTH), "white")
    pen = ImageDraw.Draw(image)
    for number, panel in enumerate(panels):
        _panel(pen, panel, number * WIDTH)
    with storage_errors(path):
        image.resize(size, Image.Resampling.LANCZOS).save(path, "PNG")


def position(value: float, low: float, high: float) -> float:
    """Return where a value is between two others, 0 to 1, on a logarithmic axis."""
    return math.log(value / low) / math.log(high / low)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis: the values with a tenth of their range on either side."""
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.1, 1.05)
    return low / margin, high * margin


def short(value: float) -> str:
    """Return a number in at most three figures and a unit's letter."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            scaled = value / (1e3 if letter == "k" else unit)
            return f"{scaled:.3g}{letter}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _panel(pen: Any, panel: Panel, left: int) -> None:
    points = [point for line in panel.lines for point in line.points]
    x_low, x_high = limits([x for x, _ in points])
    y_low, y_high = limits([y for _, y in points])
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            (left + LEFT + wide * position(x, x_low, x_high)) * SMOOTH,
            (TOP + tall * (1 - position(y, y_low, y_high))) * SMOOTH,
        )

    for x in sorted({x for x, _ in points}):
        pen.line([at(x, y_low), at(x, y_high)], GREY, SMOOTH)
        _text(pen, at(x, y_low), short(x), "mt", below=4)
    for part in (0, 0.25, 0.5, 0.75, 1):
        y = y_low * (y_high / y_low) ** part
        pen.line([at(x_low, y), at(x_high, y)], GREY, SMOOTH)
        _text(pen, at(x_low, y), short(y), "rm", right=-4)
    for number, line in enumerate(panel.lines):
        colour = COLOURS[number % len(COLOURS)]
        ends = [at(*point) for point in line.points]
        for begin, end in zip(ends[:-1], ends[1:], strict=True):
            _stroke(pen, begin, end, colour, line.dashed)
        for x, y in ends:
            r = 3 * SMOOTH
            pen.ellipse((x - r, y - r, x + r, y + r), None if line.dashed else colour, colour)
        place = ((left + LEFT) * SMOOTH, (26 + 12 * number) * SMOOTH)
        _text(pen, place, line.name, "lm", colour=colour)
    middle = (left + LEFT + wide / 2) * SMOOTH
    _text(pen, (middle, 12 * SMOOTH), panel.title, "mm", size=14)
    _text(pen, (middle, (HEIGHT - 12) * SMOOTH), panel.x, "mm")
    _text(pen, ((left + 6) * SMOOTH, 12 * SMOOTH), panel.y, "lm")


def _stroke(pen: Any, begin: tuple, end: tuple, colour: str, dashed: bool) -> None:
    if not dashed:
        pen.line([begin, end], colour, 2 * SMOOTH)
        return
    count = max(1, round(math.dist(begin, end) / (10 * SMOOTH)))
    for part in range(count):
        ends = (part / count, (part + 0.6) / count)
        cut = [tuple(a + (b - a) * t for a, b in zip(begin, end, strict=True)) for t in ends]
        pen.line(cut, colour, 2 * SMOOTH)


def _text(
    pen: Any, place: tuple[float, float], text: str, anchor: str, *, size: int = 10,
    colour: str = BLACK, below: int = 0, right: int = 0,
) -> None:  # fmt: skip
    from PIL import ImageFont

    x, y = place[0] + right * SMOOTH, place[1] + below * SMOOTH
    pen.text((x, y), text, colour, ImageFont.load_default(size * SMOOTH), anchor)
