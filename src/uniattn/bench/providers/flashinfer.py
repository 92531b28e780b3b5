"""FlashInfer's paged prefill wrapper, which serves any number of query tokens a sequence, decodes among them."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from uniattn.bench.batch import DeviceBatch
from uniattn.bench.providers.base import Prepared, Provider, reason

_WORKSPACE_BYTES = 256 << 20


class FlashInfer(Provider):
    key, label = "flashinfer", "FlashInfer"

    def available(self) -> str | None:
        try:
            importlib.import_module("flashinfer")
        except ImportError as error:
            return reason(error)
        except Exception as error:  # it looks for nvcc and more on import
            return f"importing flashinfer fails: {reason(error)}"
        return None

    def prepare(self, batch: DeviceBatch) -> Prepared:
        w = batch.workload
        flashinfer = importlib.import_module("flashinfer")
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=batch.q.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        # It takes page ids in one list with each sequence's start, and how full a last page is.
        counts = [-(-kv_len // w.page_size) for _, kv_len in w.lengths]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        pages = torch.cat([row[:count] for row, count in zip(batch.page_table.cpu(), counts, strict=True)])
        last = torch.tensor([(kv_len - 1) % w.page_size + 1 for _, kv_len in w.lengths], dtype=torch.int32)
        pages, starts_q = pages.to(batch.q.device), batch.cu_seqlens_q.cpu()
        out = batch.poisoned_out()

        def plan() -> None:
            wrapper.plan(
                starts_q, starts, pages, last, w.num_q_heads, w.num_kv_heads, w.head_dim, w.page_size, causal=True,
                sm_scale=batch.softmax_scale, window_left=-1 if w.window is None else w.window[0],
                logits_soft_cap=w.softcap or None, q_data_type=batch.q.dtype, kv_data_type=batch.k_cache.dtype,
            )  # fmt: skip

        def run() -> Tensor:
            wrapper.run(batch.q, (batch.k_cache, batch.v_cache), out=out)
            return out

        plan()
        return Prepared(run, plan, plan_waits=True)
