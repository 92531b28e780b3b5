"""The one merge formula on the device: splits of one launch, cascade levels, context-parallel parts.

out = sum_s w_s out_s / sum_s w_s and lse = log sum_s exp(lse_s), with w_s = exp(lse_s - max lse).
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_parts", "num_tokens", "num_heads"])
def merge_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, outs_strides, lses_strides, out_strides, lse_strides, num_parts, num_tokens, num_heads,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid: num_tokens * num_heads programs. Strides in elements: outs part, token, head; lses part, head, token; out token,
    head; lse head, token. BLOCK_P parts are loaded at once. A part of LSE -inf may hold anything, NaN included."""
    pid = tl.program_id(0)
    head = (pid % num_heads).to(tl.int64)
    token = (pid // num_heads).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    top = float("-inf")
    total = 0.0
    for first in range(0, num_parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        lse_offset = part.to(tl.int64) * lses_strides[0] + head * lses_strides[1] + token * lses_strides[2]
        lse = tl.load(lses_ptr + lse_offset, mask=part < num_parts, other=float("-inf"))
        counts = lse > float("-inf")
        out_offset = part.to(tl.int64) * outs_strides[0] + token * outs_strides[1] + head * outs_strides[2]
        outs = tl.load(outs_ptr + out_offset[:, None] + d[None, :], mask=counts[:, None] & (d < DIM)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        correction = tl.exp2((top - pivot) * 1.4426950408889634)
        weight = tl.exp2((lse - pivot) * 1.4426950408889634)
        acc = acc * correction + tl.sum(outs.to(tl.float32) * weight[:, None], 0)
        total = total * correction + tl.sum(weight, 0)
        top = new_top
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    merged_out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_strides[0] + head * out_strides[1] + d, merged_out, mask=d < DIM)
    if lse_ptr is not None:
        merged_lse = tl.where(empty, float("-inf"), top + tl.log2(total) * 0.6931471805599453)
        tl.store(lse_ptr + head * lse_strides[0] + token * lse_strides[1], merged_lse)
