"""Compare a result with the float64 oracle. How far it may be off is derived from the batch itself, not guessed.

The yardstick is *eager attention*: the same batch computed step by step in the input dtype, as a model's plain code does. A
fused kernel rounds less often than that, so for each sequence the output may be off by

    FACTOR * (largest error of eager attention in this sequence)
    + 2 * u(dtype) * (largest output of the row)            the weights and the output are each rounded to the dtype once
    + SCORE_ROUNDINGS * u(fp32) * (largest score + softcap) * (largest value)      scores are fp32 whatever the dtype is

where `u` is the unit roundoff and the largest score is the largest `scale * sum_d |q_d k_d|` plus ALiBi's part: terms that cancel
leave their roundings behind. The LSE never passes through the input dtype, so its yardstick is eager attention in fp32, and

    FACTOR * (largest error) + SCORE_ROUNDINGS * u(fp32) * (largest score + softcap) + 2 * u(fp32) * |LSE| + LOG_ERROR

is allowed. Eager error alone would not do: over two or three keys it is 0 by luck, and `torch.tanh` is better than a tanh made of
exponentials, whose absolute error of one roundoff is multiplied by `softcap`. NaN never passes; -inf must be -inf.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uniattn import reference
from uniattn.testing.batches import Batch

# FlashAttention's tests and others settled on 2: errors of two correct orders of summation differ by less.
FACTOR = 2.0
# Roundings that a score goes through in fp32: the dot product's own, the scale, the change of base for exp2, the pivot.
SCORE_ROUNDINGS = 4.0

# A GPU's fast base-2 logarithm (PTX lg2.approx) is this far off near 1, in absolute terms.
LOG_ERROR = 2.0**-22


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Oracle:
    """What is right for a batch, and how far from it a result may be: float64, shaped as the result's `out` and `lse`."""

    out: Tensor
    lse: Tensor
    out_allowed: Tensor
    lse_allowed: Tensor


def oracle(batch: Batch, **changes: Any) -> Oracle:
    """The oracle's result for `batch` with `changes` laid over its arguments, with the allowance of each element."""
    kwargs = batch.kwargs(**changes)
    out, lse = reference.attention(**kwargs)
    in_dtype, in_fp32 = _eager(kwargs, batch.dtype), _eager(kwargs, torch.float32)
    out_allowed, lse_allowed = torch.zeros_like(out), torch.zeros_like(lse)
    u, u32 = unit_roundoff(batch.dtype), unit_roundoff(torch.float32)
    starts = batch.cu_seqlens_q.tolist()
    for seq in range(len(starts) - 1):
        rows = slice(starts[seq], starts[seq + 1])
        if starts[seq] == starts[seq + 1]:
            continue
        score = SCORE_ROUNDINGS * u32 * (in_fp32.max_score[seq] + kwargs.get("softcap", 0.0))
        error = (in_dtype.out[rows].double() - out[rows]).abs().max()
        out_allowed[rows] = FACTOR * error + score * in_fp32.max_value[seq] + 2 * u * out[rows].abs().amax(-1, keepdim=True)
        seen = lse[:, rows].isfinite()
        error = torch.where(seen, in_fp32.lse[:, rows].double() - lse[:, rows], 0.0).abs().max()
        lse_allowed[:, rows] = torch.where(seen, FACTOR * error + score + 2 * u32 * lse[:, rows].abs() + LOG_ERROR, 0.0)
    return Oracle(out, lse, out_allowed, lse_allowed)


def assert_matches_oracle(batch: Batch, out: Tensor, lse: Tensor | None = None, **changes: Any) -> None:
    """Fail, saying where and by how much, unless `out` (and `lse`) are what `attention(**batch.kwargs(**changes))` must be."""
    right = oracle(batch, **changes)
    assert out.dtype == batch.dtype, f"out is {out.dtype}, q is {batch.dtype}"
    assert_within(out, right.out, right.out_allowed, lambda i: f"out of {batch.where(i[0])}, head {i[1]}, dim {i[2]}")
    if lse is not None:
        assert lse.dtype == torch.float32, f"lse is {lse.dtype}, it must be torch.float32"
        assert_within(lse, right.lse, right.lse_allowed, lambda i: f"LSE of {batch.where(i[1])}, head {i[0]}")


