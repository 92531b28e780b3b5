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
    failures,
    geomean,
    is_sweep,
    ratio,
    share_of_floor,
    us_text,
)
from uniattn.bench.svg import element

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
    found = [("all rows", rows)] + [(group, [r for r in rows if r.group == group]) for group in report.groups() if not is_sweep(group)]
    if len(found) == 2:
        del found[0]
    parts = []
    for name, those in found:
        mean, share = geomean(ratio(report, row) for row in those), geomean(share_of_floor(row) for row in those)
        if mean is None and share is None:
            continue
        large, words = (f"{mean:.2f}×", "of the best peer's time") if mean is not None else (f"{share:.0%}", "of floor")
        kind = "" if mean is None else " good" if mean <= 1 else " slow"
        below = f"{words}<br>" + (f"{share:.0%} of floor · " if mean is not None and share is not None else "")
        below += f"{len(those)} row{'s' * (len(those) != 1)}"
        parts.append(
            element("div", element("h2", escape(name)), element("div", large, class_="number"), element("p", below), class_=f"tile{kind}")
        )
    plans = [us for row in rows if (r := row.results.get(OURS)) is not None and (us := r.plan_us) is not None]
    host = report.host.get(OURS)
    if host is not None:
        below = "of host time an eager call" + (f"<br>its plan ≤ {max(plans):.1f} µs on the device" if plans else "")
        parts.append(
            element("div", element("h2", "launch"), element("div", f"{host.run_us:.1f} µs", class_="number"), element("p", below), class_="tile")
        )
    return element("section", *parts, class_="tiles") if parts else ""


def _failures(report: Report) -> str:
    found = failures(report)
    if not found:
        return ""
    items = [element("li", f"<b>{escape(label)}</b> on {escape(row)}: {escape(why)}") for row, label, why in found]
    return element("section", element("h2", "Without a time: wrong or failed"), element("ul", *items), class_="alert")


def _legend(report: Report, *extra: str) -> str:
    entries = []
    for key, label in plots.legend_labels(report).items():
        kind = "swatch" if key in report.labels else "swatch guess"
        entries.append(f'<span><i class="{kind}" style="--c:{plots.color(key)}"></i>{escape(label)}</span>')
    return element("p", *entries, *extra, class_="legend")


def _bars(report: Report, rows: list[Row]) -> str:
    parts = []
    for group in dict.fromkeys(row.group for row in rows):
        those = [row for row in rows if row.group == group]
        parts.append(element("figure", element("h3", escape(group)), plots.bars(report, those)))
    if not parts:
        return ""
    against = any(best_peer(report, row) for row in rows)
    words = "Time over the best peer's; shorter is faster." if against else "Time over the floor; shorter is faster."
    extra = '<span><i class="tickmark"></i>floor</span>'
    return element("section", element("h2", "Each batch"), element("p", words + " Microseconds at the bars."), _legend(report, extra), *parts)


def _roofline(report: Report, rows: list[Row]) -> str:
    plot = plots.roofline(report, rows)
    if not plot:
        return ""
    groups = dict.fromkeys(row.group for row in rows)
    marks = []
    for group in groups:
        inner = plots.mark(plots.shape_of(group), 8, 8, "mark plain", None)
        marks.append(f'<span><svg class="key" viewBox="0 0 16 16">{inner}</svg>{escape(group)}</span>')
    words = "What each call achieves under the card's two roofs, bandwidth on the left and arithmetic on the right. Point at a mark for its row."
    return element("section", element("h2", "Roofline"), element("p", words), _legend(report, *marks), element("figure", plot))


def _sweep(report: Report) -> str:
    groups = [group for group in report.groups() if is_sweep(group)]
    if not groups:
        return ""
    figures = []
    for group in groups:
        name = group.removeprefix("sweep ").replace("*", "▸").split(": ")[-1]
        figures.append(element("figure", element("h3", escape(name)), plots.curve(report, group)))
    found = cliffs(report)
    words = "One axis at a time from each base point (▸ varies). "
    words += f"{len(found)} cliff{'s' * (len(found) != 1)}, circled: time grows by more than 1.3 over the floor's growth." if found else (
        "No cliff: nowhere does time grow by more than 1.3 over the floor's growth."
    )  # fmt: skip
    extra = '<span><i class="dash"></i>floor</span>'
    grid = element("div", *figures, class_="grid3")
    return element("section", element("h2", "Sweep"), element("p", words), _legend(report, extra), grid)


