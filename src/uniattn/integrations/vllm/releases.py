"""What changed between vLLM's releases, as far as the backend meets it.

| release | change | where it is met |
|---|---|---|
| 0.24 | a batch's `causal` may be a tensor, one flag a sequence | `steps.py` |
| 0.26 | the cache packs K and V, `[B, H, N, D + Dv]` in place of `[B, 2, N, H, D]` | `pages` |
| 0.26 | a backend must say that it knows sliding windows | `backend.py` |
| 0.25 to 0.29 | models with R-SWA reach a backend that was never asked | `metadata.py` |
| 0.28 | query lengths on the device may exceed those on the host | `metadata.py` |
| 0.29 | a backend no longer gives the cache's shape and order | `CacheLayout` |
| 0.29 | the functions of decode context parallelism moved | `context_parallel_combine` |
| 0.32 | a plugin may add a name | `register` |

Keywords that `validate_configuration` gained are passed on as they come, and hooks that only some releases call may stand
everywhere. `scripts/check_vllm_contract.py` holds all of this against a release's own files.
"""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

OLDEST, NEWEST = (0, 20), (0, 33)


def unknown_release() -> str:
    """Why this release of vLLM is not served; empty where it is."""
    version = str(import_module("vllm").__version__)
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is not None and OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return f"this uniattn knows vLLM {oldest} to {newest}, not {version}; install a uniattn that does, or use another backend"


def pages(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer's cache as uniattn takes them, `[num_pages, page_size, num_kv_heads, dim]` each."""
    if kv_cache.ndim == 5:
        k, v = kv_cache.unbind(1)
        return k, v
    packed = kv_cache.transpose(1, 2)
    return packed[..., :head_dim], packed[..., head_dim:]


class CacheLayout:
    """The cache's shape and order in memory, which a backend gave until 0.28: those of vLLM's own Triton backend in each release.

    uniattn reads any strides, so that it follows every choice of the user and of vLLM's KV connectors.
    """

    @staticmethod
    def get_kv_cache_shape(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        """Sizes of one layer's cache."""
        return _triton_backend().get_kv_cache_shape(*args, **kwargs)

    @staticmethod
    def get_kv_cache_stride_order(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        """Its dims in their order in memory."""
        return _triton_backend().get_kv_cache_stride_order(*args, **kwargs)


def _triton_backend() -> Any:
    return import_module("vllm.v1.attention.backends.triton_attn").TritonAttentionBackend


def context_parallel_combine(all_to_all: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """What merges the ranks' results for gathered query heads and gives each rank its own heads back, with their LSE."""
    name = "dcp_a2a_lse_reduce" if all_to_all else "cp_lse_ag_out_rs"
    try:
        module = import_module("vllm.v1.attention.ops.dcp")
    except ImportError:
        module = import_module("vllm.v1.attention.ops.dcp_alltoall" if all_to_all else "vllm.v1.attention.ops.common")
    return getattr(module, name)
