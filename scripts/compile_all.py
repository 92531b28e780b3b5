"""Compile every configuration ahead of time, for five chips, on a machine without any of them.

    python scripts/compile_all.py                    # all of it, 20 to 60 minutes; writes benchmarks/compiled.json and .md
    python scripts/compile_all.py --chip sm_90       # one chip
    python scripts/compile_all.py --slice            # a few configurations of each chip, for the tests

For each chip it asks `tuning.heuristic` for the tiles of each head dim, dtype and number of query rows, and the tables that the
package ships for all that they can answer. It compiles the kernels as a launch would, and fails where one needs more shared memory
than a program may have, spills registers within its main loop, or lets fewer programs live on an SM than its tiles count. Each chip is
compiled in a process of its own, since a compiler may take the process down with it.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from uniattn.tuning.cards import CARDS
from uniattn.tuning.choose import SHIPPED

ROOT = Path(__file__).parent.parent
# By Triton's name of the chip, a card that has it.
CHIPS = {"sm_80": CARDS["a100"], "sm_90": CARDS["h200"], "sm_100": CARDS["b200"], "gfx942": CARDS["mi300x"], "gfx950": CARDS["mi355x"]}
HEAD_DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (512, 512), (576, 512)]
DTYPES = ["bfloat16", "float16", "float32"]
# The Hopper kernel's loops keep 230 registers busy, and ptxas spills a few times in its innermost loops of about 480
# instructions each (heads of 128). It should spill nowhere; more than now is a fault.
HOPPER_SPILLS = 40
CONTIGUOUS = dict(page_table=None, cu_seqlens_k="int32", page_size=0, has_lse=True)
# What a launch may ask for beyond causal attention over pages of 16; every configuration gets the first, and in turn one of the others.
FEATURES = [
    {},
    dict(has_window=True, sinks="bfloat16", has_lse=True),
    dict(has_softcap=True, page_size=544),
    dict(alibi="float32", causal=False, group=1),
    CONTIGUOUS,
    dict(causal_per_seq="bool", group=7, page_size=64, has_window=True),
    dict(has_partials=False, has_lse=True, page_size=1, same_strides=False),
    dict(wide=True, same_strides=False),
    dict(aligned=False),
]


def configurations(chip: str, small: bool = False, tables: Path = SHIPPED):
    """`(kernel's name, what it is, tiles, features, its launches, key, tiles whose programs an SM are checked)` of all to compile."""
    import torch

    from uniattn.launch import attend, merge, plan, write_kv

    def dtype(name):
        return getattr(torch, name)

    answered = [] if small else table_problems(chip, tables)
    problems = [*heuristic_problems(chip, small), *(p for p in answered if p[3].kernel == "triton")]
    for name, head_dim, v_head_dim, t, features in problems:
        for added in features:
            facts = dict(
                device=0, dtype=name, page_table="int32", cu_seqlens_k=None, causal_per_seq=None, sinks=None, alibi=None,
                has_lse=False, has_partials=True, aligned=True, wide=False,
                same_strides=head_dim == v_head_dim or head_dim == 576, causal=True, has_window=False, has_softcap=False,
                head_dim=head_dim, v_head_dim=v_head_dim, group=4, page_size=16, tiles=t.compiled_in,
            )  # fmt: skip
            facts.update(added)
            key = {k: dtype(v) if isinstance(v, str) else v for k, v in facts.items()}
            dims = f"{head_dim}" if head_dim == v_head_dim else f"{head_dim}/{v_head_dim}"
            # Features take registers of their own, and a table's count is that of the Triton it was measured with.
            counted = t if added is FEATURES[0] and name != "float32" else None
            yield "attend", f"{name} {dims}", _tile(t), _words(added), attend.KERNELS, attend.Key(**key), counted
        for rows in merge.ROWS if name == "bfloat16" else ():
            key = merge.PiecesKey(0, dtype(name), torch.int32, True, True, 4, v_head_dim, t.block_m, rows)
            yield "pieces", f"{name} {v_head_dim}", f"{t.block_m} rows, {rows} a program", "", merge.PIECES_KERNELS, key, None
    plans = dict.fromkeys((t.block_m, t.block_n, t.small_m, t.small_n, t.heads_first, False, 0) for _, _, _, t, _ in problems)
    for tile in list(plans)[: 1 if small else None]:
        for may_cut in (True, False):
            for chunk in plan.chunks(may_cut):
                key = plan.Key(0, torch.int32, torch.int32, None, None, True, 4, True, *tile, may_cut, chunk)
                yield "plan", f"chunks of {chunk}", f"{tile}", "may cut" if may_cut else "", plan.KERNELS, key, None
    if chip == "sm_90":
        yield from hopper_configurations(small, [p for p in answered if p[3].kernel == "hopper"])
    for name, dim in [("bfloat16", 128)] if small else itertools.product(DTYPES, (64, 80, 128, 512)):
        key = merge.Key(0, torch.float32, dtype(name), True, True, dim)
        yield "merge", f"{name} {dim}", "", "", merge.KERNELS, key, None
        key = write_kv.Key(0, dtype(name), torch.int64, True, dim, dim, 16, write_kv.block_elements(8, dim, dim))
        yield "write_kv", f"{name} {dim}", "", "", write_kv.KERNELS, key, None


def heuristic_problems(chip: str, small: bool):
    """`(dtype, head_dim, v_head_dim, tiles, features)` of all that the heuristic can answer."""
    from uniattn.tuning import heuristic

    turn = itertools.cycle(range(1, len(FEATURES)))
    for name, dims in [("bfloat16", (128, 128)), ("bfloat16", (576, 512))] if small else itertools.product(DTYPES, HEAD_DIMS):
        # fp16 takes what bf16 takes of the chip, so one head dim shows it.
        if name == "float16" and dims != (128, 128):
            continue
        paged, contiguous = (heuristic.every(*dims, 4 if name == "float32" else 2, CHIPS[chip], pages) for pages in (True, False))
        for t in paged[slice(0, None, 2 if small else 1)]:
            features = [FEATURES[0]] if small else [FEATURES[0], FEATURES[next(turn)]]
            yield name, *dims, t, [f for f in features if t in contiguous or "page_table" not in f]
        for t in contiguous:
            if t not in paged and not small:
                yield name, *dims, t, [CONTIGUOUS]


def table_problems(chip: str, tables: Path):
    """`(dtype, head_dim, v_head_dim, tiles, features)` of all that the tables in a folder answer on the chip, each once."""
    from uniattn.tuning.problem import Problem, page_class
    from uniattn.tuning.table import load

    found = {}
    for path in sorted(tables.glob("*.json")):
        table, faults = load(path)
        if faults:
            raise ValueError(f"{path}: {'; '.join(faults)}")
        if table.card["arch"] != CHIPS[chip].arch:
            continue
        for entry in table.entries:
            key = entry.key
            pages = page_class(key.page_size) if isinstance(key, Problem) else key.pages
            feature = dict(has_window=key.windowed, **(CONTIGUOUS if pages == "contiguous" else {}))
            problem = ("float32" if key.itemsize == 4 else "bfloat16", key.head_dim, key.v_head_dim, entry.tiles)
            found[problem, _words(feature)] = (*problem, [feature, {**feature, "has_lse": True}])
    return list(found.values())


def uncovered(tables: Path) -> list[dict]:
    """A fault for each table of a card whose chip is not among those compiled for."""
    from uniattn.tuning.table import load

    cards = {path: load(path)[0].card for path in sorted(tables.glob("*.json"))}
    known = [card.arch for card in CHIPS.values()]
    return [
        dict(chip=str(card["arch"]), kernel="attend", problem=path.name, tiles="", features="", fault="no chip here is the table's")
        for path, card in cards.items()
        if card["arch"] not in known
    ]


def _tile(t) -> str:
    text = f"{t.block_m}x{t.block_n}, {t.num_stages} stages, {t.num_warps} warps"
    return text + (f"; {t.small_m}x{t.small_n}, {t.small_stages} stages" if t.small_m else "")


# Of the features above those that the Hopper kernel has.
HOPPER_FEATURES = [
    {},
    dict(has_window=True, sinks="bfloat16", has_lse=True),
    dict(has_softcap=True, page_size=544),
    dict(causal_per_seq="bool", group=7, page_size=64, has_window=True, causal=False),
    dict(has_partials=False, has_lse=True, page_size=128),
]
HOPPER_DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


def hopper_configurations(small: bool, answered: list[tuple]):
    """As `configurations`, of the Hopper kernel and of the plan's builder for it; `answered` is what tables answer with it."""
    import torch

    from uniattn.launch import hopper, plan
    from uniattn.schedule.hopper import choose

    problems = [("bfloat16", *dims, choose(*dims), HOPPER_FEATURES[: 1 if small else None]) for dims in HOPPER_DIMS]
    for name, head_dim, v_head_dim, t, features in [p for p in problems if not small or p[1] == 128] + answered:
        for feature in features:
            facts = dict(
                device=0, dtype=name, page_table="int32", causal_per_seq=None, sinks=None, has_lse=False, has_partials=True,
                causal=True, has_window=False, has_softcap=False, head_dim=head_dim, v_head_dim=v_head_dim, group=4, page_size=16,
                block_n=t.block_n, kv_stages=t.num_stages,
            )  # fmt: skip
            key = hopper.Key(**{k: getattr(torch, v) if isinstance(v, str) else v for k, v in (facts | feature).items()})
            yield "hopper", f"{name} {head_dim}/{v_head_dim}", _tile(t), _words(feature), hopper.KERNELS, key, None
    tokens = plan.l2_tokens(True, 128, 128, 2)
    for t in dict.fromkeys((t.block_m, t.block_n, t.small_m, t.small_n) for _, _, _, t, _ in [*problems[:1], *answered]):
        key = plan.Key(0, torch.int32, torch.int32, None, None, True, 4, True, *t, False, True, tokens, True, 256)
        yield "plan", "chunks of 256", f"hopper {t}", "may cut", plan.KERNELS, key, None


