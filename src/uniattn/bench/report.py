"""From records to numbers and text: ratios, means, cliffs, what moved since another run, and the table on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from uniattn.bench import recorded, sweep
from uniattn.bench.records import OURS, Report, Row

# Below this share a change is noise whatever the rounds say: two runs differ by more than two rounds do.
_MIN_MOVE = 0.02


@dataclass(frozen=True)
class Best:
    """The fastest peer on a row; `estimated` where its time is a recorded one, scaled (see `recorded`)."""

    us: float
    label: str
    estimated: bool


def best_peer(report: Report, row: Row) -> Best | None:
    """The fastest peer with a time, measured or estimated; None where no peer has one."""
    measured = [Best(us, report.labels[key], False) for key in report.peers() if (us := row.us(key)) is not None]
    estimated = [Best(us, recorded.LABELS[key], True) for key, us in estimates(report, row).items()]
    return min([*measured, *estimated], key=lambda best: best.us, default=None)


def estimates(report: Report, row: Row) -> dict[str, float]:
    """Microseconds of recorded peers on `row`, by key, where FlashAttention-3 was measured and they were not."""
    scale = row.us(recorded.SCALED_BY)
    if scale is None:
        return {}
    found = recorded.estimates(row.name, report.facts.get("card", ""), scale)
    return {key: us for key, us in found.items() if row.us(key) is None}


def ratio(report: Report, row: Row) -> float | None:
    """uniattn's time over the best peer's; below 1 is faster."""
    best, us = best_peer(report, row), row.us(OURS)
    return None if best is None or us is None else us / best.us


def share_of_floor(row: Row, key: str = OURS) -> float | None:
    """Floor over time: 1 is as fast as the card can be."""
    us = row.us(key)
    return None if not us else row.floor_us / us


def geomean(values: Iterable[float | None]) -> float | None:
    """Geometric mean of what is there; None of nothing."""
    there = [value for value in values if value]
    return math.exp(sum(map(math.log, there)) / len(there)) if there else None


def is_sweep(group: str) -> bool:
    """Is this group a curve of the sweep?"""
    return group.startswith(sweep.PREFIX)


@dataclass(frozen=True)
class Cliff:
    """A step along a curve where uniattn's time grows by more than the work explains."""

    group: str
    before: Row
    after: Row
    growth: float
    allowed: float


def cliffs(report: Report, key: str = OURS) -> list[Cliff]:
    """The cliffs of all sweep curves of one provider."""
    found = []
    for group in filter(is_sweep, report.groups()):
        points = [row for row in report.rows if row.group == group]
        for this, after in pairwise(sorted(points, key=lambda row: row.x or 0)):
            us, next_us = this.us(key), after.us(key)
            if us and next_us and sweep.is_cliff(us, next_us, this.floor_us, after.floor_us):
                allowed = sweep.SLACK * max(1.0, after.floor_us / this.floor_us)
                found.append(Cliff(group, this, after, next_us / us, allowed))
    return found


@dataclass(frozen=True)
class Move:
    """A time that changed between two runs by more than both runs' spreads together; `after_us` None: it lost its time."""

    row: str
    label: str
    before_us: float
    after_us: float | None

    @property
    def change(self) -> float | None:
        """Relative change, negative is faster."""
        return None if self.after_us is None else self.after_us / self.before_us - 1


def moves(old: Report, new: Report) -> list[Move]:
    """What moved from `old` to `new`, on rows of the same name, shape and lengths, by providers that ran in both."""
    before = {(row.name, row.shape, tuple(row.runs)): row for row in old.rows}
    found = []
    for row in new.rows:
        was_row = before.get((row.name, row.shape, tuple(row.runs)))
        for key, result in row.results.items():
            was = was_row.results.get(key) if was_row is not None else None
            if was is None or was.us is None:
                continue
            us = result.us
            noise = max(was.spread_us + result.spread_us, _MIN_MOVE * was.us)
            if us is None or abs(us - was.us) > noise:
                found.append(Move(row.name, new.labels[key], was.us, us))
    return found


def failures(report: Report) -> list[tuple[str, str, str]]:
    """`(row, label, why)` of every result that is wrong or failed; what a provider does not cover is no failure."""
    return [
        (row.name, report.labels[key], result.status)
        for row in report.rows
        for key, result in row.results.items()
        if result.status.startswith(("wrong", "failed"))
    ]


def failure_texts(report: Report) -> list[tuple[str, str, str]]:
    """`failures` as `(label, rows, why)`, rows where one provider fails in the same words told together."""
    rows: dict[tuple[str, str], list[str]] = {}
    for row, label, why in failures(report):
        rows.setdefault((label, why), []).append(row)
    return [
        (label, names[0] if len(names) == 1 else f"{len(names)} rows, the first {names[0]}", why)
        for (label, why), names in rows.items()
    ]


def us_text(us: float | None) -> str:
    """Microseconds with as many digits as a reader needs."""
    if us is None:
        return "-"
    return f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def cell(row: Row, key: str) -> str:
    """A provider's time on a row, or in one word why there is none."""
    result = row.results.get(key)
    if result is None:
        return ""
    return us_text(result.us) if result.us is not None else result.status.split(":")[0].upper().replace("NOT COVERED", "n/a")


def _number(value: float | None, form: str, missing: str = "-") -> str:
    return missing if value is None else form.format(value)


