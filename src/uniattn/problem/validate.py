"""What each argument of `uniattn.attention` may be. Raises before anything is launched or written, and reads no device.

It runs at every call, so the path of a right call is a straight line of compares, and messages are made only where one fails.
It also runs inside `torch.compile(fullgraph=True)`; what cannot be traced there (addresses) is in `memory.py`.
`validate_kv.py` does the same for `merge_states` and `write_kv`.
"""

import math

import torch
from torch import Tensor

from uniattn.errors import ArgumentError, UnsupportedError
from uniattn.problem import memory
from uniattn.problem.tensors import FLOATS, check_chip, check_no_grad, describe, floats, ints, strided, vector_fix, wrong_device

MIN_HEAD_DIM = 8
MAX_HEAD_DIM = 576
MAX_HEAD_DIM_V = 512

_Q_DIMS = ("num_tokens", "num_q_heads", "head_dim")
_K_PAGES = ("num_pages", "page_size", "num_kv_heads", "head_dim")
_V_PAGES = ("num_pages", "page_size", "num_kv_heads", "head_dim_v")
_K_TOKENS = ("num_kv_tokens", "num_kv_heads", "head_dim")
_V_TOKENS = ("num_kv_tokens", "num_kv_heads", "head_dim_v")


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    causal: bool | Tensor,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    out: Tensor | None,
    return_lse: bool,
    deterministic: bool,
) -> None:
    """Check the arguments of `uniattn.attention` that this version serves; `unserved` refuses the others."""
    paged = page_table is not None
    q_shape = floats("q", q, _Q_DIMS)
    k_shape = floats("k_cache", k_cache, _K_PAGES if paged else _K_TOKENS)
    v_shape = floats("v_cache", v_cache, _V_PAGES if paged else _V_TOKENS)
    num_q_heads, head_dim = q_shape[1], q_shape[2]
    num_kv_heads, head_dim_v = k_shape[-2], v_shape[-1]
    dtype, device = q.dtype, q.device
    if k_cache.dtype is not dtype or v_cache.dtype is not dtype:
        raise _unequal_dtypes("k_cache" if k_cache.dtype is not dtype else "v_cache", q, k_cache, v_cache)
    if k_cache.device != device:
        raise wrong_device("k_cache", k_cache, device)
    if v_cache.device != device:
        raise wrong_device("v_cache", v_cache, device)
    if (
        k_shape[-1] != head_dim
        or k_shape[0] != v_shape[0]
        or k_shape[1] != v_shape[1]
        or v_shape[-2] != num_kv_heads
        or num_kv_heads == 0
        or num_q_heads == 0
        or num_q_heads % num_kv_heads
    ):
        raise _unmatched_heads(q_shape, k_shape, v_shape)
    head_dims(("q", head_dim), ("v_cache", head_dim_v))

    if not isinstance(cu_seqlens_q, Tensor) or cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape[0] == 0:
        raise ArgumentError(
            "cu_seqlens_q",
            describe(cu_seqlens_q),
            "it must be an int32 tensor [num_seqs + 1] of the offsets of the sequences' query tokens, 0 first",
            vector_fix(cu_seqlens_q, "torch.int32"),
        )
    num_offsets = cu_seqlens_q.shape[0]
    num_seqs = num_offsets - 1
    ints("cu_seqlens_q", cu_seqlens_q, (num_offsets,), "num_seqs + 1", device)
    if seqlens_k is not None:
        ints("seqlens_k", seqlens_k, (num_seqs,), "num_seqs", device)
    elif cu_seqlens_k is None:
        raise ArgumentError(
            "seqlens_k",
            "None, and cu_seqlens_k None too",
            "the KV lengths must come in one of them",
            "pass seqlens_k [num_seqs], int32",
        )
    if cu_seqlens_k is not None:
        ints("cu_seqlens_k", cu_seqlens_k, (num_offsets,), "num_seqs + 1", device)
    if page_table is not None:
        _check_page_table(page_table, num_seqs, k_shape[1], device)
        if cu_seqlens_k is not None and seqlens_k is not None:
            raise ArgumentError(
                "cu_seqlens_k",
                "both seqlens_k and cu_seqlens_k with a page_table",
                "either alone gives the lengths, and pages have no other use for offsets",
                "drop cu_seqlens_k",
            )

    if max_seqlen_q is not None and (type(max_seqlen_q) is not int or max_seqlen_q < 0):
        _check_bound("max_seqlen_q", max_seqlen_q)
    if max_seqlen_k is not None and (type(max_seqlen_k) is not int or max_seqlen_k < 0):
        _check_bound("max_seqlen_k", max_seqlen_k)
    if softmax_scale is not None and (type(softmax_scale) is not float or not 0.0 < softmax_scale < math.inf):
        _check_number("softmax_scale", softmax_scale, zero=False)
    if type(softcap) is not float or not 0.0 <= softcap < math.inf:
        _check_number("softcap", softcap, zero=True)
    if causal is not True and causal is not False:
        _check_causal(causal, num_seqs, device)
    if window is not None:
        _check_window(window)
    if sinks is not None:
        _check_per_head("sinks", sinks, FLOATS, num_q_heads, device)
    if alibi_slopes is not None:
        _check_per_head("alibi_slopes", alibi_slopes, (torch.float32,), num_q_heads, device)
    if type(return_lse) is not bool:
        raise _not_bool("return_lse", return_lse)
    if type(deterministic) is not bool:
        raise _not_bool("deterministic", deterministic)
    if out is not None:
        _check_out(out, q, (q_shape[0], num_q_heads, head_dim_v))
        memory.check_written("out", out, (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)))
    if torch.is_grad_enabled():
        check_no_grad(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks, alibi_slopes=alibi_slopes, out=out)
    if dtype is torch.bfloat16 and q.is_cuda:
        check_chip("q", q)


