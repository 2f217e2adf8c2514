"""Line charts and stacked bars as SVG text, for inline use in a page; needs no library."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a6d00", "#6a51a3")
"""Colours that colour-blind readers can distinguish (Okabe and Ito), on white and on black."""
FONT = "font-family='system-ui, sans-serif'"
HEIGHT, TOP, BOTTOM, LEFT = 320, 44, 52, 66
WIDTH, LEGEND = 430, 150
BAR, BAR_GAP, GROUP_GAP = 30, 8, 26
MAX_TICKS = 8


@dataclass(frozen=True)
class Series:
    """A line: (x, y) by ascending x. `ideal` ones are dashed, grey and without markers."""

    name: str
    values: Sequence[tuple[float, float]]
    ideal: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar of stacked parts (name, value), from the bottom up; `mark` is a value drawn beside the stack."""

    label: str
    parts: Sequence[tuple[str, float]]
    mark: float | None = None


@dataclass(frozen=True)
class Axis:
    """The scale of the y axis, and its ticks."""

    place: Callable[[float], float]
    ticks: list[float]


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series], *, log_base: int | None = None) -> str:
    """Lines over numbers of devices, on a logarithmic axis; so are the values with `log_base` 2 or 10."""
    xs = sorted({x for line in series for x, _ in line.values})
    ys = [y for line in series for _, y in line.values]
    left, right = LEFT, LEFT + WIDTH - 90
    axis = _log_axis(ys, log_base) if log_base is not None and min(ys) > 0 else _linear_axis(max(ys))
    low, high = math.log2(xs[0]), math.log2(xs[-1])

    def x_place(x: float) -> float:
        if high == low:
            return (left + right) / 2
        return left + 24 + (math.log2(x) - low) / (high - low) * (right - left - 48)

    parts = [*_frame(axis, left, right, y_label)]
    parts += [_text(x_place(x), HEIGHT - BOTTOM + 18, f"{x:g}", anchor="middle") for x in xs]
    parts.append(_text((left + right) / 2, HEIGHT - 12, x_label, anchor="middle"))
    entries = []
    coloured = [line for line in series if not line.ideal]
    for line in series:
        colour = "currentColor" if line.ideal else COLOURS[coloured.index(line) % len(COLOURS)]
        places = [(x_place(x), axis.place(y)) for x, y in line.values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        style = "stroke-dasharray='5 4' stroke-opacity='.55' stroke-width='1.5'" if line.ideal else "stroke-width='2'"
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' {style}/>")
        if not line.ideal:
            parts += [
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{colour}'>{_hover(f'{line.name}, {at[0]:g}: {_short(at[1])}')}</circle>"
                for (x, y), at in zip(places, line.values, strict=True)
            ]
        entries.append((line.name, colour, line.ideal))
    parts += _legend(entries, right + 14)
    return _svg(title, right + LEGEND, parts)


def stacked_bars(
    title: str,
    y_label: str,
    groups: Sequence[tuple[str, Sequence[Bar]]],
    *,
    colour: Mapping[str, str],
    mark_name: str | None = None,
) -> str:
    """Groups of bars with labels below and totals above. `colour`: of each part; `mark_name`: the name of the marks."""
    names = list(dict.fromkeys(name for _, bars in groups for bar in bars for name, _ in bar.parts))
    tallest = max(sum(value for _, value in bar.parts) for _, bars in groups for bar in bars)
    marks = [bar.mark for _, bars in groups for bar in bars if bar.mark is not None]
    axis = _linear_axis(max([tallest, *marks]) * 1.06)
    x = LEFT + GROUP_GAP / 2
    drawn = []
    for label, bars in groups:
        start = x
        for bar in bars:
            drawn += _stack(bar, x, axis, colour)
            x += BAR + BAR_GAP
        drawn.append(_text((start + x - BAR_GAP) / 2, HEIGHT - 14, label, anchor="middle"))
        x += GROUP_GAP - BAR_GAP
    right = max(x - GROUP_GAP / 2, LEFT + 120)
    parts = [*_frame(axis, LEFT, right, y_label), *drawn]
    entries = [(name, colour[name], False) for name in reversed(names)]
    if mark_name is not None and marks:
        entries.append((mark_name, "mark", False))
    parts += _legend(entries, right + 14)
    return _svg(title, right + LEGEND, parts)


def as_file(svg: str) -> str:
    """A chart as the text of an .svg file, black on white wherever it is shown."""
    head, rest = svg.split(">", 1)
    title = rest.index("</title>") + len("</title>")
    return f"{head}>{rest[:title]}<rect width='100%' height='100%' fill='#fff'/><g color='#000'>{rest[title:-6]}</g></svg>\n"


def _stack(bar: Bar, x: float, axis: Axis, colour: Mapping[str, str]) -> list[str]:
    parts, below = [], 0.0
    for name, value in bar.parts:
        top, bottom = axis.place(below + value), axis.place(below)
        below += value
        parts.append(
            f"<rect x='{x:.1f}' y='{top:.1f}' width='{BAR}' height='{bottom - top:.1f}' fill='{colour[name]}'>"
            f"{_hover(f'{bar.label}, {name}: {_short(value)}')}</rect>"
        )
    parts.append(_text(x + BAR / 2, axis.place(below) - 5, _short(below), anchor="middle", size=10))
    if bar.mark is not None:
        y = axis.place(bar.mark)
        parts.append(
            f"<path d='M{x - 4:.1f} {y:.1f}h{BAR + 8}' stroke='currentColor' stroke-width='2' stroke-dasharray='3 2'>"
            f"{_hover(f'{bar.label}: {_short(bar.mark)}')}</path>"
        )
    parts.append(_text(x + BAR / 2, HEIGHT - BOTTOM + 17, bar.label, anchor="middle"))
    return parts


def _frame(axis: Axis, left: float, right: float, y_label: str) -> list[str]:
    parts = []
    for tick in axis.ticks:
        y = axis.place(tick)
        parts.append(f"<path d='M{left} {y:.1f}H{right:.1f}' stroke='currentColor' stroke-opacity='.16'/>")
        parts.append(_text(left - 7, y + 4, _short(tick), anchor="end"))
    parts.append(
        f"<path d='M{left} {TOP}V{HEIGHT - BOTTOM}H{right:.1f}' fill='none' stroke='currentColor' stroke-opacity='.6'/>"
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f"<text transform='translate(15 {middle}) rotate(-90)' text-anchor='middle' font-size='12' fill='currentColor'>"
        f"{escape(y_label)}</text>"
    )
    return parts


def _legend(entries: Sequence[tuple[str, str, bool]], x: float) -> list[str]:
    parts = []
    for i, (name, colour, is_ideal) in enumerate(entries):
        y = TOP + 6 + i * 19
        if colour == "mark" or is_ideal:
            dash = "3 2" if colour == "mark" else "5 4"
            parts.append(f"<path d='M{x} {y}h14' stroke='currentColor' stroke-width='2' stroke-dasharray='{dash}'/>")
        else:
            parts.append(f"<rect x='{x}' y='{y - 6}' width='14' height='12' rx='2' fill='{colour}'/>")
        parts.append(_text(x + 20, y + 4, name))
    return parts


def _svg(title: str, width: float, parts: Sequence[str]) -> str:
    heading = f"<text x='{LEFT}' y='20' font-size='14' font-weight='600' fill='currentColor'>{escape(title)}</text>"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {HEIGHT}' width='{width:.0f}' height='{HEIGHT}' "
        f"role='img' {FONT}><title>{escape(title)}</title>{heading}{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' fill='currentColor'>{escape(text)}</text>"


def _hover(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _linear_axis(highest: float) -> Axis:
    """From zero to a round number."""
    highest = highest if highest > 0 else 1.0
    step = 10 ** math.floor(math.log10(highest / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if highest / (step * factor) <= 5)
    count = math.ceil(highest / step - 1e-9)
    span = HEIGHT - BOTTOM - TOP
    return Axis(lambda y: HEIGHT - BOTTOM - y / (count * step) * span, [i * step for i in range(count + 1)])


def _log_axis(ys: Sequence[float], base: int) -> Axis:
    """Ticks around the values: 1, 2 and 5 times powers of ten (only the powers if there are many), or powers of two."""
    factors = (1, 2, 5) if base == 10 else (1,)
    exponents = range(math.floor(math.log(min(ys), base)) - 1, math.ceil(math.log(max(ys), base)) + 2)
    known = [float(base) ** exponent * factor for exponent in exponents for factor in factors]
    low = max(tick for tick in known if tick <= min(ys) * (1 + 1e-9))
    high = min(tick for tick in known if tick >= max(ys) * (1 - 1e-9) and tick > low)
    ticks = [tick for tick in known if low <= tick <= high]
    if len(ticks) > MAX_TICKS:
        powers = {float(base) ** exponent for exponent in exponents}
        ticks = [tick for tick in ticks if tick in powers or tick in (low, high)]
    span = HEIGHT - BOTTOM - TOP
    return Axis(lambda y: HEIGHT - BOTTOM - math.log(y / low) / math.log(high / low) * span, ticks)


def _short(value: float) -> str:
    """`2M`, `12k`, `1.5`, `0.02`"""
    if abs(value) >= 1_000_000:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 10_000:
        return f"{value / 1000:.0f}k"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