def _host(report: Report) -> str:
    if not report.host:
        return ""
    head = "<tr><th>provider</th><th>planned call</th><th>plan made in the call</th><th>plan alone</th></tr>"
    lines = []
    for key, host in report.host.items():
        cells = [f"<td>{us_text(us)}</td>" for us in (host.run_us, host.unplanned_us, host.plan_us)]
        lines.append(f"<tr><td>{_name(report, key)}</td>{''.join(cells)}</tr>")
    words = "Microseconds of host time of one eager call on a small batch, the device never waited for."
    return element("section", element("h2", "Host"), element("p", words), f"<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table>")


def _moves(moved: list[Move] | None) -> str:
    if moved is None:
        return ""
    if not moved:
        return element("section", element("h2", "Since the earlier run"), element("p", "Nothing moved by more than the spread."))
    lines = []
    for move in moved:
        change = "no time any more" if move.change is None else f"{move.change:+.1%}"
        kind = "bad" if move.change is None or move.change > 0 else "good"
        lines.append(
            f"<tr><td>{escape(move.row)}</td><td class=l>{escape(move.label)}</td><td>{us_text(move.before_us)}</td>"
            f'<td>{us_text(move.after_us)}</td><td class="{kind}">{change}</td></tr>'
        )
    head = "<tr><th>batch</th><th class=l>provider</th><th>before, µs</th><th>now, µs</th><th>change</th></tr>"
    return element("section", element("h2", "Since the earlier run"), f"<table><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table>")


def _details(report: Report, rows: list[Row]) -> str:
    if not rows:
        return ""
    labels = "".join(f"<th>{_name(report, key)}</th>" for key in report.labels)
    head = f"<tr><th>batch</th><th>floor</th>{labels}<th>of best peer</th><th>of floor</th><th>error</th></tr>"
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        lines.append(f'<tr class="group"><td colspan="{5 + len(report.labels)}">{escape(group)}</td></tr>')
        lines += [_detail(report, row) for row in rows if row.group == group]
    table = f"<table class=wide><thead>{head}</thead><tbody>{''.join(lines)}</tbody></table>"
    return element("section", element("h2", "Table"), element("p", "Microseconds."), element("div", table, class_="scroll"))


def _detail(report: Report, row: Row) -> str:
    ours, relative, share = row.results.get(OURS), ratio(report, row), share_of_floor(row)
    best = best_peer(report, row)
    runs = ", ".join(f"{count} x ({q}, {kv})" if count > 1 else f"({q}, {kv})" for count, q, kv in row.runs[:6])
    tip = escape(f"{row.shape}; (q_len, kv_len): {runs}{', ...' if len(row.runs) > 6 else ''}")
    star = "*" if best is not None and best.estimated else ""
    kind = "" if relative is None else "good" if relative <= 1 else "bad" if relative > 1.05 else ""
    error = f"{ours.relative_error:.1e}" if ours is not None and ours.relative_error is not None else "-"
    times = []
    for key in report.labels:
        result = row.results.get(key)
        spread = f" title='rounds {', '.join(f'{us:.1f}' for us in result.rounds_us)}'" if result is not None and result.rounds_us else ""
        times.append(f"<td{spread}>{cell(row, key)}</td>")
    return (
        f'<tr><td title="{tip}">{escape(row.name)}</td><td>{us_text(row.floor_us)}</td>{"".join(times)}'
        f'<td class="{kind}">{"-" if relative is None else f"{relative:.2f}{star}"}</td>'
        f"<td>{'-' if share is None else f'{share:.0%}'}</td><td>{error}</td></tr>"
    )


def _method(report: Report) -> str:
    items = [
        "Every provider reads the same caches, pages shuffled. A call is captured in a CUDA graph with the L2 cache flushed before each "
        "repetition; the flush's own time is taken off. Times are medians of rounds that alternate between providers.",
        "uniattn runs with its plan made beforehand and FlashAttention-3 with its metadata, as a serving step shares them among layers.",
        "Before it is timed, each output is compared with float64 attention on sampled query tokens, and searched for NaN. The allowed error "
        "derives from eager attention's in the same dtype. What is wrong gets no time.",
        f"Floor: the slower of the batch's arithmetic at {report.peak_flops / 1e12:.0f} TFLOP/s and its bytes at "
        f"{report.peak_bytes / 1e12:.2f} TB/s ({escape(report.peak_source)}), each visible K/V byte read once.",
    ]
    if any(estimates(report, row) for row in report.rows):
        items.append(
            "* and outlined bars: FlashInfer's and FlashAttention-4's recorded times on such a card, scaled by what FlashAttention-3 takes "
            "in this run over what it took then. They were not run here."
        )
    items += [f"Not run: {escape(label)} ({escape(why)})." for label, why in report.missing.items()]
    return element("section", element("h2", "How it was measured"), element("ul", *(element("li", item) for item in items)), class_="method")


def _name(report: Report, key: str) -> str:
    return f'<i class="swatch" style="--c:{plots.color(key)}"></i>{escape(report.labels[key])}'
