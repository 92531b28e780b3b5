"""What the backend tells vLLM about itself, and which configurations it takes. vLLM asks before it makes a layer."""

import inspect
from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from uniattn.attention import write_kv
from uniattn.errors import UniattnError
from uniattn.integrations.vllm.impl import UniattnImpl
from uniattn.integrations.vllm.metadata import UniattnMetadataBuilder
from uniattn.integrations.vllm.releases import CacheLayout
from uniattn.launch import triton_version
from uniattn.problem.validate import MAX_HEAD_DIM_V, MIN_HEAD_DIM

# Whether this version's operator writes and reads fp8 caches.
FP8_CACHES = "k_scale" in inspect.signature(write_kv).parameters
_FP8_DTYPES = ["fp8", "fp8_e4m3", "fp8_e5m2"] if FP8_CACHES else []
_CACHE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class UniattnBackend(CacheLayout, AttentionBackend):
    """uniattn in vLLM's list of backends, as CUSTOM and, where vLLM lets a plugin add a name, UNIATTN."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *_CACHE_DTYPES, *_FP8_DTYPES]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        """vLLM looks the name up in its enumeration."""
        return "UNIATTN" if "UNIATTN" in AttentionBackendEnum.__members__ else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[UniattnImpl]:
        """The attention of one layer."""
        return UniattnImpl

    @staticmethod
    def get_builder_cls() -> type[UniattnMetadataBuilder]:
        """The maker of a step's metadata."""
        return UniattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens a page: multiples of 16, powers of two or not. The operator takes any, but some releases choose the smallest
        size named here for sliding-window layers, and pages of one token cost a table entry each."""
        return [MultipleOf(16)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """As `get_supported_kernel_block_sizes` says."""
        return block_size is None or block_size % 16 == 0

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """What the operator takes for K and V alike."""
        return MIN_HEAD_DIM <= head_size <= MAX_HEAD_DIM_V

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Asked from 0.26 on."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Batches that are not causal, as a whole or sequence by sequence."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """Scales of an fp8 cache for each KV head."""
        return FP8_CACHES

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders, encoders, and both."""
        return attn_type in {
            AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER,
        }  # fmt: skip

    @classmethod
    def validate_configuration(cls, **configuration: Any) -> list[str]:
        """Reasons against a configuration, none where it is fine; vLLM puts them into the error that it stops with.

        What vLLM itself asks of every backend (by the methods above; masks for image tokens, scales for each token, batch
        invariance and the like answer no there) comes first.
        """
        return super().validate_configuration(**configuration) + list(_reasons(**configuration))


def _reasons(*, dtype: torch.dtype, kv_cache_dtype: str | None, head_size: int, device_capability: Any, **configuration: Any) -> list[str]:
    """What only uniattn knows."""
    reasons = []
    if not UniattnBackend.supports_head_size(head_size):
        reasons.append(f"uniattn's head sizes are {MIN_HEAD_DIM} to {MAX_HEAD_DIM_V}, not {head_size}")
    if not current_platform.is_cuda_alike():
        return [*reasons, "uniattn's kernels run on NVIDIA and AMD GPUs"]
    try:
        triton_version.require()
    except UniattnError as error:
        reasons.append(str(error))
    cache_dtype = _CACHE_DTYPES.get(kv_cache_dtype or "auto", dtype)
    if cache_dtype is not dtype:
        reasons.append(f"a cache of {kv_cache_dtype} under a model of {dtype} (uniattn wants one dtype; --kv-cache-dtype auto)")
    if current_platform.is_cuda() and dtype is torch.bfloat16 and next(iter(device_capability)) < 8:
        reasons.append("bfloat16 needs compute capability 8.0; --dtype float16")
    return reasons
