"""Launch of the Hopper kernel."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from uniattn.kernels.hopper.attend import attend_kernel
from uniattn.launch import tensor_map
from uniattn.launch.cache import Kernels, Source
from uniattn.launch.target import on_index
from uniattn.problem.layout import UNBOUNDED
from uniattn.schedule import hopper
from uniattn.schedule.plan import PlanSpec

# Of 504 registers for a thread of each of the three warpgroups. With 232 and 40 the consumers spilled 20 times in a loop of 480.
_CONSUMER_REGISTERS, _LOADER_REGISTERS = 240, 24
_Q_WARPS = 2


class Key(NamedTuple):
    """All that the kernel's binary depends on; fields as in `launch.attend.Key`."""

    device: int
    dtype: torch.dtype
    page_table: torch.dtype
    causal_per_seq: torch.dtype | None
    sinks: torch.dtype | None
    has_lse: bool
    has_partials: bool
    causal: bool
    has_window: bool
    has_softcap: bool
    head_dim: int
    v_head_dim: int
    group: int
    page_size: int
    block_n: int
    kv_stages: int


def source(key: Key) -> Source:
    """What is compiled for a key, or for its plain tuple."""
    from triton.experimental.gluon import language as gl

    k = Key(*key)
    d, dv = hopper.padded(k.head_dim), hopper.padded(k.v_head_dim)
    box = hopper.box_tokens(k.page_size, k.block_n)
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[k.dtype]
    partials = torch.float32 if k.has_partials else None
    elements = 16 // k.dtype.itemsize

    def descriptor(dim: int) -> str:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, dim * k.dtype.itemsize), element_bitwidth=16, rank=4)
        return f"tensordesc<{name}[1, 1, {box}, {dim}],{layout!r}>"

    return Source(
        device=k.device,
        pointers=dict(
            q_ptr=k.dtype, out_ptr=k.dtype, lse_ptr=torch.float32 if k.has_lse else None, partial_out_ptr=partials,
            partial_lse_ptr=partials, items_ptr=torch.int32, page_table_ptr=k.page_table, causal_ptr=k.causal_per_seq,
            sinks_ptr=k.sinks,
        ),
        descriptors=dict(k_desc=descriptor(d), v_desc=descriptor(dv)),
        numbers=dict(
            q_strides=("i32",) * 2, out_strides=("i64",) * 2,
            **dict.fromkeys(
                ("page_table_stride", "first_counter", "num_pages", "kv_capacity", "num_tokens", "num_seqs", "num_kv_heads",
                 "window_left", "window_right"), "i32",
            ),
            scale="fp32", softcap="fp32",
        ),
        constants=dict(
            CAUSAL=k.causal, HEAD_DIM=k.head_dim, V_HEAD_DIM=k.v_head_dim, D=d, DV=dv, GROUP=k.group, PAGE_SIZE=k.page_size,
            HAS_WINDOW=k.has_window, HAS_SOFTCAP=k.has_softcap, BLOCK_N=k.block_n, BOX=box, KV_STAGES=k.kv_stages,
            Q_STAGES=hopper.q_stages(k.head_dim, k.v_head_dim), Q_WARPS=_Q_WARPS, CONSUMER_REGS=_CONSUMER_REGISTERS,
            LOADER_REGS=_LOADER_REGISTERS,
        ),
        divisors=dict(
            partial_out_ptr=16, partial_lse_ptr=16, q_ptr=16, out_ptr=16, q_strides=elements, out_strides=elements
        ),
        options=dict(num_warps=4),
    )  # fmt: skip


KERNELS = Kernels(attend_kernel, source)


def attend(
    spec: PlanSpec, items: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, causal: bool,
    causal_per_seq: Tensor | None, scale: float, softcap: float, sinks: Tensor | None, kv_capacity: int, out: Tensor,
    lse: Tensor | None, partial_out: Tensor | None, partial_lse: Tensor | None,
) -> None:  # fmt: skip
    """Launch the kernel; arguments as in `launch.attend`, `scale` and `softcap` in base 2."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, v_head_dim = v_cache.shape
    index = q.get_device()
    key: tuple[Any, ...] = (
        index, q.dtype, page_table.dtype, None if causal_per_seq is None else causal_per_seq.dtype,
        None if sinks is None else sinks.dtype, lse is not None, partial_out is not None, causal, spec.window_left != UNBOUNDED,
        softcap > 0, head_dim, v_head_dim, num_q_heads // num_kv_heads, page_size, spec.block_n, spec.num_stages,
    )  # fmt: skip
    box = hopper.box_tokens(page_size, spec.block_n)
    with on_index(index):
        KERNELS[key](
            (min(spec.num_slots, spec.num_records), 1, 1),
            (q, out, lse, partial_out, partial_lse, items, page_table, causal_per_seq, sinks),
            (
                *tensor_map.of_cache(k_cache, box, hopper.padded(head_dim)),
                *tensor_map.of_cache(v_cache, box, hopper.padded(v_head_dim)),
                *q.stride()[:2], *out.stride()[:2], page_table.stride(0), spec.first_counter, num_pages, kv_capacity,
                num_tokens, spec.num_seqs, num_kv_heads, spec.window_left, spec.window_right, scale, softcap,
            ),
        )  # fmt: skip
