"""One self-contained page of a run: no scripts, nothing fetched, light and dark by the reader's own setting."""

from __future__ import annotations

from html import escape
from pathlib import Path

from uniattn.bench import plots
from uniattn.bench.records import OURS, Report, Row
from uniattn.bench.report import (
    Move,
    best_peer,
    cell,
    cliffs,
    estimates,
    failure_texts,
    geomean,
    is_sweep,
    ratio,
    share_of_floor,
    us_text,
)
from uniattn.bench.svg import element
from uniattn.bench.sweep import AXES, SLACK, axis_of

_STYLE = Path(__file__).with_name("style.css")


def page(report: Report, moved: list[Move] | None = None) -> str:
    """The run as HTML. `moved` is what `report.moves` found against an earlier run, None where there was none."""
    rows = [row for row in report.rows if not is_sweep(row.group)]
    card = report.facts.get("card", "unknown card")
    body = [
        element("header", element("h1", "uniattn bench"), element("p", _facts(report), class_="facts")),
        _tiles(report, rows),
        _failures(report),
        _bars(report, rows),
        _roofline(report, rows),
        _sweep(report),
        _host(report),
        _moves(moved),
        _details(report, rows),
        _method(report),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>uniattn bench · {escape(card)}</title><style>{_STYLE.read_text()}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(body)}</main></body></html>\n'


def _facts(report: Report) -> str:
    first = [escape(report.facts[name]) for name in ("card", "date") if name in report.facts]
    rest = [f"{name} {escape(value)}" for name, value in report.facts.items() if name not in ("card", "date")]
    return " · ".join([*(f"<b>{text}</b>" for text in first), *rest])


def _tiles(report: Report, rows: list[Row]) -> str:
    """The run in a few large numbers: over the best peer for each group and for all."""
    found = [("all rows", rows)] + [(name, [row for row in rows if row.group == name]) for name in _groups(rows)]
    if len(found) == 2:
        del found[0]
    parts = []
    for name, those in found:
        mean, share = geomean(ratio(report, row) for row in those), geomean(share_of_floor(row) for row in those)
        if mean is None and share is None:
            continue
        large, words = (f"{mean:.2f}x", "of the best peer's time") if mean is not None else (f"{share:.0%}", "of floor")
        kind = "" if mean is None else " good" if mean <= 1 else " slow"
        below = f"{words}<br>" + (f"{share:.0%} of floor · " if mean is not None and share is not None else "")
        below += f"{len(those)} row{'s' * (len(those) != 1)}"
        parts.append(_tile(name, large, below, kind))
    plans = [us for row in rows if (r := row.results.get(OURS)) is not None and (us := r.plan_us) is not None]
    host = report.host.get(OURS)
    if host is not None:
        below = "of host time an eager call" + (f"<br>its plan ≤ {max(plans):.1f} µs on the device" if plans else "")
        parts.append(_tile("launch", f"{host.run_us:.1f} µs", below))
    return element("section", *parts, class_="tiles") if parts else ""


def _tile(name: str, number: str, below: str, kind: str = "") -> str:
    inside = element("h2", escape(name)), element("div", number, class_="number"), element("p", below)
    return element("div", *inside, class_=f"tile{kind}")


def _groups(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.group for row in rows))


def _section(title: str, words: str, *parts: str, kind: str | None = None) -> str:
    return element("section", element("h2", title), element("p", words) if words else "", *parts, class_=kind)


def _table(head: list[str], lines: list[str]) -> str:
    """`head` holds column names, numbers under all but the first; `lines` are rows as HTML."""
    names = "".join(f"<th>{name}</th>" for name in head)
    inside = f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return element("div", inside, class_="scroll")


def _failures(report: Report) -> str:
    found = failure_texts(report)
    if not found:
        return ""
    items = [element("li", f"<b>{escape(label)}</b> on {escape(rows)}: {escape(why)}") for label, rows, why in found]
    return _section("Without a time: wrong or failed", "", element("ul", *items), kind="alert")


def _legend(labels: dict[str, str], *extra: str) -> str:
    return element("p", *_swatches(labels, "swatch"), *extra, class_="legend")


def _swatches(labels: dict[str, str], kind: str) -> list[str]:
    return [f'<span><i class="{kind}" style="--c:{plots.color(key)}"></i>{escape(label)}</span>' for key, label in labels.items()]


def _bars(report: Report, rows: list[Row]) -> str:
    parts = []
    for group in _groups(rows):
        those = [row for row in rows if row.group == group]
        parts.append(element("figure", element("h3", escape(group)), plots.bars(report, those)))
    if not parts:
        return ""
    than = "the best peer's" if any(best_peer(report, row) for row in rows) else "the floor"
    words = f"Time over {than}; shorter is faster. Microseconds at the bars."
    extra = [*_swatches(plots.estimated_labels(report), "swatch guess"), '<span><i class="tickmark"></i>floor</span>']
    return _section("Each batch", words, _legend(report.labels, *extra), *parts)


def _roofline(report: Report, rows: list[Row]) -> str:
    plot = plots.roofline(report, rows)
    if not plot:
        return ""
    marks = []
    for group in _groups(rows):
        inner = plots.mark(plots.shape_of(group), 8, 8, "mark plain", None)
        marks.append(f'<span><svg class="key" viewBox="0 0 16 16">{inner}</svg>{escape(group)}</span>')
    words = (
        "What each call achieves under the card's two roofs, bandwidth on the left and arithmetic on the right. Point at a mark "
        "to see its row."
    )
    return _section("Roofline", words, _legend(report.labels, *marks), element("figure", plot))


