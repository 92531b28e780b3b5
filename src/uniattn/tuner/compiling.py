"""Compiling ahead, in processes beside the one that measures: the measured calls then take their kernels from Triton's cache on disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

from uniattn.bench.providers.base import reason
from uniattn.bench.workloads import Workload
from uniattn.launch.target import Target
from uniattn.problem.layout import window_bounds
from uniattn.schedule.plan import PlanSpec, make_spec
from uniattn.schedule.tiles import Tiles
from uniattn.tuner.resources import Resources

# Processes more than this only wait for one another's turns at the disk.
_MAX_PROCESSES = 24


def spec_of(w: Workload, tiles: Tiles, target: Target) -> PlanSpec:
    """The plan's spec of `w` with `tiles`."""
    left, right = window_bounds(w.window)
    return make_spec(
        w.num_tokens, len(w.lengths), w.num_q_heads, w.num_kv_heads, w.head_dim, w.head_dim, 4 if w.dtype == "float32" else 2, 1, left,
        right, w.max_q_len, w.page_size, target, (tiles.kernel,), 0, tiles,
    )  # fmt: skip


def compile_call(w: Workload, spec: PlanSpec, target: tuple[Any, ...]) -> Resources:
    """Compile the kernels of one call on `w` for Triton's target `(backend, arch, warp_size)`; what the attention kernel takes.

    For a process of its own: it will launch nothing afterwards.
    """
    import torch
    from triton.backends.compiler import GPUTarget

    from uniattn.launch import attend, cache, merge, plan
    from uniattn.tuner.resources import of

    cache.compile_only(GPUTarget(*target))
    dtype = getattr(torch, w.dtype)

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    num_seqs = len(w.lengths)
    q, cache_of = tensor(w.num_tokens, w.num_q_heads, w.head_dim), (2, w.page_size, w.num_kv_heads, w.head_dim)
    offsets, lengths = tensor(num_seqs + 1, kind=torch.int32), tensor(num_seqs, kind=torch.int32)
    table, items = tensor(num_seqs, 8, kind=torch.int32), tensor(spec.buffer_ints, kind=torch.int32)
    with suppress(cache.Compiled):
        plan.build(spec, offsets, lengths, None, None, True, 8, items)
    if spec.num_partials:
        with suppress(cache.Compiled):
            merge.merge_pieces(spec, items, q, q, offsets, torch.empty_like(q), None)
    try:
        attend.attend(
            q, tensor(*cache_of), tensor(*cache_of), offsets, lengths, table, None, w.max_q_len, w.head_dim**-0.5, True, None,
            *window_bounds(w.window), w.softcap, None, None, spec, items, torch.empty_like(q), None,
        )  # fmt: skip
    except cache.Compiled as done:
        return of(done.kernel, target[0])
    raise AssertionError("the call launched something")


class Compiler:
    """A pool of processes that compile what is asked; each call once.

    Args:
        target: Triton's target as `(backend, arch, warp_size)`.
        card: facts of the card.
        run: what compiles, for the tests.
    """

    def __init__(self, target: tuple[Any, ...], card: Target, run: Callable[..., Resources] = compile_call):
        self._target, self._card, self._run = target, card, run
        self._asked: dict[Any, Future[Resources]] = {}
        self._pool = self._new_pool()

    def ask(self, w: Workload, tiles: Tiles) -> None:
        """Compile in the background, if it has not been asked before."""
        spec = spec_of(w, tiles, self._card)
        key = self._key(w, spec)
        if key not in self._asked:
            self._asked[key] = self._submit(w, spec)

    def resources(self, w: Workload, tiles: Tiles) -> Resources | str:
        """What the attention kernel takes, or why it cannot be compiled; waits for it."""
        self.ask(w, tiles)
        spec = spec_of(w, tiles, self._card)
        future = self._asked[self._key(w, spec)]
        try:
            return future.result()
        except BrokenProcessPool:
            return self._alone(w, spec)
        except Exception as error:
            return reason(error)

    def close(self) -> None:
        """Stop; what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _alone(self, w: Workload, spec: PlanSpec) -> Resources | str:
        """A compiler that crashes takes all its pool's calls along: each is then tried by itself."""
        self.close()
        self._pool = self._new_pool()
        self._asked[self._key(w, spec)] = future = self._submit(w, spec)
        try:
            return future.result()
        except BrokenProcessPool:
            self._pool = self._new_pool()
            return "the compiler crashed"
        except Exception as error:
            return reason(error)

    def _submit(self, w: Workload, spec: PlanSpec) -> Future[Resources]:
        try:
            return self._pool.submit(self._run, w, spec, self._target)
        except BrokenProcessPool:
            self._pool = self._new_pool()
            return self._pool.submit(self._run, w, spec, self._target)

    def _key(self, w: Workload, spec: PlanSpec) -> Any:
        """All that the binaries depend on; lengths do not matter, but whether the plan may cut does."""
        shape = (w.num_q_heads // w.num_kv_heads, w.head_dim, w.page_size, w.dtype, w.window is not None, w.softcap > 0)
        return (*shape, spec.compiled_in, spec.is_hopper, spec.num_partials > 0, spec.max_rows > 16, spec.num_tiles > 256)

    def _new_pool(self) -> ProcessPoolExecutor:
        processes = max(1, min(_MAX_PROCESSES, (os.cpu_count() or 2) - 1))
        return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
