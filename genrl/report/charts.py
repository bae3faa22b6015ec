"""Line charts as inline SVG: colours come from the page's style sheet, so one chart serves light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 16, 34
COLOURS = 8  # classes c0 .. c7 of the style sheet
Scale = Callable[[float], float]  # data -> drawing units
MAX_POINTS = 300  # more would only make the file large: neighbours are averaged


@dataclass(frozen=True)
class Series:
    """One line. `x` and `y` have the same length; NaN in `y` is a gap. `low`, `high`: an optional band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    colour: int = 0
    dashed: bool = False

    @property
    def has_values(self) -> bool:
        return any(math.isfinite(value) for value in self.y)


def number(value: float) -> str:
    """A float for a reader: three significant digits, `k` and `M` above ten thousand, powers of ten when tiny."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e15 or size < 1e-3:
        digits, power = f"{value:.2e}".split("e")
        return f"{digits}e{int(power)}".replace("-", "−")
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}".replace("-", "−")
    if size < 0.01:
        return f"{value:.3g}".replace("-", "−")
    if size >= 100:
        return f"{value:.0f}".replace("-", "−")
    text = f"{value:.3f}" if size < 1 else f"{value:.2f}"
    return (text if float(text) != int(float(text)) else str(int(float(text)))).replace("-", "−")


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "iteration",
    x_ticks: Sequence[tuple[float, str]] | None = None,
    descending: bool = False,
    references: Mapping[str, float] | None = None,
    note: str = "",
) -> str:
    """A `<figure>` with title, legend and chart; `""` if no series has a finite value.

    Args:
        x_ticks: (position, text) of the marks on the horizontal axis; chosen from the data if not given.
        descending: the horizontal axis falls from left to right, as t does while a sample is drawn.
        references: horizontal dotted lines with a label, e.g. the value of real data.
        note: a line under the chart.
    """
    shown = [_thin(one) for one in series if one.has_values]
    if not shown:
        return ""
    references = {label: value for label, value in (references or {}).items() if math.isfinite(value)}
    hidden = sum(not math.isfinite(value) for one in series for value in one.y)
    notes = [note] if note else []
    if hidden:
        notes.append(f"{hidden} value{'s are' if hidden > 1 else ' is'} not finite and not drawn.")
    if any(len(one.x) > MAX_POINTS for one in series):
        notes.append("Each point is the mean of neighbouring iterations.")

    xs = sorted({x for one in shown for x in one.x})
    x_low, x_high = (xs[0], xs[-1]) if xs[-1] > xs[0] else (xs[0] - 1, xs[0] + 1)
    bands = [list(band) for one in shown for band in (one.low, one.high) if band is not None]
    values = [v for part in [*(one.y for one in shown), *bands, references.values()] for v in part if math.isfinite(v)]
    y_low, y_high = _padded(min(values), max(values))

    def px(x: float) -> float:
        share = (x - x_low) / (x_high - x_low)
        return LEFT + (1 - share if descending else share) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = _y_axis(y_low, y_high, py)
    marks = x_ticks if x_ticks is not None else _x_marks(x_low, x_high, xs)
    for x, text in marks:
        if x_low <= x <= x_high:
            parts.append(_text("tick", px(x), HEIGHT - BOTTOM + 15, text, "middle"))
    parts.append(_text("axis", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, x_label, "middle"))
    for label, value in references.items():
        parts.append(_level("ref", py(value)))
        parts.append(_text("reftext", WIDTH - RIGHT, py(value) - 3, label, "end"))
    for one in shown:
        parts.append(_band(one, px, py))
    for one in shown:
        parts.append(_line(one, px, py))
    parts.append(_hover(shown, xs[::-1] if descending else xs, px, x_label, dict(x_ticks or ())))
    return _figure(title, shown, "".join(parts), " ".join(notes))


def _figure(title: str, series: Sequence[Series], body: str, note: str) -> str:
    legend = "".join(
        f'<span class="key c{one.colour % COLOURS}{" dash" if one.dashed else ""}"><i></i>{escape(one.label)}</span>'
        for one in series
    )
    foot = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption><div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>{foot}</figure>'
    )


def _thin(one: Series) -> Series:
    """At most MAX_POINTS points, each the mean of its neighbours' finite values."""
    if len(one.x) <= MAX_POINTS:
        return one
    size = math.ceil(len(one.x) / MAX_POINTS)

    def means(values: Sequence[float]) -> list[float]:
        blocks = [[v for v in values[i : i + size] if math.isfinite(v)] for i in range(0, len(values), size)]
        return [sum(block) / len(block) if block else math.nan for block in blocks]

    low, high = (means(band) if band is not None else None for band in (one.low, one.high))
    return Series(one.label, means(one.x), means(one.y), low, high, one.colour, one.dashed)