def assert_within(got: Tensor, want: Tensor, allowed: Tensor | float, describe: Callable[[list[int]], str] = str) -> None:
    """Fail unless `|got - want| <= allowed` everywhere. NaN in `got` fails; infinities must be equal.

    `describe` turns the index of an element into words for the message.
    """
    assert got.shape == want.shape, f"shape is {tuple(got.shape)}, it must be {tuple(want.shape)}"
    got64, want64 = got.double(), want.double()
    allowed = torch.as_tensor(allowed, dtype=torch.float64, device=want.device).expand(want.shape)
    right = torch.where(want64.isinf(), got64 == want64, (got64 - want64).abs() <= allowed)
    if bool(right.all()):
        return
    # The first NaN if there is one, else the element that is furthest off for its allowance.
    excess = torch.where(right, -1.0, (got64 - want64).abs() / allowed.clamp_min(1e-300))
    worst = int(torch.where(excess.isnan(), torch.inf, excess).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape)]
    at = tuple(index)
    raise AssertionError(
        f"{int((~right).sum())} of {want.numel()} elements are wrong ({int(got64.isnan().sum())} NaN); worst, {describe(index)}:"
        f" got {got64[at].item():.9g}, want {want64[at].item():.9g}, off by {abs(got64[at] - want64[at]).item():.3g},"
        f" allowed {allowed[at].item():.3g}"
    )


@dataclass(frozen=True)
class _Eager:
    out: Tensor
    lse: Tensor
    max_score: list[float]  # one a sequence: the largest score that a query sees, its terms added without their signs
    max_value: list[float]  # one a sequence: the largest |v| among the keys read


def _eager(kwargs: dict[str, Any], dtype: torch.dtype) -> _Eager:
    """Attention with every step's result rounded to `dtype` (the softmax inside is fp32, as in transformers' eager code)."""
    q, k_cache, v_cache = (kwargs[name].to(dtype) if name == "q" else kwargs[name] for name in ("q", "k_cache", "v_cache"))
    page_table, cu_seqlens_k, causal = kwargs["page_table"], kwargs["cu_seqlens_k"], kwargs["causal"]
    group = q.shape[1] // k_cache.shape[-2]
    scale = kwargs.get("softmax_scale")
    scale = q.shape[2] ** -0.5 if scale is None else scale
    softcap, sinks, slopes = kwargs.get("softcap", 0.0), kwargs.get("sinks"), kwargs.get("alibi_slopes")
    starts, kv_lens = kwargs["cu_seqlens_q"].tolist(), reference.sequence_lengths(kwargs["seqlens_k"], cu_seqlens_k)
    out = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
    max_score, max_value = [], []
    for seq, kv_len in enumerate(kv_lens):
        rows, q_len = slice(starts[seq], starts[seq + 1]), starts[seq + 1] - starts[seq]
        causal_here = bool(causal[seq]) if isinstance(causal, Tensor) else causal
        sees = reference.visible(q_len, kv_len, causal_here, kwargs.get("window"), q.device)
        sees[:, reference.num_stored(seq, kv_len, k_cache, page_table, cu_seqlens_k) :] = False
        keys = sees.any(dim=0).nonzero().flatten()
        sees = sees[:, keys]
        where = reference.locate(seq, keys, kv_lens, k_cache, page_table, cu_seqlens_k)
        k, v = (cache[where].to(dtype).repeat_interleave(group, dim=1).transpose(0, 1) for cache in (k_cache, v_cache))
        scores = (q[rows].transpose(0, 1) @ k.transpose(1, 2)) * scale
        terms = (q[rows].transpose(0, 1).abs() @ k.transpose(1, 2).abs()) * abs(scale)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            distance = (torch.arange(q_len, device=q.device)[:, None] + kv_len - q_len - keys).abs()
            scores = scores - slopes.to(dtype)[:, None, None] * distance.to(dtype)
            terms = terms + (slopes.to(dtype)[:, None, None] * distance.to(dtype)).abs()
        max_score.append(float(terms.masked_fill(~sees, 0).max()) if terms.numel() else 0.0)
        max_value.append(float(v.abs().max()) if v.numel() else 0.0)
        scores = scores.masked_fill(~sees, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(-1, q_len, 1)], dim=-1)
        lse[:, rows] = torch.logsumexp(scores.float(), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).nan_to_num(0.0).to(dtype)
        out[rows] = (weights[..., : len(keys)] @ v).transpose(0, 1)
    return _Eager(out, lse, max_score, max_value)
