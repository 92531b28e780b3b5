"""From a product of Q and K to a score in base-2 units: scale, softcap, ALiBi, in this order."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh by one exp: exp overflows to inf and 2 / inf is 0, so large scores saturate at 1 instead of giving NaN.

    Near 0 the difference cancels to an absolute error of 1e-7, which a large softcap multiplies; the series is exact to 2e-7 of x
    there.
    """
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * 0.1333333333))
    return tl.where(square < 0.01, series, 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0))


@triton.jit
def modify(products, scale, softcap, slopes, pos, kv, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr):
    """Scores of `products`; `slopes`, `pos` and `kv` broadcast against it. The factor log2(e) is in the arguments already.

    `scale` is softmax_scale / softcap under a softcap, else softmax_scale * log2(e); `softcap` and `slopes` are times log2(e).
    """
    scores = softcap * tanh(products * scale) if HAS_SOFTCAP else products * scale
    if HAS_ALIBI:
        scores -= slopes * tl.abs(pos - kv).to(tl.float32)
    return scores
