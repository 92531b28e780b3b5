"""Times of peers on one H200, measured before, for runs where FlashAttention-3 alone is there to compare with.

FlashInfer and FlashAttention-4 need a compiler and long first calls, so they are not always beside. On a row where they were not
run, what they would take is estimated: their recorded time, scaled by what FlashAttention-3 takes now over what it took then.
"""

from __future__ import annotations

CARD = "H200"
SCALED_BY = "fa3"

# Microseconds by row: FA3, FlashInfer, FA4. bf16, head_dim 128, page 16, CUDA graph replay with the L2 cache flushed.
_TIMES = {
    "decode 1 x 512": (14.8, 12.8, 15.4),
    "decode 1 x 8192": (24.6, 25.5, 117),
    "decode 1 x 131072": (160.6, 149.8, 1708),
    "decode 8 x 4096": (51.9, 52.6, 70.6),
    "decode 32 x 2048": (81.8, 80.5, 88.7),
    "decode 64 x 8192": (489.6, 502.8, 563.6),
    "decode 256 x 1024": (282.1, 272.2, 379.1),
    "decode 64, lengths 128-16384": (526.3, 571.8, 634.4),
    "decode 64 x 4096, heads 8/1": (53.0, 53.3, 70.3),
    "decode 16 x 4096, heads 32/32": (256.8, 263.2, 289.1),
    "prefill 1 x 512": (20.7, 18.5, 17.8),
    "prefill 1 x 2048": (77.5, 94.6, 79.6),
    "prefill 4 x 2048": (269.6, 303.8, 287.6),
    "prefill 1 x 8192": (866, 982, 912),
    "prefill 1 x 32768": (14398, 16286, 14639),
    "prefill 16 x 512": (138.6, 144.2, 155.0),
    "chunk 2048 of 32768": (1566, 1936, 1817),
    "chunk 512 of 131072": (1654, 1860, 1782),
    "63 decodes (256-4096) + prefill 1985": (222.1, 267.7, 261.8),
    "120 decodes (256-8192) + 8072 of 16264": (2920, 5084, 3245),
    "15 decodes (256-2048) + prefill 497": (41.9, 49.4, 42.9),
    "64 x 5 queries at 4096": (263.3, 283.0, 300.2),
    "8 x 8 queries at 8192": (82.6, 93.3, 126.8),
}
LABELS = {"flashinfer": "FlashInfer", "fa4": "FlashAttention-4"}


def estimates(row: str, card: str, fa3_us: float) -> dict[str, float]:
    """Microseconds that recorded peers would take on `row` now, by key; empty for another card or an unknown row."""
    if CARD not in card or row not in _TIMES:
        return {}
    then, *others = _TIMES[row]
    return {key: us * fa3_us / then for key, us in zip(LABELS, others, strict=True)}