def table(report: Report) -> str:
    """The run as text: a table a group with its means, the cliffs, host times, failures and missing providers."""
    head = ["", "floor", *report.labels.values(), "spread", "of best peer", "of floor", "error"]
    lines: list[list[str]] = []
    named = [row for row in report.rows if not is_sweep(row.group)]
    for group in dict.fromkeys(row.group for row in named):
        rows = [row for row in named if row.group == group]
        lines.append([group])
        for row in rows:
            best, ours = best_peer(report, row), row.results.get(OURS)
            relative = _number(ratio(report, row), "{:.2f}") + ("*" if best is not None and best.estimated else " ")
            lines.append([
                f"  {row.name}", us_text(row.floor_us), *(cell(row, key) for key in report.labels),
                _number(ours.spread_us / ours.us if ours is not None and ours.us else None, "{:.1%}"),
                relative, _number(share_of_floor(row), "{:.0%}"), _number(ours.relative_error if ours else None, "{:.1e}"),
            ])  # fmt: skip
        means = [geomean(_against(report, row, key) for row in rows) for key in report.labels]
        lines.append([
            "  geometric mean, uniattn over", "", *(_number(None if key == OURS else mean, "{:.2f}", "")
            for key, mean in zip(report.labels, means, strict=True)), "",
            _number(geomean(ratio(report, row) for row in rows), "{:.2f}") + " ",
            _number(geomean(share_of_floor(row) for row in rows), "{:.0%}"), "",
        ])  # fmt: skip
    if named:
        lines.append(["all rows, geometric mean", "", *("" for _ in report.labels), "",
                      _number(geomean(ratio(report, row) for row in named), "{:.2f}") + " ",
                      _number(geomean(share_of_floor(row) for row in named), "{:.0%}"), ""])  # fmt: skip
    lines += _curves(report)
    widths = [max(len(line[i]) for line in [head, *lines] if i < len(line)) for i in range(len(head))]
    text = ["Microseconds; " + "; ".join(f"{name} {value}" for name, value in report.facts.items()), ""]
    for line in [head, *lines]:
        padded = [word.ljust(widths[i]) if i == 0 else word.rjust(widths[i]) for i, word in enumerate(line)]
        text.append("  ".join(padded).rstrip())
    return "\n".join([*text, "", *_notes(report)])


def _curves(report: Report) -> list[list[str]]:
    """A line a curve of the sweep: its points are for the page and the saved file."""
    lines = []
    for group in filter(is_sweep, report.groups()):
        rows = [row for row in report.rows if row.group == group]
        us = [[row.us(key) for row in rows] for key in report.labels]
        ends = [" - ".join(us_text(f(there)) for f in (min, max)) if (there := [x for x in one if x]) else "-" for one in us]
        errors = [r.relative_error for row in rows if (r := row.results.get(OURS)) and r.relative_error]
        lines.append([
            group, "", *ends, "", _number(geomean(ratio(report, row) for row in rows), "{:.2f}") + " ",
            _number(geomean(share_of_floor(row) for row in rows), "{:.0%}"), _number(max(errors, default=None), "{:.1e}"),
        ])  # fmt: skip
    return lines


def _against(report: Report, row: Row, key: str) -> float | None:
    ours, theirs = row.us(OURS), row.us(key)
    return None if ours is None or theirs is None or not theirs else ours / theirs


def _notes(report: Report) -> list[str]:
    lines = [
        f"Floor: {report.peak_flops / 1e12:.0f} TFLOP/s, {report.peak_bytes / 1e12:.2f} TB/s ({report.peak_source}).",
        "Spread: slowest less fastest round over the median. Error: relative norm against float64 on sampled tokens.",
    ]
    if any((best := best_peer(report, row)) is not None and best.estimated for row in report.rows):
        lines.append("*: the best peer's time is a recorded one, scaled by FlashAttention-3 now over then.")
    plans = [us for row in report.rows if (r := row.results.get(OURS)) is not None and (us := r.plan_us) is not None]
    if plans:
        lines.append(f"uniattn's plan, on the device: at most {max(plans):.1f} us.")
    lines += sorted({
        f"{report.labels[key]}'s plan fits in no CUDA graph: {result.plan_failure}"
        for row in report.rows for key, result in row.results.items() if result.plan_failure
    })  # fmt: skip
    for key, host in report.host.items():
        parts = [f"{host.run_us:.1f} us"]
        if host.unplanned_us is not None:
            parts.append(f"{host.unplanned_us:.1f} with its plan made in the call")
        if host.plan_us is not None:
            parts.append(f"{host.plan_us:.1f} the plan alone")
        lines.append(f"Host time of an eager call, {report.labels[key]}: {', '.join(parts)}.")
    if any(is_sweep(group) for group in report.groups()):
        found = cliffs(report)
        lines.append(f"Cliffs of uniattn in the sweep: {len(found) or 'none'}.")
        lines += [f"  {c.before.name} -> {c.after.x}: {c.growth:.2f} times, {c.allowed:.2f} allowed" for c in found]
    lines += [f"{label} on {rows}: {why}" for label, rows, why in failure_texts(report)]
    lines += [f"Not run: {label} ({why})" for label, why in report.missing.items()]
    return lines


def moves_text(found: list[Move], old: Report) -> str:
    """The moves as lines, or that there are none."""
    since = f"{old.facts.get('date', 'an earlier run')}, {old.facts.get('card', 'an unknown card')}"
    if not found:
        return f"Against {since}: nothing moved by more than the spread."
    width = max(len(move.row) for move in found)
    lines = [f"Against {since}, moved by more than the spread:"]
    for m in found:
        change = "no time any more" if m.change is None else f"{m.change:+.1%}"
        lines.append(f"  {m.row.ljust(width)}  {m.label}: {us_text(m.before_us)} -> {us_text(m.after_us)} us, {change}")
    return "\n".join(lines)
