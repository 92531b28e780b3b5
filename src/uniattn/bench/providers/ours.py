"""uniattn itself, with a plan made beforehand."""

from __future__ import annotations

import inspect

from torch import Tensor

import uniattn
from uniattn.bench.batch import DeviceBatch
from uniattn.bench.providers.base import Prepared, Provider
from uniattn.errors import UniattnError
from uniattn.launch import triton_version
from uniattn.schedule.tiles import Tiles


class Uniattn(Provider):
    """`tiles` None: as chosen."""

    key, label = "uniattn", "uniattn"

    def __init__(self, tiles: Tiles | None = None):
        self._tiles = tiles

    def available(self) -> str | None:
        try:
            triton_version.require()
        except UniattnError as error:
            return str(error)
        return None

    def prepare(self, batch: DeviceBatch) -> Prepared:
        w = batch.workload
        sizes = dict(
            cu_seqlens_q=batch.cu_seqlens_q,
            seqlens_k=batch.seqlens_k,
            page_table=batch.page_table,
            max_seqlen_q=w.max_q_len,
            max_seqlen_k=w.max_kv_len,
            causal=True,
            window=w.window,
            softcap=w.softcap,
        )
        tensors = (batch.q, batch.k_cache, batch.v_cache)
        # A plan takes the part of a call's arguments that it depends on.
        known = inspect.signature(uniattn.plan).parameters
        planned = {name: value for name, value in sizes.items() if name in known}
        out = batch.poisoned_out()

        def plan() -> object:
            return uniattn.plan(*tensors, **planned, tiles=self._tiles)  # type: ignore[arg-type]

        made = plan()

        def run() -> Tensor:
            uniattn.attention(*tensors, **sizes, plan=made, out=out)  # type: ignore[arg-type]
            return out

        def unplanned() -> Tensor:
            uniattn.attention(*tensors, **sizes, out=out)  # type: ignore[arg-type]
            return out

        return Prepared(run, plan, unplanned)
