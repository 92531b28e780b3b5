"""vLLM's unified Triton kernel: from an installed vLLM, or from its two source files alone."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uniattn.bench.batch import DeviceBatch
from uniattn.bench.providers.base import Paths, Prepared, Provider, fa_window, reason
from uniattn.schedule.tiles import next_power_of_2

_MODULES = ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention")
_HELPERS = "vllm.v1.attention.ops.triton_attention_helpers"
_FUNCTION = "unified_attention"
# As vLLM's backend sets them: it splits K/V only while so few programs would run, and always into this many parts.
_SPLIT_BELOW_PROGRAMS, _SEGMENTS = 128, 16


class VllmTriton(Provider):
    key, label = "vllm-triton", "vLLM Triton"

    def __init__(self, paths: Paths):
        self._path = paths.vllm_kernel
        self._function: Any = None

    def available(self) -> str | None:
        try:
            self._function = _from_file(self._path) if self._path else _installed()
        except Exception as error:  # vLLM's import runs much code, and a lone file may need what is not stood in for
            return reason(error)
        return None

    def prepare(self, batch: DeviceBatch) -> Prepared:
        w = batch.workload
        out = batch.poisoned_out()
        threshold = _SPLIT_BELOW_PROGRAMS // w.num_kv_heads
        rows = (max(threshold, 1), w.num_q_heads, _SEGMENTS)

        def scratch(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=batch.q.device)

        arguments = dict(
            q=batch.q, k=batch.k_cache, v=batch.v_cache, out=out, cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=w.max_q_len,
            seqused_k=batch.seqlens_k, max_seqlen_k=w.max_kv_len, softmax_scale=batch.softmax_scale, causal=True,
            window_size=fa_window(w), block_table=batch.page_table, softcap=w.softcap, q_descale=None, k_descale=None,
            v_descale=None, seq_threshold_3D=threshold, num_par_softmax_segments=_SEGMENTS,
            softmax_segm_output=scratch(*rows, next_power_of_2(w.head_dim)), softmax_segm_max=scratch(*rows),
            softmax_segm_expsum=scratch(*rows),
        )  # fmt: skip
        # Releases differ in which of these they know; the ones above suffice for all.
        known = inspect.signature(self._function).parameters
        arguments = {name: value for name, value in arguments.items() if name in known}
        function = self._function

        def run() -> Tensor:
            function(**arguments)
            return out

        return Prepared(run)


def _installed() -> Any:
    if importlib.util.find_spec("vllm") is None:
        raise ImportError("no vllm is installed; name its triton_unified_attention.py by --vllm-kernel")
    for name in _MODULES:
        try:
            return getattr(importlib.import_module(name), _FUNCTION)
        except ModuleNotFoundError:
            continue
    raise ImportError(f"this vllm has none of {', '.join(_MODULES)}")


def _from_file(path: Path) -> Any:
    """The kernel of a source file, with stand-ins for the few things of vLLM that it and its helpers import."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if importlib.util.find_spec("vllm") is None:
        _stand_in()
    helpers = path.with_name("triton_attention_helpers.py")
    if helpers.is_file() and _HELPERS not in sys.modules:
        _load(_HELPERS, helpers)
    return getattr(_load(_MODULES[0], path), _FUNCTION)


def _load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _KvQuantMode(enum.IntEnum):
    """What the file asks of the mode of an unquantised cache."""

    NONE = 0

    @property
    def is_per_token_head(self) -> bool:
        return False


class _Platform:
    """An NVIDIA GPU, as far as the kernel asks: every `is_...()` but `is_cuda()` is False."""

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def is_cuda(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *args: False
        raise AttributeError(name)


def _stand_in() -> None:
    import logging

    triton = importlib.import_module("triton")
    language = importlib.import_module("triton.language")
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__path__": []},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": language},
        "vllm.v1": {"__path__": []},
        "vllm.v1.attention": {"__path__": []},
        "vllm.v1.attention.ops": {"__path__": []},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _KvQuantMode},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