def head_dims(named_dim: tuple[str, int], named_dim_v: tuple[str, int]) -> None:
    """Refuse head dims that the kernels do not serve; each comes with the argument that told it."""
    if not MIN_HEAD_DIM <= named_dim[1] <= MAX_HEAD_DIM:
        raise _head_dim(*named_dim, MAX_HEAD_DIM)
    if not MIN_HEAD_DIM <= named_dim_v[1] <= MAX_HEAD_DIM_V:
        raise _head_dim(*named_dim_v, MAX_HEAD_DIM_V)


def unserved(**arguments: object) -> None:
    """Refuse the arguments that have their place in the signature but no code yet; each must be None."""
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(name, describe(value), "it is not supported in this version", f"leave {name} out")


def _unequal_dtypes(name: str, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> ArgumentError:
    dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q, k_cache, v_cache))
    return ArgumentError(
        name,
        f"dtypes {dtypes} of q, k_cache, v_cache",
        "the three must be equal",
        "convert q to the caches' dtype, q.to(k_cache.dtype)",
    )


def _unmatched_heads(q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size) -> ArgumentError:
    if k_shape[-1] != q_shape[-1]:
        return ArgumentError(
            "k_cache",
            f"head_dim {k_shape[-1]}",
            f"q has head_dim {q_shape[-1]} and they must be equal",
            "pass q and K of one layer",
        )
    if k_shape[:-1] != v_shape[:-1]:
        return ArgumentError(
            "v_cache",
            f"shape {list(v_shape)}",
            f"all its dims but the last must be k_cache's, {list(k_shape[:-1])}",
            "pass K and V of one layer; only head_dim may differ",
        )
    return ArgumentError(
        "q",
        f"{q_shape[1]} query heads for {k_shape[-2]} KV heads",
        "num_q_heads must be a multiple of num_kv_heads, and both at least 1",
        "check the order of dims: heads are the second of q and the second to last of k_cache",
    )


def _head_dim(name: str, dim: int, largest: int) -> UnsupportedError:
    return UnsupportedError(
        name,
        f"a head dim of {dim}",
        f"{MIN_HEAD_DIM} to {largest} are supported for {name}",
        "pad with zeros, or split the heads",
    )


def _check_page_table(page_table: Tensor, num_seqs: int, page_size: int, device: torch.device) -> None:
    if not isinstance(page_table, Tensor) or page_table.ndim != 2 or page_table.shape[0] != num_seqs:
        raise ArgumentError(
            "page_table",
            describe(page_table),
            f"it must be an int32 tensor [num_seqs, max_pages], and cu_seqlens_q tells num_seqs = {num_seqs}",
            "give each sequence one row, padded with any number",
        )
    if page_table.dtype is not torch.int32:
        raise ArgumentError("page_table", describe(page_table), "its dtype must be int32", "pass page_table.int()")
    if page_table.device != device:
        raise wrong_device("page_table", page_table, device)
    if page_table.stride()[-1] != 1 and page_table.shape[-1] > 1:
        raise strided("page_table", page_table)
    if page_size == 0:
        raise ArgumentError("k_cache", "page_size 0", "a page must hold at least one token", "check the order of k_cache's dims")


