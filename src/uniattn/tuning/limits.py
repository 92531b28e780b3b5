"""What a chip can run: the check of every configuration that comes from a table, before anything is compiled or launched for it."""

from uniattn.launch.target import Target
from uniattn.schedule import hopper
from uniattn.schedule.tiles import SHARED_MARGIN, Tiles, broken_rule, dim_parts, next_power_of_2, shared_bytes

# Accumulators, scores and operands of a thread may take this share of its registers: addresses, masks and the softmax need the rest.
_REGISTER_SHARE = 0.75
_MAX_THREADS = 1024


def fault(t: Tiles, head_dim: int, v_head_dim: int, itemsize: int, paged: bool, target: Target) -> str | None:
    """Why the kernel of `t` cannot run with it on `target`, None where it can.

    Bounds alone: what really was allocated, Triton checks against the chip when it loads a kernel, before its first launch.
    """
    broken = broken_rule(t)
    if broken is not None:
        name, limit = broken
        return f"{name} is {getattr(t, name)!r}; it {limit}"
    if t.kernel == "hopper":
        return hopper.fault(t, head_dim, v_head_dim, itemsize, paged, target)
    if t.num_warps * target.warp_size > _MAX_THREADS:
        return f"{t.num_warps} warps are {t.num_warps * target.warp_size} threads; a program may have {_MAX_THREADS}"
    shared = shared_bytes(t, head_dim, v_head_dim, itemsize, target.matrix_unit, paged) + SHARED_MARGIN
    if shared > target.max_shared_bytes:
        return f"it may take {shared} bytes of shared memory; a program may have {target.max_shared_bytes}"
    registers = registers_held(t, head_dim, v_head_dim, itemsize, target)
    allowed = int(_REGISTER_SHARE * target.registers_per_thread)
    if registers > allowed:
        return f"accumulators and operands take {registers} registers a thread; {allowed} of {target.registers_per_thread} may go to them"
    return None


def registers_held(t: Tiles, head_dim: int, v_head_dim: int, itemsize: int, target: Target) -> int:
    """32-bit registers of a thread that the larger loop's accumulators and scores take, and Q where a matrix unit reads registers."""
    d, dv = sum(dim_parts(head_dim)), next_power_of_2(max(16, v_head_dim))
    operands = d * itemsize // 4 if target.matrix_unit in ("mma", "mfma") else 0
    return max(m * (dv + n + operands) for m, n in ((t.block_m, t.block_n), (t.small_m, t.small_n))) // (t.num_warps * target.warp_size)
