"""The plots of the page, each a pure function of the records."""

from __future__ import annotations

import math

from uniattn.bench import recorded, svg
from uniattn.bench.records import OURS, Report, Row
from uniattn.bench.report import best_peer, cliffs, estimates, share_of_floor, us_text
from uniattn.bench.sweep import axis_of

WIDTH = 1060
_LABEL_WIDTH, _BAR, _GAP, _ROW_GAP = 300, 17, 3, 15
# Times beyond this many times the best peer's are cut off, so that one slow peer does not flatten all others.
_MAX_RATIO = 2.6


def color(key: str) -> str:
    """A provider's colour, defined by the style sheet for light and dark."""
    return f"var(--p-{key})"


def estimated_labels(report: Report) -> dict[str, str]:
    """Recorded providers that are estimated on some row, key to label."""
    guessed = {key for row in report.rows for key in estimates(report, row)}
    return {key: f"{label} (recorded, scaled)" for key, label in recorded.LABELS.items() if key in guessed}


def bars(report: Report, rows: list[Row]) -> str:
    """Time of each provider on each row over the best peer's (over the floor where no peer has a time), the time at each bar."""
    x0, x1 = _LABEL_WIDTH + 12, WIDTH - 118
    parts: list[str] = []
    y = 26.0
    for row in rows:
        entries = _entries(report, row)
        best = best_peer(report, row)
        unit = best.us if best is not None else row.floor_us
        height = len(entries) * (_BAR + _GAP) - _GAP
        share, spread = share_of_floor(row), _spread(row)
        parts.append(svg.text(_LABEL_WIDTH, y + height / 2 - 2, row.name, class_="name", text_anchor="end"))
        below = f"floor {us_text(row.floor_us)} µs" + (f" · {share:.0%} of it reached" if share else "")
        parts.append(svg.text(_LABEL_WIDTH, y + height / 2 + 13, below, class_="sub", text_anchor="end"))
        for key, label, us, status in entries:
            tip = f"{row.name}, {label}" + (spread if key == OURS else "")
            parts.append(_bar(key, label, us, status, unit, (x0, x1), y, tip))
            y += _BAR + _GAP
        floor_x = x0 + min(row.floor_us / unit / _MAX_RATIO, 1) * (x1 - x0)
        tick = svg.line(floor_x, y - height - _GAP - 3, floor_x, y - _GAP + 3, class_="floor")
        parts.append(tick.replace("></line>", f">{svg.title(f'floor {us_text(row.floor_us)} µs')}</line>"))
        y += _ROW_GAP
    height = int(y)
    grid = []
    for ratio in (0.5, 1.0, 1.5, 2.0, 2.5):
        x = x0 + ratio / _MAX_RATIO * (x1 - x0)
        grid.append(svg.line(x, 18, x, height - 6, class_="one" if ratio == 1 else "grid"))
        words = "best peer" if ratio == 1 and any(best_peer(report, row) for row in rows) else f"{ratio:g}x"
        grid.append(svg.text(x, 11, words, class_="tick", text_anchor="middle"))
    return svg.drawing(WIDTH, height, *grid, *parts, label="time of each provider over the best peer's")


def _entries(report: Report, row: Row) -> list[tuple[str, str, float | None, str]]:
    """`(key, label, us, status)` of every bar of a row; a status of `estimated` is a recorded time, scaled."""
    found = []
    for key, label in report.labels.items():
        result = row.results.get(key)
        if result is not None and not result.status.startswith("not covered"):
            found.append((key, label, result.us, result.status))
    return found + [(key, recorded.LABELS[key], us, "estimated") for key, us in estimates(report, row).items()]


def _spread(row: Row) -> str:
    result = row.results.get(OURS)
    return f", rounds {', '.join(f'{us:.1f}' for us in result.rounds_us)}" if result is not None and result.rounds_us else ""


