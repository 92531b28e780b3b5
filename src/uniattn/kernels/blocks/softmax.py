"""Online softmax in base 2. Scores come times `scale` = softmax_scale * log2(e), so that one multiply-add feeds exp2.

The running maximum is stored true, -inf included; only the pivot that is subtracted is made finite. (A maximum clamped in storage
gives 0/0 when a fully masked block precedes very negative scores.)
"""

import triton
import triton.language as tl


@triton.jit
def online_step(scores, row_max, row_sum, scale):
    """`(p, correction, row_max, row_sum)` after the block `scores` `[rows, tokens]`.

    `correction` scales what was accumulated before the block.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores * scale - (pivot * scale)[:, None])
    # Exactly 1 where the maximum stays: row_max * scale - pivot * scale would be contracted to a fused multiply-add, whose error of
    # 2e-7 has one sign and compounds with every block (2e-5 in the LSE after 94 blocks).
    correction = tl.exp2((row_max - pivot) * scale)
    return p, correction, new_max, row_sum * correction + tl.sum(p, 1)


@triton.jit
def with_sink(acc, row_max, row_sum, sink):
    """Add a key of score `sink` and no value; `row_max` and `sink` in base-2 units, -inf is no sink."""
    new_max = tl.maximum(row_max, sink)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    correction = tl.exp2(row_max - pivot)
    return acc * correction[:, None], new_max, row_sum * correction + tl.exp2(sink - pivot)


@triton.jit
def finalize(acc, row_max, row_sum):
    """`(out, lse)`: normalised output and natural-log LSE; a row that saw nothing gives 0 and -inf."""
    empty = row_sum == 0.0
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    lse = (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) * 0.6931471805599453
    return out, tl.where(empty, float("-inf"), lse)