def _words(feature: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in feature.items())


def compile_chip(chip: str, small: bool) -> list[dict]:
    """Compile everything for one chip; one record a configuration."""
    from triton.backends.compiler import GPUTarget

    from uniattn.launch import direct
    from uniattn.tuner.resources import of

    card = CHIPS[chip]
    target = GPUTarget(card.backend, card.arch, card.warp_size)
    records = []
    for kernel, problem, tiles, features, kernels, key, counted in configurations(chip, small):
        start = time.perf_counter()
        record = dict(chip=chip, kernel=kernel, problem=problem, tiles=tiles, features=features)
        try:
            used = of(direct.compiled(kernels.fn, kernels.source(key), target), card.backend)
            record.update(asdict(used), seconds=round(time.perf_counter() - start, 1))
            # Odd addresses and strides are loaded element by element, which costs more than the spills that it brings.
            allowed = HOPPER_SPILLS if kernel == "hopper" else 10**9 if "aligned=False" in features else 0
            spills = used.spills_in_loop if used.spills_in_loop > allowed else 0
            live = card.programs_per_sm(used.shared, counted.num_warps, used.registers) if counted else 0
            record["fault"] = (
                f"{used.shared} B of shared memory of {card.max_shared_bytes}" if used.shared > card.max_shared_bytes
                else f"{spills} spills in the main loop" if spills
                else f"{counted.programs_per_sm} programs an SM counted, {live} live" if counted and live < counted.programs_per_sm
                else ""
            )  # fmt: skip
        except Exception as error:
            record["fault"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        records.append(record)
        print(f"{chip} {kernel} {problem} {tiles} {features}: {record['fault'] or 'ok'}", file=sys.stderr, flush=True)
    return records


def run_chip(chip: str, small: bool) -> list[dict]:
    """`compile_chip` in a process of its own."""
    command = [sys.executable, __file__, "--worker", chip, *(["--slice"] if small else [])]
    # The tests set the interpreter for all, and that compiles nothing.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode != 0:
        fault = f"the process ended with {done.returncode}"
        return [dict(chip=chip, kernel="all", problem="", tiles="", features="", fault=fault)]
    return json.loads(done.stdout)


def report(records: list[dict], version: str) -> str:
    """The record as Markdown: a line for each chip, then a table of the attention kernel's configurations."""
    lines = [
        "# Compiled ahead of time",
        "",
        f"Written by `python scripts/compile_all.py` with Triton {version}; all fields are in compiled.json.",
        "Registers are a thread's, of 255 on NVIDIA and 512 on AMD. Spills: bytes a thread (NVIDIA) or vector registers (AMD);",
        "what counts is that none is in a main loop (but for odd addresses and strides, which only have to be right). A row is the worst",
        "of its configuration's features.",
        "",
        "| chip | configurations | faults | most registers | most shared memory, B | limit, B |",
        "|---|---|---|---|---|---|",
    ]
    for chip, card in CHIPS.items():
        mine = [r for r in records if r["chip"] == chip]
        if mine:
            worst = [max((r.get(name, 0) for r in mine), default=0) for name in ("registers", "shared")]
            faults = sum(bool(r["fault"]) for r in mine)
            lines.append(f"| {chip} | {len(mine)} | {faults} | {worst[0]} | {worst[1]} | {card.max_shared_bytes} |")
    for chip in CHIPS:
        groups: dict[tuple, list[dict]] = {}
        for r in records:
            if r["chip"] == chip and r["kernel"] == "attend":
                groups.setdefault((r["problem"], r["tiles"]), []).append(r)
        if groups:
            lines += ["", f"## {chip}", "", "| problem | tiles | registers | spills | in the loop | shared, B | fault |"]
            lines.append("|---" * 7 + "|")
        for (problem, tiles), mine in groups.items():
            aligned = [r for r in mine if "aligned=False" not in r["features"]]
            worst = [max(r.get(name, 0) for r in aligned) for name in ("registers", "spills", "spills_in_loop", "shared")]
            faults = "; ".join(dict.fromkeys(r["fault"] for r in mine if r["fault"]))
            lines.append(f"| {problem} | {tiles} | {' | '.join(map(str, worst))} | {faults} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", action="append", choices=CHIPS, help="this chip alone; may be repeated")
    parser.add_argument("--slice", action="store_true", help="a few configurations of each chip, and no record")
    parser.add_argument("--worker", choices=CHIPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(compile_chip(options.worker, options.slice)))
        return 0
    import triton

    records = [r for chip in options.chip or CHIPS for r in run_chip(chip, options.slice)] + uncovered(SHIPPED)
    if not options.slice:
        path = ROOT / "benchmarks" / "compiled.json"
        if options.chip and path.exists():
            records = [r for r in json.loads(path.read_text())["records"] if r["chip"] not in options.chip] + records
        path.write_text(json.dumps({"triton": triton.__version__, "records": records}, indent=0) + "\n")
        path.with_suffix(".md").write_text(report(records, triton.__version__))
    faults = [r for r in records if r["fault"]]
    for r in faults:
        print(f"{r['chip']} {r['kernel']} {r['problem']} ({r['tiles']}; {r['features'] or 'plain'}): {r['fault']}")
    print(f"{len(records)} configurations, {len(faults)} with a fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