def _padded(low: float, high: float) -> tuple[float, float]:
    gap = high - low
    if gap <= 1e-9 * max(abs(low), abs(high)):
        gap = abs(high) or 1.0
    gap = max(gap, 1e-99)  # a subnormal span has no usable marks
    bottom, top = low - 0.07 * gap, high + 0.07 * gap
    # Room below zero would suggest that a share or a norm could be negative.
    return (0.0 if low >= 0 and bottom < 0 else bottom), (0.0 if high <= 0 and top > 0 and low < 0 else top)


def _nice_step(span: float, count: int) -> float:
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)


def _marks(low: float, high: float, step: float) -> list[float]:
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _x_marks(low: float, high: float, xs: Sequence[float]) -> list[tuple[float, str]]:
    step = _nice_step(high - low, 6)
    whole = all(x == int(x) for x in xs)
    marks = _marks(low, high, max(step, 1.0) if whole else step)
    return [(x, number(x) if abs(x) >= 1e4 else f"{x:.6g}") for x in marks]


def _y_axis(low: float, high: float, py: Scale) -> list[str]:
    step = _nice_step(high - low, 5)
    largest = max(abs(low), abs(high))
    power = math.floor(math.log10(largest)) if largest < 0.01 else 0
    decimals = min(6, max(0, -math.floor(math.log10(step / 10**power) + 1e-9)))
    parts = []
    for y in _marks(low, high, step):
        text = number(y) if largest >= 1e4 else f"{y / 10**power:.{decimals}f}".replace("-", "−")
        kind = "zero" if abs(y) < step / 1e6 else "grid"
        parts.append(_level(kind, py(y)))
        parts.append(_text("tick", LEFT - 6, py(y) + 3.5, text, "end"))
    if power:
        superscript = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        parts.append(_text("axis", LEFT, 9, f"×10{superscript}", "start"))
    return parts


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _level(kind: str, y: float) -> str:
    return f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _runs(one: Series, *columns: Sequence[float]) -> list[list[tuple[float, ...]]]:
    """Stretches of points whose columns are all finite."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for point in zip(one.x, *columns, strict=True):
        if all(math.isfinite(value) for value in point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _band(one: Series, px: Scale, py: Scale) -> str:
    if one.low is None or one.high is None:
        return ""
    parts = []
    for run in _runs(one, one.low, one.high):
        if len(run) == 1:  # a lone point gets an error bar
            x, low, high = run[0]
            where = f'x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{py(low):.1f}" y2="{py(high):.1f}"'
            parts.append(f'<line class="c{one.colour % COLOURS} bar" {where}/>')
            continue
        edge = [f"{px(x):.1f},{py(high):.1f}" for x, _, high in run]
        edge += [f"{px(x):.1f},{py(low):.1f}" for x, low, _ in reversed(run)]
        parts.append(f'<polygon class="c{one.colour % COLOURS} band" points="{" ".join(edge)}"/>')
    return "".join(parts)


def _line(one: Series, px: Scale, py: Scale) -> str:
    colour = f"c{one.colour % COLOURS}"
    parts = []
    for run in _runs(one, one.y):
        points = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in run)
        if len(run) > 1:
            parts.append(f'<polyline class="{colour} line{" dash" if one.dashed else ""}" points="{points}"/>')
        if len(one.x) <= 24 or len(run) == 1:
            parts += [f'<circle class="{colour} dot" cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.4"/>' for x, y in run]
    return "".join(parts)


def _hover(series: Sequence[Series], xs: Sequence[float], px: Scale, x_label: str, names: Mapping[float, str]) -> str:
    """Invisible stripes, one a point of the axis, whose title lists the values there."""
    lookup = [{x: i for i, x in enumerate(one.x)} for one in series]
    chosen = xs[:: max(1, math.ceil(len(xs) / 80))]
    edges = [LEFT, *((px(a) + px(b)) / 2 for a, b in pairwise(chosen)), WIDTH - RIGHT]
    parts = []
    for i, x in enumerate(chosen):
        lines = [f"{x_label}: {names.get(x) or number(x)}"]
        for one, index in zip(series, lookup, strict=True):
            if (j := index.get(x)) is None:
                continue
            extent = ""
            if one.low is not None and one.high is not None:
                extent = f" [{number(one.low[j])}, {number(one.high[j])}]"
            lines.append(f"{one.label}: {number(one.y[j])}{extent}")
        width = max(edges[i + 1] - edges[i], 0.1)
        parts.append(
            f'<g class="hit"><rect x="{edges[i]:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
            f'<line x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f"<title>{escape(chr(10).join(lines))}</title></g>"
        )
    return "".join(parts)