def _bar(key: str, label: str, us: float | None, status: str, unit: float, span: tuple[float, float], y: float, tip: str) -> str:
    x0, x1 = span
    middle = y + _BAR / 2 + 4
    if us is None:
        words = svg.text(x0 + 4, middle, f"{label}: {status.split(':')[0]}", class_="bad")
        return svg.element("g", svg.title(f"{tip}: {status}"), words)
    ratio = us / unit
    width = max(min(ratio / _MAX_RATIO, 1) * (x1 - x0), 1.5)
    guess = status == "estimated"
    kind = "bar guess" if guess else "bar ours" if key == OURS else "bar"
    number = f"{'≈ ' if guess else ''}{us_text(us)}"
    parts = [
        svg.title(f"{tip}: {number} µs, {ratio:.2f} of the reference"),
        svg.element("rect", x=x0, y=y, width=width, height=_BAR, rx=2.5, class_=kind, style=f"--c:{color(key)}"),
    ]
    if ratio > _MAX_RATIO:
        # A gap near the end says that the bar goes on.
        cut = f"M{x1 - 16:.1f},{y - 1:.1f} l6,{_BAR + 2} M{x1 - 11:.1f},{y - 1:.1f} l6,{_BAR + 2}"
        parts.append(svg.element("path", d=cut, class_="cut"))
    number += f" ({ratio:.1f}x)" if ratio > _MAX_RATIO else ""
    parts.append(svg.text(x0 + width + 6, middle, number, class_="value strong" if key == OURS else "value"))
    return svg.element("g", *parts)


_SHAPES = {"decode": "circle", "skew": "circle", "prefill": "square", "mixed": "diamond", "spec": "triangle"}


def shape_of(group: str) -> str:
    """The mark of a group's points in the roofline plot."""
    return _SHAPES.get(group, "cross")


def roofline(report: Report, rows: list[Row]) -> str:
    """Achieved TFLOP/s over FLOPs a byte, under the card's two roofs, one mark a provider and row."""
    points = [(row, key, us) for key in reversed(report.labels) for row in rows if (us := row.us(key))]
    if not points:
        return ""
    height, ridge = 500, report.peak_flops / report.peak_bytes
    intensities = [row.flops / row.bytes for row in rows]
    low, high = svg.padded(min(*intensities, ridge / 4), max(*intensities, ridge * 4))
    rates = [row.flops / us / 1e6 for row, _, us in points]
    bottom, top = min(rates) / 1.6, report.peak_flops / 1e12 * 1.5
    x, y = svg.Log(low, high, 66, WIDTH - 20), svg.Log(bottom, top, height - 46, 24)
    parts = _axes(x, y, height, "FLOPs a byte", "TFLOP/s")
    peak = report.peak_flops / 1e12
    start = max(low, bottom * 1e12 / report.peak_bytes)
    roof = [(x(start), y(start * report.peak_bytes / 1e12)), (x(ridge), y(peak)), (x(high), y(peak))]
    parts.append(svg.polyline(roof, class_="roof"))
    parts.append(svg.text(x(high) - 6, y(peak) - 7, f"{peak:.0f} TFLOP/s", class_="sub", text_anchor="end"))
    (ax, ay), (bx, by), _ = roof
    slope = math.degrees(math.atan2(by - ay, bx - ax))
    at = (ax + 0.22 * (bx - ax), ay + 0.22 * (by - ay) - 8)
    words = f"{report.peak_bytes / 1e12:.1f} TB/s"
    parts.append(svg.text(*at, words, class_="sub", transform=f"rotate({slope:.1f} {at[0]:.1f} {at[1]:.1f})"))
    for row, key, us in points:
        rate, bandwidth, share = row.flops / us / 1e6, row.bytes / us / 1e6, row.floor_us / us
        tip = f"{row.name}, {report.labels[key]}: {us_text(us)} µs, {rate:,.1f} TFLOP/s, {bandwidth:.2f} TB/s"
        tip += f", {share:.0%} of floor"
        kind = "mark ours" if key == OURS else "mark"
        parts.append(mark(shape_of(row.group), x(row.flops / row.bytes), y(rate), kind, key, tip))
    return svg.drawing(WIDTH, height, *parts, label="roofline: achieved arithmetic over arithmetic intensity")


