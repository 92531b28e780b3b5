"""PyTorch's own attention: `varlen_attn`, which newer releases let read pages, and SDPA one sequence at a time."""

from __future__ import annotations

import importlib
import inspect

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from uniattn.bench.batch import DeviceBatch
from uniattn.bench.providers.base import Prepared, Provider, fa_window, reason
from uniattn.bench.workloads import Workload

_VARLEN = "torch.nn.attention.varlen"


class TorchVarlen(Provider):
    """It takes no output buffer. Which page sizes run depends on the FlashAttention that PyTorch has."""

    key, label = "torch-varlen", "torch varlen_attn"

    def available(self) -> str | None:
        try:
            function = importlib.import_module(_VARLEN).varlen_attn
        except (ImportError, AttributeError) as error:
            return reason(error)
        if "block_table" not in inspect.signature(function).parameters:
            return f"varlen_attn of torch {torch.__version__} reads no paged K/V"
        return None

    def covers(self, w: Workload) -> str | None:
        if w.softcap:
            return "softcap"
        return "head dims above 256" if w.head_dim > 256 else None

    def prepare(self, batch: DeviceBatch) -> Prepared:
        w = batch.workload
        attend = importlib.import_module(_VARLEN).varlen_attn
        # Causal is a window that ends at the own token.
        window = (fa_window(w)[0], 0)

        def run() -> Tensor:
            return attend(
                batch.q, batch.k_cache, batch.v_cache, batch.cu_seqlens_q, None, w.max_q_len, w.max_kv_len, window_size=window,
                scale=batch.softmax_scale, enable_gqa=w.num_q_heads != w.num_kv_heads, seqused_k=batch.seqlens_k,
                block_table=batch.page_table,
            )  # fmt: skip

        return Prepared(run)


class TorchSdpa(Provider):
    """What one can do with plain PyTorch: gather a sequence's pages, then one SDPA call, sequence by sequence."""

    key, label = "torch-sdpa", "torch SDPA"

    def available(self) -> str | None:
        return None

    def covers(self, w: Workload) -> str | None:
        if w.softcap:
            return "softcap"
        return "windows" if w.window is not None else None

    def prepare(self, batch: DeviceBatch) -> Prepared:
        w = batch.workload
        out = batch.poisoned_out()
        starts = batch.cu_seqlens_q.tolist()
        pages = [row[: -(-kv_len // w.page_size)].long() for row, (_, kv_len) in zip(batch.page_table, w.lengths, strict=True)]

        def run() -> Tensor:
            for seq, (q_len, kv_len) in enumerate(w.lengths):
                rows = slice(starts[seq], starts[seq + 1])
                k, v = (
                    cache[pages[seq]].flatten(0, 1)[:kv_len].transpose(0, 1)[None] for cache in (batch.k_cache, batch.v_cache)
                )
                mask = None if q_len == 1 else causal_lower_right(q_len, kv_len)
                got = scaled_dot_product_attention(
                    batch.q[rows].transpose(0, 1)[None], k, v, attn_mask=mask, scale=batch.softmax_scale, enable_gqa=True
                )
                out[rows] = got[0].transpose(0, 1)
            return out

        return Prepared(run)
