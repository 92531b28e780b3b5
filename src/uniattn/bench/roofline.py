"""What a batch costs at least: arithmetic and bytes from its actual lengths, against the card's peaks.

Every visible K and V element is read once, q read and out written once. A visible (query, key) pair costs 4 floating-point
operations a head and dim: a multiply and an add for the score, and again for the output.
"""

from __future__ import annotations

from dataclasses import dataclass

from uniattn.bench.workloads import Workload

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Peaks:
    """A card's limits: dense 16-bit matrix product in FLOP/s, memory in bytes/s, and where the two numbers come from."""

    flops: float
    bytes: float
    source: str


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes of one call."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    def floor_us(self, peaks: Peaks) -> float:
        """Microseconds that no call can go below: the slower of arithmetic and bytes, the other hidden under it."""
        return max(self.flops / peaks.flops, self.bytes / peaks.bytes) * 1e6


# The H200's numbers are measured (a large matrix product, a large copy); the others are 0.8 of the maker's figures for the dense
# product and 0.9 for the memory, about what a good kernel reaches. `--measure-peaks` replaces them.
_BY_NAME = (
    ("H200", 790e12, 4.3e12, "measured on an H200"),
    ("H100 PCIe", 0.8 * 756e12, 0.9 * 2.0e12, "data sheet, scaled"),
    ("H100", 0.8 * 989e12, 0.9 * 3.35e12, "data sheet, scaled"),
    ("B200", 0.8 * 2250e12, 0.9 * 8.0e12, "data sheet, scaled"),
    ("A100-SXM4-80GB", 0.8 * 312e12, 0.9 * 2.04e12, "data sheet, scaled"),
    ("A100", 0.8 * 312e12, 0.9 * 1.55e12, "data sheet, scaled"),
    ("L40S", 0.8 * 362e12, 0.9 * 0.864e12, "data sheet, scaled"),
    ("RTX 4090", 0.8 * 165e12, 0.9 * 1.008e12, "data sheet, scaled"),
    ("MI300X", 0.8 * 1307e12, 0.8 * 5.3e12, "data sheet, scaled"),
    ("MI355X", 0.8 * 2500e12, 0.8 * 8.0e12, "data sheet, scaled"),
)


def known_peaks(card: str) -> Peaks | None:
    """Peaks of a card by the name that its driver tells; None for a card that is not in the list."""
    return next((Peaks(flops, byte, source) for name, flops, byte, source in _BY_NAME if name in card), None)


def visible_pairs(q_len: int, kv_len: int, window: tuple[int, int] | None) -> int:
    """(query, key) pairs that a causal sequence computes; the query token at position `i` sees `[i - left, i]`."""
    first = kv_len - q_len  # position of the first query token
    if window is None:
        return _sum_to(kv_len) - _sum_to(first)
    span = window[0] + 1
    # Positions below `span - 1` see all before them, the others `span` keys.
    short = min(max(span - 1 - first, 0), q_len)
    return _sum_to(first + short) - _sum_to(first) + (q_len - short) * span


def visible_keys(q_len: int, kv_len: int, window: tuple[int, int] | None) -> int:
    """Keys of a causal sequence that some query token sees."""
    if window is None:
        return kv_len
    return kv_len - max(0, kv_len - q_len - window[0])


def cost(w: Workload) -> Cost:
    """Arithmetic and bytes of one call on `w`."""
    pairs = sum(visible_pairs(q_len, kv_len, w.window) for q_len, kv_len in w.lengths)
    keys = sum(visible_keys(q_len, kv_len, w.window) for q_len, kv_len in w.lengths)
    elements = 2 * keys * w.num_kv_heads * w.head_dim + 2 * w.num_tokens * w.num_q_heads * w.head_dim
    return Cost(4.0 * pairs * w.num_q_heads * w.head_dim, float(elements * _ITEMSIZE[w.dtype]))


def _sum_to(n: int) -> int:
    """1 + 2 + ... + n."""
    return n * (n + 1) // 2
