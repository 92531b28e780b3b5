"""Which kernel runs a batch, by what the host knows: the chip, the caches, and `UNIATTN_BACKEND`."""

from torch import Tensor

from uniattn.errors import UnsupportedError
from uniattn.launch import backend
from uniattn.launch.target import Target, target_of
from uniattn.schedule import hopper


def kernels(k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None, has_alibi: bool = False) -> tuple[str, ...]:
    """The kernels that can serve a call, first the one that the chip rewards. A table of measurements chooses among them."""
    return in_order(not has_alibi and wants_hopper(k_cache, v_cache, page_table))


def in_order(hopper_serves: bool) -> tuple[str, ...]:
    """The kernels that can serve a call, given whether the Hopper kernel can, as `UNIATTN_BACKEND` has it."""
    if not hopper_serves:
        return ("triton",)
    return ("hopper",) if backend.asked() == "hopper" else ("hopper", "triton")


def wants_hopper(k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None) -> bool:
    """Whether the Hopper kernel may run: on its chip, for caches that it can read, unless another path is forced."""
    return may_use_hopper(target_of(k_cache.device)) and hopper.serves(k_cache, v_cache, page_table)


def may_use_hopper(target: Target) -> bool:
    """Whether the chip is one that the kernel is for, and `UNIATTN_BACKEND` leaves it open."""
    return target.arch == 90 and backend.asked() in ("auto", "hopper")


def refuse_other_than_hopper() -> None:
    """Raise where `UNIATTN_BACKEND=hopper` forces that kernel and the portable one is about to be launched."""
    if backend.asked() == "hopper":
        raise UnsupportedError(
            "UNIATTN_BACKEND",
            "hopper with a call that its kernel does not serve",
            "it serves paged fp16 and bf16 K/V, head dims 33 to 256 in multiples of 8, pages of at least 16 tokens in multiples of 8, "
            "addresses and strides of whole 16 bytes, query tokens less than 2^24 elements apart, no ALiBi",
            "set UNIATTN_BACKEND=auto, which takes the portable kernel there",
        )
