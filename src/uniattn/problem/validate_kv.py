"""What each argument of `uniattn.merge_states` and `uniattn.write_kv` may be; `validate.py` tells the rules."""

from collections.abc import Sequence

import torch
from torch import Tensor

from uniattn.errors import ArgumentError
from uniattn.problem import memory
from uniattn.problem.tensors import check_chip, check_no_grad, describe, floats, strided, vector_fix, wrong_device

_OUT_DIMS = ("num_tokens", "num_q_heads", "head_dim_v")
_K_PAGES = ("num_pages", "page_size", "num_kv_heads", "head_dim")
_V_PAGES = ("num_pages", "page_size", "num_kv_heads", "head_dim_v")


def merge_states(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> None:
    """Check the parts, lists of them before they are stacked."""
    num_parts = _count("outs", outs)
    if _count("lses", lses) != num_parts:
        raise ArgumentError("lses", f"{len(lses)} parts", f"outs has {num_parts} parts", "pass one LSE a part")

    if isinstance(outs, Tensor):
        floats("outs", outs, ("num_parts", *_OUT_DIMS))
        first = outs[0]
    else:
        first = outs[0]
        for i, part in enumerate(outs):
            name = f"outs[{i}]"
            floats(name, part, _OUT_DIMS)
            if part.shape != first.shape or part.dtype is not first.dtype:
                limit = f"every part must be like outs[0], {describe(first)}"
                raise ArgumentError(name, describe(part), limit, "merge over disjoint keys; queries and heads stay the same")
            if part.device != first.device:
                raise wrong_device(name, part, first.device)

    shape = (first.shape[1], first.shape[0])
    named = [("lses", lses[0])] if isinstance(lses, Tensor) else [(f"lses[{i}]", part) for i, part in enumerate(lses)]
    for name, part in named:
        if not isinstance(part, Tensor) or part.dtype is not torch.float32:
            limit = "it must be a float32 tensor [num_q_heads, num_tokens]"
            raise ArgumentError(name, describe(part), limit, "pass the LSE as attention(..., return_lse=True) returned it")
        if part.shape != shape:
            limit = f"the shape of a part must be [num_q_heads, num_tokens] = {list(shape)}"
            raise ArgumentError(name, describe(part), limit, "transpose it where it is [num_tokens, num_q_heads]")
        if part.device != first.device:
            raise wrong_device(name, part, first.device)

    if torch.is_grad_enabled():
        for name, parts in (("outs", outs), ("lses", lses)):
            for part in (parts,) if isinstance(parts, Tensor) else parts:
                check_no_grad(**{name: part})
    if first.dtype is torch.bfloat16 and first.is_cuda:
        check_chip("outs", first)


def _count(name: str, parts: object) -> int:
    if not isinstance(parts, (Tensor, list, tuple)):
        limit = "it must be a tensor whose first dim counts the parts, or a list of tensors"
        raise ArgumentError(name, describe(parts), limit, "pass a list of tensors")
    if (isinstance(parts, Tensor) and parts.ndim == 0) or len(parts) == 0:
        raise ArgumentError(name, describe(parts), "there must be at least one part", "pass what attention(...) returned")
    return len(parts)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Check the new K and V, the caches and the slots."""
    k_shape = floats("k", k, ("num_tokens", "num_kv_heads", "head_dim"))
    v_shape = floats("v", v, ("num_tokens", "num_kv_heads", "head_dim_v"))
    k_pages = floats("k_cache", k_cache, _K_PAGES)
    v_pages = floats("v_cache", v_cache, _V_PAGES)
    dtype, device = k.dtype, k.device
    for name, x in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype is not dtype:
            raise ArgumentError(name, describe(x), f"its dtype must be k's, {dtype}", "convert k and v to the caches' dtype")
        if x.device != device:
            raise wrong_device(name, x, device)
    if k_shape[:-1] != v_shape[:-1] or k_pages[2:] != k_shape[1:] or v_pages[2:] != v_shape[1:] or k_pages[:2] != v_pages[:2]:
        raise _unmatched(k_shape, v_shape, k_pages, v_pages)
    if not isinstance(slot_mapping, Tensor) or slot_mapping.dtype not in (torch.int32, torch.int64):
        limit = "it must be an int32 or int64 tensor [num_tokens]"
        raise ArgumentError("slot_mapping", describe(slot_mapping), limit, vector_fix(slot_mapping, "torch.int64"))
    if slot_mapping.shape != k_shape[:1]:
        limit = f"its shape must be [num_tokens] = {list(k_shape[:1])}, one slot a row of k"
        raise ArgumentError("slot_mapping", describe(slot_mapping), limit, "slice k and v, or fill up with -1, which skips a row")
    if slot_mapping.device != device:
        raise wrong_device("slot_mapping", slot_mapping, device)
    if not slot_mapping.is_contiguous():
        raise strided("slot_mapping", slot_mapping)
    memory.check_written("k_cache", k_cache, (("k", k), ("v", v)))
    memory.check_written("v_cache", v_cache, (("k", k), ("v", v)))
    if memory.slots_meet(k_cache, v_cache) and not memory.same_rows(k, v, k_cache, v_cache):
        raise ArgumentError(
            "v_cache",
            "memory that k_cache also uses",
            "K and V would be written to the same addresses",
            "pass two caches, or two views of one buffer that share no element",
        )
    if torch.is_grad_enabled():
        check_no_grad(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    if dtype is torch.bfloat16 and k.is_cuda:
        check_chip("k", k)


def _unmatched(k: torch.Size, v: torch.Size, k_pages: torch.Size, v_pages: torch.Size) -> ArgumentError:
    fix = "pass K, V and both caches of one layer"
    if k[:-1] != v[:-1]:
        return ArgumentError("v", f"shape {list(v)}", f"its tokens and heads must be k's, {list(k[:-1])}", fix)
    if k_pages[2:] != k[1:]:
        return ArgumentError("k", f"shape {list(k)}", f"its heads and head dim must be k_cache's, {list(k_pages[2:])}", fix)
    if v_pages[2:] != v[1:]:
        return ArgumentError("v", f"shape {list(v)}", f"its heads and head dim must be v_cache's, {list(v_pages[2:])}", fix)
    return ArgumentError(
        "v_cache", f"shape {list(v_pages)}", f"its pages and page size must be k_cache's, {list(k_pages[:2])}", fix
    )