def mark(shape: str, x: float, y: float, kind: str, key: str | None, tip: str = "") -> str:
    """A point of one of five shapes, about 10 pixels large."""
    corners = {
        "square": "M-4.4,-4.4h8.8v8.8h-8.8z",
        "diamond": "M0,-6.2L6.2,0L0,6.2L-6.2,0z",
        "triangle": "M0,-5.8L5.8,4.6H-5.8z",
        "cross": "M-5,-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
        "circle": "M-5,0a5,5 0 1 0 10,0a5,5 0 1 0 -10,0z",
    }
    style = f"--c:{color(key)}" if key else None
    where = f"translate({x:.1f} {y:.1f})"
    return svg.element("path", svg.title(tip) if tip else "", d=corners[shape], transform=where, class_=kind, style=style)


def _axes(x: svg.Log, y: svg.Log, height: int, x_name: str, y_name: str, x_ticks: list[float] | None = None) -> list[str]:
    parts = []
    for value in x_ticks or x.ticks():
        parts.append(svg.line(x(value), y.begin, x(value), y.end, class_="grid"))
        parts.append(svg.text(x(value), y.begin + 16, svg.short(value), class_="tick", text_anchor="middle"))
    for value in y.ticks():
        parts.append(svg.line(x.begin, y(value), x.end, y(value), class_="grid"))
        parts.append(svg.text(x.begin - 7, y(value) + 4, svg.short(value), class_="tick", text_anchor="end"))
    parts.append(svg.text((x.begin + x.end) / 2, height - 6, x_name, class_="axis", text_anchor="middle"))
    parts.append(svg.text(4, 11, y_name, class_="axis"))
    return parts


def curve(report: Report, group: str) -> str:
    """Time along one axis of the sweep: a line a provider, the floor dashed, uniattn's cliffs circled."""
    width, height = 360, 250
    rows = sorted((row for row in report.rows if row.group == group), key=lambda row: row.x or 0)
    times = [us for row in rows for key in report.labels if (us := row.us(key))]
    if len(rows) < 2 or not times:
        return ""
    xs = [float(row.x or 1) for row in rows]
    x = svg.Log(*svg.padded(xs[0], xs[-1], 0.03), 44, width - 10)
    # Every plot starts at 1 us at least: below that lies nothing but a launch's time.
    y = svg.Log(max(1.0, min(min(times), min(row.floor_us for row in rows)) / 1.3), max(times) * 1.3, height - 40, 26)
    axis = axis_of(group)
    names = {"batch": "sequences", "query": "query tokens a sequence", "context": "KV tokens a sequence"}
    wanted = [float(v) for v in (1, 2, 4, 8, 16, 32, 64, 512, 2048, 8192, 32768, 131072) if xs[0] <= v <= xs[-1]]
    parts = _axes(x, y, height, names.get(axis, axis), "µs", wanted)
    floor = [(x(value), y(max(row.floor_us, y.low))) for value, row in zip(xs, rows, strict=True)]
    parts.append(svg.polyline(floor, class_="floor dashed"))
    for key in reversed(report.labels):
        points = [(x(value), y(us), us) for value, row in zip(xs, rows, strict=True) if (us := row.us(key))]
        kind = "curve ours" if key == OURS else "curve"
        parts.append(svg.polyline([(px, py) for px, py, _ in points], class_=kind, style=f"--c:{color(key)}"))
        radius, style = 2.2 if key == OURS else 1.6, f"--c:{color(key)}"
        for px, py, us in points:
            tip = svg.title(f"{report.labels[key]}: {us_text(us)} µs")
            parts.append(svg.element("circle", tip, cx=px, cy=py, r=radius, class_="dot", style=style))
    for cliff in cliffs(report):
        if cliff.group == group:
            us = cliff.after.us(OURS)
            assert us is not None
            tip = svg.title(f"{cliff.growth:.2f} times the point before, {cliff.allowed:.2f} allowed")
            parts.append(svg.element("circle", tip, cx=x(float(cliff.after.x or 1)), cy=y(us), r=7.0, class_="cliff"))
    return svg.drawing(width, height, *parts, label=f"time along {group}")