def _check_bound(name: str, bound: object) -> None:
    """An upper bound is an int or a SymInt, at least 0. It may exceed the table: engines capture graphs with a loose one."""
    if not isinstance(bound, (int, torch.SymInt)) or isinstance(bound, bool):
        fix = (
            f"keep it on the host: int({name}) of a tensor waits for the device"
            if isinstance(bound, Tensor)
            else f"pass int({name})"
        )
        raise ArgumentError(name, describe(bound), "it must be an int, or None for the largest that the shapes allow", fix)
    if bound < 0:
        raise ArgumentError(
            name, bound, "an upper bound of lengths is at least 0", "pass the largest length of the batch, or None"
        )


def _check_number(name: str, number: object, *, zero: bool) -> None:
    """A finite float (an int will do), above 0, or at least 0 where `zero`."""
    limit = "it must be a finite number, " + (
        "at least 0 (0 turns it off)" if zero else "more than 0, or None for head_dim ** -0.5"
    )
    if not isinstance(number, (int, float, torch.SymFloat)) or isinstance(number, bool):
        raise ArgumentError(
            name, describe(number), limit, f"pass float({name})" if isinstance(number, Tensor) else "pass a float"
        )
    if not (number >= 0 if zero else number > 0) or not number < math.inf:
        raise ArgumentError(name, number, limit, f"leave {name} out for its default")


def _check_causal(causal: object, num_seqs: int, device: torch.device) -> None:
    if not isinstance(causal, Tensor):
        raise ArgumentError("causal", describe(causal), "it must be True, False or a bool tensor [num_seqs]", "pass bool(causal)")
    if causal.dtype is not torch.bool:
        raise ArgumentError("causal", describe(causal), "its dtype must be bool", "pass causal.bool()")
    if causal.shape != (num_seqs,):
        raise ArgumentError(
            "causal",
            describe(causal),
            f"its shape must be [num_seqs] = {[num_seqs]}",
            "give each sequence one flag, or pass a plain bool",
        )
    if causal.device != device:
        raise wrong_device("causal", causal, device)
    if not causal.is_contiguous():
        raise strided("causal", causal)


def _check_window(window: object) -> None:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        fix = (
            f"pass ({window}, 0) for {window} tokens before a query's own position"
            if isinstance(window, int)
            else "pass (left, right)"
        )
        raise ArgumentError("window", describe(window), "it must be a pair (left, right) of tokens, or None", fix)
    for side, width in zip(("left", "right"), window, strict=True):
        if width is not None and (not isinstance(width, int) or isinstance(width, bool) or width < -1):
            raise ArgumentError(
                "window",
                f"{side} = {describe(width)}",
                f"{side} must be an int, at least 0, or -1 or None for no limit",
                f"pass None for no {side} limit",
            )


def _check_per_head(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], num_q_heads: int, device: torch.device) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(name, describe(x), "it must be a tensor [num_q_heads]", vector_fix(x, "torch.float32"))
    if x.dtype not in dtypes:
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentError(name, describe(x), f"its dtype must be {words}", f"pass {name}.float()")
    if x.shape != (num_q_heads,):
        raise ArgumentError(
            name, describe(x), f"its shape must be [num_q_heads] = {[num_q_heads]}", "give each query head one value"
        )
    if x.device != device:
        raise wrong_device(name, x, device)
    if not x.is_contiguous():
        raise strided(name, x)


def _check_out(out: Tensor, q: Tensor, shape: tuple[int, int, int]) -> None:
    fix = "leave it out to have one allocated, or pass q.new_empty((num_tokens, num_q_heads, head_dim_v))"
    if not isinstance(out, Tensor):
        raise ArgumentError("out", describe(out), "it must be a tensor [num_tokens, num_q_heads, head_dim_v]", fix)
    if out.shape != shape:
        raise ArgumentError("out", describe(out), f"its shape must be [num_tokens, num_q_heads, head_dim_v] = {list(shape)}", fix)
    if out.dtype is not q.dtype:
        raise ArgumentError("out", describe(out), f"its dtype must be q's, {str(q.dtype).removeprefix('torch.')}", fix)
    if out.device != q.device:
        raise wrong_device("out", out, q.device)
    if out.stride()[-1] != 1:
        raise strided("out", out)


def _not_bool(name: str, x: object) -> ArgumentError:
    return ArgumentError(name, describe(x), "it must be True or False", f"pass bool({name})")
