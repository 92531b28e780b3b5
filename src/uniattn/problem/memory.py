"""Do two tensors share bytes? Host arithmetic on addresses and strides; nothing is read from a device."""

import torch
from torch import Tensor

from uniattn.errors import ArgumentError

_REAL = (Tensor, torch.nn.Parameter)


def check_written(name: str, written: Tensor, read: tuple[tuple[str, Tensor], ...]) -> None:
    """Raise if `written` overlaps itself or one of the tensors `read`.

    The rule: tensors of different storages are apart, and so are byte ranges that do not meet. Ranges that meet still count as
    apart where both tensors are columns of one table (see `_apart_in_columns`), so that `out` may be a slice of a fused buffer
    that also holds K and V. Anything else counts as overlapping: interleavings that only a search could tell apart are refused.
    """
    if not has_address(written):
        return
    if not written.is_contiguous() and overlaps_itself(written):
        raise ArgumentError(
            name,
            f"shape {list(written.shape)} with strides {list(written.stride())}",
            "its elements must lie at different addresses, since each is written",
            f"allocate it whole, e.g. torch.empty({list(written.shape)}), not by .expand()",
        )
    storage = written.untyped_storage().data_ptr()
    for other_name, other in read:
        if other.untyped_storage().data_ptr() == storage and _share_bytes(written, other):
            raise ArgumentError(
                name,
                f"memory that {other_name} also uses",
                f"{name} is written while {other_name} is still read, so they must not overlap",
                f"pass a buffer of its own, or a clone of {other_name}",
            )


def _share_bytes(a: Tensor, b: Tensor) -> bool:
    if a.numel() == 0 or b.numel() == 0:
        return False
    a_begin, a_end = _byte_range(a)
    b_begin, b_end = _byte_range(b)
    return a_begin < b_end and b_begin < a_end and not _apart_in_columns(a, b)


def _byte_range(x: Tensor) -> tuple[int, int]:
    """`[begin, end)` of the addresses that a tensor with at least one element touches; strides are never negative in torch."""
    begin = x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may share an address. False is certain; True may be wrong for strides that mesh like gears."""
    extent = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride < extent:
                return True
            extent += (size - 1) * stride
    return False


def _apart_in_columns(a: Tensor, b: Tensor) -> bool:
    """Whether `a` and `b` are different columns of a table whose rows lie `a`'s largest stride apart.

    A dim whose stride is a multiple of the pitch walks whole rows and keeps its column. The other dims must stay in one row.
    """
    pitch = max((stride for size, stride in zip(a.shape, a.stride(), strict=True) if size != 1), default=1) * a.element_size()
    if pitch == 0:
        return False
    spans = []
    for x in (a, b):
        item = x.element_size()
        width = item + sum(
            (size - 1) * stride * item for size, stride in zip(x.shape, x.stride(), strict=True) if stride * item % pitch
        )
        column = (x.data_ptr() - a.data_ptr()) % pitch
        if column + width > pitch:
            return False
        spans.append((column, column + width))
    (a_begin, a_end), (b_begin, b_end) = spans
    return a_end <= b_begin or b_end <= a_begin


def has_address(x: Tensor) -> bool:
    # Fake, functional and meta tensors have no memory to compare, and a compiled graph must not bake addresses in.
    return type(x) in _REAL and not x.is_meta and not torch.compiler.is_compiling()


def slots_meet(a: Tensor, b: Tensor) -> bool:
    """Whether caches `a` and `b`, equal in all dims but the last, share an address.

    Views of one packed buffer mesh, so byte ranges tell nothing. Where both have the same strides and neither overlaps itself the
    answer is exact; other strides, which no packed buffer gives, are asked about their first rows alone.
    """
    if not has_address(a) or not has_address(b) or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.numel() == 0 or b.numel() == 0:
        return False
    distance, item = b.data_ptr() - a.data_ptr(), a.element_size()
    steps = []
    if a.stride() == b.stride():
        steps = sorted(((s * item, n) for s, n in zip(a.stride()[:-1], a.shape[:-1], strict=True) if n > 1), reverse=True)
    return _rows_meet(distance, steps, a.shape[-1] * item, b.shape[-1] * item)


def _rows_meet(distance: int, steps: list[tuple[int, int]], a_width: int, b_width: int) -> bool:
    """Whether rows that start `distance` bytes apart meet, moved against each other by less than `n` times each step `(s, n)`.

    What the later, smaller steps can bridge is less than one of the first, which leaves it two choices.
    """
    if not steps:
        return -b_width < distance < a_width
    step, n = steps[0]
    return any(
        _rows_meet(distance - moves * step, steps[1:], a_width, b_width)
        for moves in (distance // step, distance // step + 1)
        if -n < moves < n
    )


def same_rows(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether K and V lie to each other as the caches do, so that an address both are written to gets one value (MLA's latent)."""
    distance = v_cache.data_ptr() - k_cache.data_ptr()
    width = k.element_size() * k.shape[-1]
    alike = k.stride() == v.stride() and k_cache.stride() == v_cache.stride()
    return alike and v.data_ptr() - k.data_ptr() == distance and 0 <= distance < width
