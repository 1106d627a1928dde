"""Small pictures for the report: lines over time, and histograms, as inline SVG.

Written by hand because a plotting library would weigh more than the report and bring its own fonts, scripts
and years of change; what is drawn here are a few rectangles and lines. Every text goes through `Markup`'s
escaping. Colours are classes of the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from batchgen.grammar import counted
from batchgen.text.visible import visible_line

WIDTH, HEIGHT = 380, 168
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 30
_X1, _Y1 = WIDTH - RIGHT, HEIGHT - BOTTOM


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a picture.

    Args:
        label: its name, which the caption shows in its colour; empty where the title says it.
        points: (x, y); None for y breaks the line.
        kind: CSS class: a or b.
    """

    label: str
    points: Sequence[tuple[float, float | None]]
    kind: str = "a"


def short_number(value: float) -> str:
    """`950`, `1.2k`, `34M`: at most four characters for an axis."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            scaled = value / limit
            return f"{scaled:.0f}{unit}" if scaled >= 10 or scaled == int(scaled) else f"{scaled:.1f}{unit}"
    if value >= 10 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.2g}"


def percent(value: float) -> str:
    """`35%`."""
    return f"{100 * value:.0f}%"


def duration(seconds: float) -> str:
    """`850 ms`, `3.5 s`, `12 s`, `1 min 5 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{float(f'{1000 * seconds:.3g}' if seconds >= 0.1 else f'{1000 * seconds:.2g}'):g} ms"
    if round(seconds) < 60:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{float(f'{seconds:.2g}'):g} s"
    for whole, part, unit, smaller in ((86_400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if round(seconds / part) * part >= whole:
            big, rest = divmod(round(seconds / part), whole // part)
            return f"{big} {unit} {rest} {smaller}" if rest else f"{big} {unit}"
    return f"{seconds:.0f} s"


def nice_ceiling(value: float) -> float:
    """Where an axis ends that must hold `value`: a round number whose half is round too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        step * power for step in (1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10) if step * power >= value * (1 - 1e-9)
    )


def line_plot(
    title: str,
    lines: Sequence[Line],
    *,
    seconds: float,
    boundaries: Sequence[tuple[str, float]] = (),
    top: float | None = None,
    show: Callable[[float], str] = short_number,
) -> Markup:
    """Lines over the time of all attempts.

    Args:
        title: says what and in which unit.
        lines: at most two.
        seconds: end of the x axis.
        boundaries: (label, x) of vertical marks, where another attempt begins.
        top: end of the y axis; None: what the data ask for.
        show: a value of the y axis as text.
    """
    known = [y for line in lines for _, y in line.points if y is not None]
    top = nice_ceiling(max(known, default=0.0)) if top is None else top
    seconds = max(seconds, 1e-9)

    def x(value: float) -> float:
        return LEFT + (_X1 - LEFT) * min(value / seconds, 1.0)

    def y(value: float) -> float:
        return _Y1 - (_Y1 - TOP) * min(value / top, 1.0)

    body = _y_axis([0, top / 2, top], y, show)
    body += _x_labels([(x(at), duration(at)) for at in (0.0, seconds / 2, seconds)], "time of all attempts")
    for label, at in boundaries:
        body += Markup('<line class="mark" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>').format(_f(x(at)), TOP, _Y1)
        body += _text(x(at) + 2, TOP - 4, label, "tiny")
    for line in lines:
        body += _path([(x(at), None if value is None else y(value)) for at, value in line.points], line.kind)
    return _svg(title, body, None if known else "not known", [line for line in lines if line.label])


def histogram_plot(
    title: str,
    bars: Sequence[tuple[float, float, int]],
    *,
    unit: str,
    show: Callable[[float], str] = short_number,
) -> Markup:
    """A histogram on a logarithmic x axis.

    Args:
        title: says of what.
        bars: (from, up to, count) without gaps.
        unit: of the x axis.
        show: a value of the x axis as text.
    """
    if not bars:
        return _svg(title, Markup(), "not known")
    top = nice_ceiling(max(count for *_, count in bars))
    wide = (_X1 - LEFT) / max(len(bars), 8)

    def y(value: float) -> float:
        return _Y1 - (_Y1 - TOP) * value / top

    body = _y_axis([0, top / 2, top], y, short_number)
    for number, (low, high, count) in enumerate(bars):
        if count:
            height = max(1.0, _Y1 - y(count))
            body += Markup(
                '<rect class="bar" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
            ).format(
                _f(LEFT + number * wide + 0.5),
                _f(_Y1 - height),
                _f(max(wide - 1, 0.5)),
                _f(height),
                f"{show(low)} to {show(high)} {unit}: {counted(count, 'row')}",
            )
    # Edges that are powers of two are the round ones.
    round_edges = [n for n, bar in enumerate(bars) if math.log2(bar[0]).is_integer()]
    every = max(1, math.ceil(len(round_edges) / 6))
    edges = [(LEFT + n * wide, show(bars[n][0])) for n in round_edges[::every]]
    body += _x_labels(edges, unit, centred=True)
    body += _text(LEFT, TOP - 4, "rows", "tiny")
    return _svg(title, body, None)


def _svg(title: str, body: Markup, missing: str | None, named: Sequence[Line] = ()) -> Markup:
    if missing is not None:
        body += _text((LEFT + _X1) / 2, (TOP + _Y1) / 2, missing, "middle")
    caption = Markup("{}").format(visible_line(title))
    for line in named:
        caption += Markup(' <span class="{}">{}</span>').format(line.kind, visible_line(line.label))
    return Markup(
        '<figure><figcaption>{}</figcaption><svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
        "</figure>"
    ).format(caption, WIDTH, HEIGHT, visible_line(title), body)


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(kind, _f(x), _f(y), visible_line(text))


def _y_axis(ticks: Sequence[float], y: Callable[[float], float], show: Callable[[float], str]) -> Markup:
    body = Markup()
    for tick in ticks:
        body += Markup('<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>').format(
            LEFT, _X1, _f(y(tick))
        )
        body += _text(LEFT - 5, y(tick) + 3.5, show(tick), "end")
    return body


def _x_labels(ticks: Sequence[tuple[float, str]], unit: str, *, centred: bool = False) -> Markup:
    body = Markup()
    for number, (x, label) in enumerate(ticks):
        last = number == len(ticks) - 1 and not centred
        kind = "start" if number == 0 and not centred else "end" if last else "middle"
        body += _text(x, _Y1 + 13, label, kind)
    return body + _text(_X1, HEIGHT - 3, unit, "end tiny")


def _path(points: Sequence[tuple[float, float | None]], kind: str) -> Markup:
    """A line, broken where nothing is known, over a light area."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    body = Markup()
    for piece in filter(None, pieces):
        if len(piece) == 1:
            body += Markup('<circle class="dot {}" cx="{}" cy="{}" r="1.5"/>').format(
                kind, *map(_f, piece[0])
            )
            continue
        steps = " ".join(f"{_f(x)},{_f(y)}" for x, y in piece)
        area = f"{_f(piece[0][0])},{_f(_Y1)} {steps} {_f(piece[-1][0])},{_f(_Y1)}"
        body += Markup(
            '<polygon class="area {0}" points="{1}"/><polyline class="line {0}" points="{2}"/>'
        ).format(kind, area, steps)
    return body


def _f(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
