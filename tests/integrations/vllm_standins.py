"""Stand-ins for the parts of vLLM that the backend meets, so that its own logic can be tested without vLLM.

Each `Release` is built from facts of a real one, as far as releases differ for the backend; `scripts/check_vllm_contract.py` holds
those facts against the releases' own files. Nothing here computes attention.
"""

import enum
import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PACKAGE = "uniattn.integrations.vllm"


@dataclass(frozen=True)
class Release:
    """One release as the backend sees it.

    Attributes:
        layouts: memory layouts of the cache that users of it have, by the names of `uniattn.testing.make_batch`.
        gives_shape: whether a backend gives the cache's shape.
        asks: what `validate_configuration` asks beyond the first releases.
        dcp_module: where the functions of decode context parallelism are.
        adds_names: whether a plugin may add a name to the registry.
    """

    version: str
    layouts: tuple[str, ...]
    gives_shape: bool
    asks: tuple[str, ...]
    dcp_module: str
    adds_names: bool = False

    def __str__(self) -> str:
        return self.version


SPLIT, PACKED = ("interleaved",), ("packed", "packed_hnd")
RELEASES = (
    Release("0.22.1", SPLIT, True, (), "common"),
    Release("0.25.1", SPLIT, True, ("mm_prefix",), "common"),
    Release("0.26.0", PACKED, True, ("mm_prefix", "sliding_window", "pcp"), "common"),
    Release("0.29.0", PACKED, False, ("mm_prefix", "sliding_window", "pcp", "adaptive_verification"), "dcp"),
    Release("0.33.0", PACKED, False, ("mm_prefix", "sliding_window", "pcp", "adaptive_verification", "rswa", "dcp"), "dcp", True),
)


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = (2, 1)

    def mixed_mode(self) -> "CUDAGraphMode":
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self


@dataclass(frozen=True)
class MultipleOf:
    base: int


def make_backend(release: Release) -> type:
    """The base class of backends: every question of `validate_configuration` that the release asks, answered as it answers."""

    class AttentionBackend(ABC):  # noqa: B024
        supported_dtypes = (torch.float16, torch.bfloat16)
        supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
        forward_includes_kv_cache_update = True

        @classmethod
        def supports_dtype(cls, dtype):
            return dtype in cls.supported_dtypes

        @classmethod
        def supports_kv_cache_dtype(cls, kv_cache_dtype):
            return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

        @classmethod
        def supports_compute_capability(cls, capability):
            return True

        @classmethod
        def validate_configuration(cls, **c: Any) -> list[str]:
            reasons = []
            if not cls.supports_head_size(c["head_size"]):
                reasons.append("head_size not supported")
            if not cls.supports_dtype(c["dtype"]):
                reasons.append("dtype not supported")
            if not cls.supports_kv_cache_dtype(c["kv_cache_dtype"]):
                reasons.append("kv_cache_dtype not supported")
            if not cls.supports_block_size(c["block_size"]):
                reasons.append("block_size not supported")
            if not cls.supports_attn_type(c["attn_type"]):
                reasons.append(f"attention type {c['attn_type']} not supported")
            questions = {"has_sink": "attention sinks", "use_non_causal": "non-causal attention", "use_mla": "MLA",
                         "use_sparse": "sparse", "use_batch_invariant": "batch invariance", "use_mm_prefix": "image ranges",
                         "use_per_head_quant_scales": "per-head quant scales"}  # fmt: skip
            questions |= {f"use_{name}": name for name in release.asks if name not in ("mm_prefix", "sliding_window")}
            questions |= {"has_sliding_window": "sliding window"} if "sliding_window" in release.asks else {}
            for key, words in questions.items():
                name = key.removeprefix("use_").removeprefix("has_")
                if c.get(key) and not getattr(cls, f"supports_{name}", lambda: False)():
                    reasons.append(f"{words} not supported")
            return reasons

        if release.gives_shape:

            @staticmethod
            @abstractmethod
            def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ...

        if "adaptive_verification" in release.asks:

            @classmethod
            def supports_adaptive_verification(cls):
                return True

        if "dcp" in release.asks:

            @classmethod
            def supports_dcp(cls):
                return cls.get_impl_cls().supports_dcp

    return AttentionBackend


class AttentionMetadataBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold = None
    supports_update_block_table = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True)


class AttentionImpl(ABC):
    can_return_lse_for_decode = False
    supports_dcp = False
    lse_base_on_e = True

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        group = sys.modules["vllm.distributed.parallel_state"].get_dcp_group()
        self.dcp_world_size, self.dcp_rank = group.world_size, group.rank_in_group
        return self

    @abstractmethod
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
                 kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None): ...  # fmt: skip

    @abstractmethod
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None): ...

    def fused_output_quant_supported(self, quant_key):
        return False


