"""Is a provider's output right? Sampled query tokens against the float64 oracle; every element against NaN.

The whole oracle would take minutes on the large batches. Each sampled token becomes a sequence of its own over the same cache, so
that `uniattn.testing.oracle` gives both the right output and how far from it an output may be, by its own derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uniattn.bench.batch import DeviceBatch
from uniattn.bench.workloads import Workload
from uniattn.testing import assert_within, compare


@dataclass(frozen=True)
class Verdict:
    """How far an output is off on the sampled tokens.

    Attributes:
        failure: why it is wrong, None where it is right.
        relative: norm of the error over norm of the right output.
        largest: largest error of an element.
        of_allowed: largest error over what is allowed at its place; more than 1 is wrong.
    """

    failure: str | None
    relative: float
    largest: float
    of_allowed: float


def sample(w: Workload, count: int) -> list[int]:
    """About `count` query tokens of the batch, ascending: half spread over sequences, half over all query tokens.

    The longest and the shortest sequence, the first and the last token are always among them.
    """
    starts = [0]
    for q_len, _ in w.lengths:
        starts.append(starts[-1] + q_len)
    kv_lens = [kv_len for _, kv_len in w.lengths]
    seqs = {kv_lens.index(max(kv_lens)), kv_lens.index(min(kv_lens)), *_spread(len(kv_lens), count // 2)}
    return sorted({starts[seq + 1] - 1 for seq in seqs} | set(_spread(w.num_tokens, count - count // 2)))


def _spread(n: int, count: int) -> list[int]:
    """`count` of `range(n)`, evenly, both ends included."""
    if count >= n:
        return list(range(n))
    return [round(i * (n - 1) / max(count - 1, 1)) for i in range(max(count, 1))]


class Checker:
    """The oracle of one batch, computed once and used for every provider."""

    def __init__(self, batch: DeviceBatch, count: int):
        self._tokens = sample(batch.workload, count)
        self._right = compare.oracle(batch.single_queries(self._tokens))

    def verdict(self, out: Tensor) -> Verdict:
        """Judge `out`, `[num_tokens, num_q_heads, head_dim]`."""
        got, want, allowed = out[self._tokens], self._right.out, self._right.out_allowed
        error = (got.double() - want).abs()
        numbers = (
            float(error.norm() / want.norm().clamp_min(1e-300)),
            float(error.max()),
            float((error / allowed.clamp_min(1e-300)).max()),
        )
        if not bool(torch.isfinite(out).all()):
            return Verdict(f"{int((~torch.isfinite(out)).sum())} elements are NaN or infinite", *numbers)
        try:
            assert_within(got, want, allowed, lambda i: f"query token {self._tokens[i[0]]}, head {i[1]}, dim {i[2]}")
        except AssertionError as failure:
            return Verdict(str(failure), *numbers)
        return Verdict(None, *numbers)
