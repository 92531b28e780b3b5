"""Which configurations are tried for a class of problems: pure functions of sizes and chip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from uniattn.bench.workloads import Workload
from uniattn.launch import choice
from uniattn.launch.target import Target
from uniattn.schedule import hopper
from uniattn.schedule.tiles import Tiles, dim_parts, next_power_of_2
from uniattn.tuning import limits
from uniattn.tuning.choose import default
from uniattn.tuning.heuristic import ROW_CLASSES
from uniattn.tuning.problem import Problem, page_class

# What starting an item and writing its partial may cost, in KV tokens: what the plan weighs cuts by.
_OVERHEADS = (32, 128, 512)


def kernels_for(w: Workload, target: Target) -> tuple[str, ...]:
    """The kernels that can serve `w`, whose caches are laid out plainly, first the one that the chip rewards."""
    cache = torch.empty(1, w.page_size, w.num_kv_heads, w.head_dim, dtype=getattr(torch, w.dtype), device="meta")
    return choice.in_order(choice.may_use_hopper(target) and hopper.readable(cache, cache))


def candidates(p: Problem, target: Target, kernels: Sequence[str]) -> dict[str, list[Tiles]]:
    """By kernel, what is tried for `p`: first what is chosen without a table, then others that the chip can run, each once."""
    tried = {"triton": _portable, "hopper": _hopper}
    paged = page_class(p.page_size) != "contiguous"
    made = {}
    for kernel in kernels:
        first = default(p, target, (kernel,))
        others = [
            t for t in tried[kernel](p, target, first) if limits.fault(t, p.head_dim, p.v_head_dim, p.itemsize, paged, target) is None
        ]
        made[kernel] = list(dict.fromkeys([first, *others]))
    return made


def refined(t: Tiles) -> list[Tiles]:
    """Neighbours of `t` that need no other binary: cuts weighed differently."""
    return [replace(t, item_overhead=tokens) for tokens in _OVERHEADS if tokens != t.item_overhead]


def _portable(p: Problem, target: Target, first: Tiles) -> Iterator[Tiles]:
    """Blocks, buffers and warps around the default, which keeps its small tiles, order and overhead."""
    wide = max(sum(dim_parts(p.head_dim)), next_power_of_2(max(16, p.v_head_dim))) > 128
    few, medium = ROW_CLASSES
    rows: tuple[int, ...] = (16,) if p.itemsize == 4 or p.rows <= few else (32, 64) if p.rows <= medium else (64, 128)
    warps: tuple[int, ...] = (4,) if p.itemsize == 2 and (p.rows <= few or (p.rows <= medium and not wide)) else (4, 8)
    tokens = (16, 32, 64) if wide or p.itemsize == 4 else (32, 64, 128)
    amd = target.matrix_unit == "mfma"
    for m in rows:
        for n in tokens:
            for w in warps:
                # Four warps for 128 rows hold too much each, eight for few rows too little.
                if (m, w) in ((128, 4), (32, 8)) or (not wide and (m, w) == (64, 8)):
                    continue
                for buffers in (1, 2, 3):
                    stages = buffers + 1 if amd else 2 * buffers + 1
                    t = replace(first, block_m=m, block_n=n, num_warps=w, num_stages=stages)
                    if t.small_m >= m:
                        t = replace(t, small_m=0, small_n=0, small_stages=0)
                    # Longer blocks mask more of a short sequence: there a loop without masks may pay.
                    yield replace(t, bulk=first.bulk)
                    if m == 16 and n >= 64 and p.itemsize == 2:
                        yield replace(t, bulk=True)


def _hopper(p: Problem, target: Target, first: Tiles) -> Iterator[Tiles]:
    for n in (64, 128):
        for stages in (2, 3, 4):
            yield replace(first, block_n=n, small_n=n, num_stages=stages, small_stages=stages)