class TritonAttentionBackend:
    """vLLM's own, for the shape of its cache."""

    release: Release

    @classmethod
    def get_kv_cache_shape(cls, num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        if cls.release.layouts == SPLIT:
            return num_blocks, 2, block_size, num_kv_heads, head_size
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension=False):
        if cls.release.layouts == SPLIT:
            return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)


def make_registry(release: Release) -> ModuleType:
    """`AttentionBackendEnum` and `register_backend`, which notes class paths in `overrides`."""

    class AttentionBackendEnum(enum.Enum):
        TRITON_ATTN = "vllm...TritonAttentionBackend"
        CUSTOM = None

        if release.adds_names:

            @classmethod
            def register(cls, name, value):
                if name in cls._member_map_:
                    raise ValueError(f"Backend {name} already exists")
                member = object.__new__(cls)
                member._name_, member._value_ = name, value
                setattr(cls, name, member)
                cls._member_map_[name] = member
                return member

    registry = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum, registry.overrides = AttentionBackendEnum, {}

    def register_backend(backend, class_path):
        if isinstance(backend, str):
            backend = AttentionBackendEnum.register(backend, class_path)
        registry.overrides[backend.name] = class_path

    registry.register_backend = register_backend
    return registry


def install(release: Release, monkeypatch) -> SimpleNamespace:
    """Put the release's stand-ins where `import vllm...` finds them, and import the backend afresh on them.

    Returns the backend's modules by name, with `vllm` (its stand-in modules by name) beside them.
    """
    registry = make_registry(release)
    triton_backend = type("TritonAttentionBackend", (TritonAttentionBackend,), {"release": release})
    platform = SimpleNamespace(is_cuda_alike=lambda: True, is_cuda=lambda: True, fp8_dtype=lambda: torch.float8_e4m3fn)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": release.version},
        "vllm.platforms": {"current_platform": platform},
        "vllm.distributed.parallel_state": {"get_dcp_group": lambda: SimpleNamespace(world_size=1, rank_in_group=0)},
        "vllm.v1.attention.backend": {
            "AttentionBackend": make_backend(release),
            **{c.__name__: c for c in (AttentionImpl, AttentionMetadataBuilder, AttentionType, AttentionCGSupport, MultipleOf)},
        },
        "vllm.v1.attention.backends.registry": vars(registry),
    }
    if release.gives_shape:
        contents["vllm.v1.attention.backends.triton_attn"] = {"TritonAttentionBackend": triton_backend}
    if release.dcp_module == "dcp":
        contents["vllm.v1.attention.ops.dcp"] = {}
    else:
        contents |= {"vllm.v1.attention.ops.common": {}, "vllm.v1.attention.ops.dcp_alltoall": {}}
    names = {".".join(name.split(".")[:n]) for name in contents for n in range(1, name.count(".") + 2)}
    modules = {name: ModuleType(name) for name in sorted(names)}
    for name, module in modules.items():
        module.__path__ = []
        vars(module).update({k: v for k, v in contents.get(name, {}).items() if k not in ("__name__", "__spec__", "__loader__")})
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    for name in [n for n in sys.modules if n == "vllm" or n.startswith(("vllm.", f"{PACKAGE}."))]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return load(modules)


def load(vllm: dict[str, ModuleType]) -> SimpleNamespace:
    """The backend's modules, imported on whatever `vllm` is now."""
    for name in [n for n in sys.modules if n.startswith(f"{PACKAGE}.")]:
        del sys.modules[name]
    names = ("releases", "refused", "steps", "warm", "metadata", "context_parallel", "impl", "backend")
    ours = {name: importlib.import_module(f"{PACKAGE}.{name}") for name in names}
    return SimpleNamespace(plugin=importlib.import_module(PACKAGE), vllm=vllm, **ours)


def make_config(layers: dict[str, Any] | None = None, *, dtype=torch.float32, mode=CUDAGraphMode.FULL_AND_PIECEWISE, **changes):
    """What of a `VllmConfig` the backend reads."""
    config = dict(
        model_config=SimpleNamespace(dtype=dtype),
        attention_config=SimpleNamespace(use_non_causal=False),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, static_forward_context=layers or {}),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, dcp_comm_backend="ag_rs"),
        speculative_config=None,
    )
    return SimpleNamespace(**config | changes)


@dataclass
class Common:
    """A batch as the model runner tells it (`CommonAttentionMetadata`), as far as the backend reads it."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    num_reqs: int = field(init=False)

    def __post_init__(self):
        self.num_reqs = self.seq_lens.shape[0]
