"""FlashAttention in its four forms: vLLM's library of version 3, the packages of versions 2 and 3, and version 4 (CuTe)."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path

import torch
from torch import Tensor

from uniattn.bench.batch import DeviceBatch
from uniattn.bench.providers.base import Paths, Prepared, Provider, fa_window, reason
from uniattn.bench.workloads import Workload

_FA3_FILE = "vllm_flash_attn/_vllm_fa3_C.abi3.so"


class Fa3Library(Provider):
    """vLLM's build of FlashAttention-3, called through its operators: nothing of vLLM is imported."""

    key, label = "fa3", "FlashAttention-3"

    def __init__(self, paths: Paths):
        self._path = paths.fa3 or (Path(os.environ["UNIATTN_FA3_SO"]) if "UNIATTN_FA3_SO" in os.environ else None)

    def available(self) -> str | None:
        path = self._path or _in_vllm()
        if path is None:
            return "no vllm is installed; name its _vllm_fa3_C library by --fa3 or UNIATTN_FA3_SO"
        if not path.is_file():
            return f"there is no file {path}"
        try:
            torch.ops.load_library(str(path))
        except (OSError, RuntimeError) as error:
            return f"{path} does not load: {reason(error)}"
        return None

    def covers(self, w: Workload) -> str | None:
        return "head dims above 256" if w.head_dim > 256 else None

    def prepare(self, batch: DeviceBatch) -> Prepared:
        w, fa3 = batch.workload, torch.ops._vllm_fa3_C
        left, right = fa_window(w)
        out = batch.poisoned_out()

        def plan() -> Tensor:
            return fa3.get_scheduler_metadata(
                batch.num_seqs, w.max_q_len, w.max_kv_len, w.num_q_heads, w.num_kv_heads, w.head_dim, w.head_dim, batch.q.dtype,
                batch.seqlens_k, batch.cu_seqlens_q, None, None, None, None, w.page_size, 0, True, left, right, w.softcap > 0, 0,
                None, 0,
            )  # fmt: skip

        def call(metadata: Tensor) -> Tensor:
            fa3.fwd(
                batch.q, batch.k_cache, batch.v_cache, None, None, None, out, batch.cu_seqlens_q, None, None, None,
                batch.seqlens_k, w.max_q_len, w.max_kv_len, batch.page_table, None, None, None, None, None, None, None, None,
                batch.softmax_scale, True, left, right, w.softcap, True, metadata, 0, None, 0, None, 1, 0, None,
            )  # fmt: skip
            return out

        made = plan()
        return Prepared(lambda: call(made), plan, lambda: call(plan()))


def _in_vllm() -> Path | None:
    """The library inside an installed vLLM, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / _FA3_FILE).is_file():
            return Path(folder) / _FA3_FILE
    return None


class _Package(Provider):
    """A provider that is a function of an importable module."""

    module: str
    function: str

    def available(self) -> str | None:
        try:
            found = hasattr(importlib.import_module(self.module), self.function)
        except ImportError as error:
            return reason(error)
        except Exception as error:  # a package that is installed but broken must not end the bench
            return f"importing {self.module} fails: {reason(error)}"
        return None if found else f"{self.module} has no {self.function}"

    def _call(self):
        return getattr(importlib.import_module(self.module), self.function)


class Fa3Package(_Package):
    """FlashAttention-3's own package. It takes no output buffer."""

    key, label = "fa3-package", "flash-attn 3"
    module, function = "flash_attn_interface", "flash_attn_with_kvcache"

    def covers(self, w: Workload) -> str | None:
        return "head dims above 256" if w.head_dim > 256 else None

    def prepare(self, batch: DeviceBatch) -> Prepared:
        w, attend = batch.workload, self._call()

        def run() -> Tensor:
            out = attend(
                batch.q, batch.k_cache, batch.v_cache, cache_seqlens=batch.seqlens_k, page_table=batch.page_table,
                cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=w.max_q_len, softmax_scale=batch.softmax_scale, causal=True,
                window_size=fa_window(w), softcap=w.softcap,
            )  # fmt: skip
            return out[0] if isinstance(out, tuple) else out

        return Prepared(run)


class Fa2Package(_Package):
    """flash-attn 2. It pages in multiples of 256 tokens only and takes no output buffer."""

    key, label = "fa2", "flash-attn 2"
    module, function = "flash_attn", "flash_attn_varlen_func"

    def covers(self, w: Workload) -> str | None:
        if w.page_size % 256:
            return "page sizes that are no multiple of 256"
        return "head dims above 256" if w.head_dim > 256 else None

    def prepare(self, batch: DeviceBatch) -> Prepared:
        w, attend = batch.workload, self._call()
        cu_seqlens_k = torch.nn.functional.pad(batch.seqlens_k.cumsum(0), (1, 0)).int()

        def run() -> Tensor:
            return attend(
                batch.q, batch.k_cache, batch.v_cache, batch.cu_seqlens_q, cu_seqlens_k, w.max_q_len, w.max_kv_len,
                softmax_scale=batch.softmax_scale, causal=True, window_size=fa_window(w), softcap=w.softcap,
                block_table=batch.page_table,
            )  # fmt: skip

        return Prepared(run)


class Fa4Package(_Package):
    """FlashAttention-4, compiled at the first call; it names an unbounded side of a window None."""

    key, label = "fa4", "FlashAttention-4"
    module, function = "flash_attn.cute", "flash_attn_varlen_func"

    def prepare(self, batch: DeviceBatch) -> Prepared:
        w, attend = batch.workload, self._call()
        window = (None, None) if w.window is None else (w.window[0], 0)

        def run() -> Tensor:
            out = attend(
                batch.q, batch.k_cache, batch.v_cache, cu_seqlens_q=batch.cu_seqlens_q, seqused_k=batch.seqlens_k,
                max_seqlen_q=w.max_q_len, max_seqlen_k=w.max_kv_len, page_table=batch.page_table,
                softmax_scale=batch.softmax_scale, causal=True, window_size=window, softcap=w.softcap,
            )  # fmt: skip
            return out[0] if isinstance(out, tuple) else out

        return Prepared(run)
