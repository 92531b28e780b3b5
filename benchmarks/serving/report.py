"""What the serving benchmark shows: a Markdown table, and a page with bars of throughput and curves of latency."""

from typing import Any

from uniattn.bench import svg

# The order is fixed, so that a backend has one colour wherever it appears.
COLOURS = {"CUSTOM": "#0b7285", "FLASH_ATTN": "#e8590c", "TRITON_ATTN": "#868e96"}
LABELS = {"CUSTOM": "uniattn"}
COLUMNS = {
    "tokens_per_s": ("tok/s", "{:,.0f}"), "ttft_p50_ms": ("TTFT p50", "{:.1f}"), "ttft_p99_ms": ("TTFT p99", "{:.1f}"),
    "tpot_p50_ms": ("TPOT p50", "{:.2f}"), "tpot_p99_ms": ("TPOT p99", "{:.2f}"), "e2e_mean_ms": ("E2E mean", "{:,.0f}"),
}  # fmt: skip


def label(backend: str) -> str:
    """The backend's name for readers."""
    return LABELS.get(backend, backend)


def traffic(point: dict[str, Any]) -> str:
    """What was sent, in words."""
    how = "at once" if point["rate"] is None else f"{point['rate']:g}/s"
    return f"{point['trace']} x {point['num_requests']} {how}"


def table(results: list[dict[str, Any]]) -> str:
    """Figures of every backend, and throughput over the first one's."""
    if not results:
        return "no backend has finished"
    first = results[0]
    lines = [
        f"{first['shape']}, random weights; vLLM {first['vllm']}, torch {first['torch']}, {first['device']}; times in ms",
        "",
        f"| traffic | backend | {' | '.join(words for words, _ in COLUMNS.values())} | over {label(first['backend'])} |",
        "|---" * (len(COLUMNS) + 3) + "|",
    ]
    for i, base in enumerate(first["points"]):
        for result in results:
            point = result["points"][i]
            cells = " | ".join(form.format(point[name]) for name, (_, form) in COLUMNS.items())
            ratio = point["tokens_per_s"] / base["tokens_per_s"]
            lines.append(f"| {traffic(point)} | {label(result['backend'])} | {cells} | {ratio:.3f} |")
    starts = ", ".join(f"{label(r['backend'])} {r['start_s']:.0f} s" for r in results)
    lines += ["", f"Ready after: {starts}."]
    compiled = [r["compiled_while_serving"][0] for r in results if r["compiled_while_serving"]]
    if compiled:
        lines.append(f"Kernels that uniattn compiled while serving: {compiled[0]}.")
    return "\n".join(lines)


def page(results: list[dict[str, Any]]) -> str:
    """A self-contained page: bars for what was sent at once, curves over the rate for the rest, and the table's text."""
    bursts = [i for i, p in enumerate(results[0]["points"]) if p["rate"] is None]
    rates = [i for i, p in enumerate(results[0]["points"]) if p["rate"] is not None]
    drawings = []
    if bursts:
        drawings.append(bars(results, bursts))
    if len(rates) > 1:
        drawings += [curve(results, rates, name) for name in ("ttft_p50_ms", "tpot_p50_ms", "e2e_mean_ms")]
    style = "body{font:15px system-ui;max-width:60em;margin:2em auto}svg{width:100%}pre{overflow-x:auto}"
    head = f"<meta charset=utf-8><title>Serving {results[0]['shape']}</title><style>{style}</style>"
    words = f"<h1>Serving {results[0]['shape']} with vLLM {results[0]['vllm']}</h1>"
    return f"<!doctype html>{head}{words}{''.join(drawings)}<pre>{table(results)}</pre>"


def bars(results: list[dict[str, Any]], points: list[int]) -> str:
    """Tokens a second of every backend, a group of bars for each trace."""
    height, left, scale = 26, 190, 420 / max(r["points"][i]["tokens_per_s"] for r in results for i in points)
    rows, y = [svg.text(left, 16, "tokens a second, all requests at once", font_size=13)], 30
    for i in points:
        rows.append(svg.text(4, y + 15, traffic(results[0]["points"][i]), font_size=13))
        for result in results:
            value, name = result["points"][i]["tokens_per_s"], result["backend"]
            fill = COLOURS.get(name, "#495057")
            rows.append(svg.element("rect", x=float(left), y=float(y), width=value * scale, height=float(height - 6), fill=fill))
            rows.append(svg.text(left + value * scale + 6, y + 15, f"{value:,.0f} {label(name)}", font_size=12))
            y += height
        y += 10
    return svg.drawing(760, y, *rows, label="Throughput of each backend")


def curve(results: list[dict[str, Any]], points: list[int], name: str) -> str:
    """One latency over the request rate, a line for each backend."""
    values = {r["backend"]: [(r["points"][i]["rate"], r["points"][i][name]) for i in points] for r in results}
    every = [y for line in values.values() for _, y in line]
    x = svg.Log(min(x for x, _ in next(iter(values.values()))), max(x for x, _ in next(iter(values.values()))), 60, 640)
    y = svg.Log(*svg.padded(min(every), max(every)), 240, 30)
    parts = [svg.text(60, 18, f"{COLUMNS[name][0]} in ms over requests a second", font_size=13)]
    for tick in y.ticks():
        parts += [svg.line(60, y(tick), 640, y(tick), stroke="#dee2e6"), svg.text(6, y(tick) + 4, svg.short(tick), font_size=12)]
    for rate, _ in next(iter(values.values())):
        parts.append(svg.text(x(rate) - 4, 258, f"{rate:g}", font_size=12))
    for backend, line in values.items():
        colour = COLOURS.get(backend, "#495057")
        parts.append(svg.polyline([(x(rate), y(value)) for rate, value in line], stroke=colour, stroke_width=2))
        parts.append(svg.text(646, y(line[-1][1]) + 4, label(backend), font_size=12, fill=colour))
    return svg.drawing(760, 270, *parts, label=f"{COLUMNS[name][0]} of each backend over the request rate")