def _sweep(report: Report) -> str:
    # Curves along one axis side by side.
    groups = sorted(filter(is_sweep, report.groups()), key=lambda group: AXES.index(axis_of(group)))
    if not groups:
        return ""
    figures = []
    for group in groups:
        name = f"{axis_of(group)}: {group.split(': ')[-1]}"
        figures.append(element("figure", element("h3", escape(name)), plots.curve(report, group)))
    measured = {
        key: label for key, label in report.labels.items() if any(row.us(key) for row in report.rows if is_sweep(row.group))
    }
    found = cliffs(report)
    count = f"{len(found)} cliff{'s' * (len(found) != 1)} of uniattn's, circled" if found else "No cliff of uniattn's"
    words = (
        f"One axis at a time from six base points. {count}: a step where time grows by more than {SLACK:g} times the floor's "
        "growth."
    )
    extra = '<span><i class="dash"></i>floor</span>'
    return _section("Sweep", words, _legend(measured, extra), element("div", *figures, class_="grid3"))


def _host(report: Report) -> str:
    if not report.host:
        return ""
    lines = []
    for key, host in report.host.items():
        cells = [f"<td>{us_text(us)}</td>" for us in (host.run_us, host.unplanned_us, host.plan_us)]
        lines.append(f"<tr><td>{_name(report, key)}</td>{''.join(cells)}</tr>")
    words = "Microseconds of host time of one eager call on a small batch, the device never waited for."
    return _section("Host", words, _table(["provider", "planned call", "plan made in the call", "plan alone"], lines))


def _moves(moved: list[Move] | None) -> str:
    if moved is None:
        return ""
    if not moved:
        return _section("Since the earlier run", "Nothing moved by more than the spread.")
    lines = []
    for move in moved:
        change = "no time any more" if move.change is None else f"{move.change:+.1%}"
        kind = "bad" if move.change is None or move.change > 0 else "good"
        lines.append(
            f"<tr><td>{escape(move.row)}</td><td>{escape(move.label)}</td><td>{us_text(move.before_us)}</td>"
            f'<td>{us_text(move.after_us)}</td><td class="{kind}">{change}</td></tr>'
        )
    return _section("Since the earlier run", "", _table(["batch", "provider", "before, µs", "now, µs", "change"], lines))


def _details(report: Report, rows: list[Row]) -> str:
    if not rows:
        return ""
    lines = []
    for group in _groups(rows):
        lines.append(f'<tr class="group"><td colspan="{5 + len(report.labels)}">{escape(group)}</td></tr>')
        lines += [_detail(report, row) for row in rows if row.group == group]
    names = [_name(report, key) for key in report.labels]
    words = "Microseconds. Point at a batch for its lengths, at a time for its rounds."
    return _section("Table", words, _table(["batch", "floor", *names, "of best peer", "of floor", "error"], lines))


def _detail(report: Report, row: Row) -> str:
    ours, relative, share = row.results.get(OURS), ratio(report, row), share_of_floor(row)
    best = best_peer(report, row)
    runs = [f"{count} x ({q}, {kv})" if count > 1 else f"({q}, {kv})" for count, q, kv in row.runs[:6]]
    tip = escape(f"{row.shape}; (q_len, kv_len): {', '.join(runs + ['...'] * (len(row.runs) > 6))}")
    star = "*" if best is not None and best.estimated else ""
    kind = "" if relative is None else "good" if relative <= 1 else "bad" if relative > 1.05 else ""
    error = f"{ours.relative_error:.1e}" if ours is not None and ours.relative_error is not None else "-"
    times = []
    for key in report.labels:
        rounds = row.results[key].rounds_us if key in row.results else []
        times.append(f'<td title="{", ".join(f"{us:.1f}" for us in rounds)}">{cell(row, key)}</td>')
    return (
        f'<tr><td title="{tip}">{escape(row.name)}</td><td>{us_text(row.floor_us)}</td>{"".join(times)}'
        f'<td class="{kind}">{"-" if relative is None else f"{relative:.2f}{star}"}</td>'
        f"<td>{'-' if share is None else f'{share:.0%}'}</td><td>{error}</td></tr>"
    )


def _method(report: Report) -> str:
    items = [
        "Every provider reads the same caches, pages shuffled. A call is captured in a CUDA graph, the L2 cache flushed before "
        "each repetition; the flush's own time is taken off. Times are medians of rounds that alternate between providers.",
        "uniattn runs with its plan made beforehand and FlashAttention-3 with its metadata, as a serving step shares them among "
        "its layers.",
        "Before it is timed, each output is compared with float64 attention on sampled query tokens and searched for NaN; the "
        "allowed error derives from eager attention's in the same dtype. What is wrong gets no time.",
        f"Floor: the slower of the batch's arithmetic at {report.peak_flops / 1e12:.0f} TFLOP/s and its bytes at "
        f"{report.peak_bytes / 1e12:.2f} TB/s ({escape(report.peak_source)}), each visible K/V byte read once.",
    ]
    if any(estimates(report, row) for row in report.rows):
        items.append(
            "* and outlined bars: FlashInfer's and FlashAttention-4's recorded times on such a card, scaled by what "
            "FlashAttention-3 takes in this run over what it took then. They were not run here."
        )
    items += [f"Not run: {escape(label)} ({escape(why)})." for label, why in report.missing.items()]
    return _section("How it was measured", "", element("ul", *(element("li", item) for item in items)), kind="method")


def _name(report: Report, key: str) -> str:
    return f'<i class="swatch" style="--c:{plots.color(key)}"></i>{escape(report.labels[key])}'
