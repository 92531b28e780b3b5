"""The small checks that validation is made of: one tensor at a time, cheap where it is right, wordy only where it is wrong."""

import os

import torch
from torch import Tensor

from uniattn.errors import ArgumentError, UniattnError, UnsupportedError
from uniattn.launch.target import Target, target_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
QUANTISED = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "uint8")
    if hasattr(torch, name)
)


def describe(x: object) -> str:
    """What came, in a few words: shape, dtype and device of a tensor, type and value of anything else."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} tensor {list(x.shape)} on {x.device}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def floats(name: str, x: Tensor, dims: tuple[str, ...]) -> torch.Size:
    """Check a tensor of q, K, V or an output part: rank, dtype fp16, bf16 or fp32, unit last stride. Returns its shape."""
    if not isinstance(x, Tensor):
        raise ArgumentError(name, describe(x), f"it must be a tensor [{', '.join(dims)}]", "pass a torch.Tensor")
    shape = x.shape
    if len(shape) != len(dims):
        raise wrong_rank(name, x, dims)
    if x.dtype not in FLOATS:
        raise wrong_dtype(name, x)
    if x.stride()[-1] != 1 and shape[-1] != 1:
        raise strided(name, x)
    return shape


def ints(name: str, x: Tensor, shape: tuple[int, ...], dims: str, device: torch.device) -> None:
    """Check an int32 vector of lengths or offsets."""
    if not isinstance(x, Tensor):
        raise ArgumentError(name, describe(x), f"it must be an int32 tensor [{dims}]", vector_fix(x, "torch.int32"))
    if x.dtype is not torch.int32:
        raise ArgumentError(name, describe(x), "its dtype must be int32", f"pass {name}.int()")
    if x.device != device:
        raise wrong_device(name, x, device)
    if x.shape != shape:
        raise ArgumentError(name, describe(x), f"its shape must be [{dims}] = {list(shape)}", "make it match the batch")
    if not x.is_contiguous():
        raise strided(name, x)


def vector_fix(x: object, dtype: str) -> str:
    """How to make a tensor of what came instead of one."""
    return f"pass torch.tensor(..., dtype={dtype}) on q's device" if isinstance(x, (list, tuple, int)) else "pass a torch.Tensor"


def wrong_rank(name: str, x: Tensor, dims: tuple[str, ...]) -> ArgumentError:
    fix = "reshape it with .view or .unsqueeze"
    if name in ("k_cache", "v_cache"):
        if len(dims) == 4:
            fix = f"view it as pages ({name}.unflatten(0, (-1, page_size))), or drop page_table for contiguous K/V"
        else:
            fix = f"pass page_table for a paged cache, or {name}.flatten(0, 1) for contiguous K/V"
    elif name == "q":
        fix = "fold batch and length into one dim of tokens (q.flatten(0, 1)) and give cu_seqlens_q"
    return ArgumentError(name, describe(x), f"it must have {len(dims)} dims [{', '.join(dims)}]", fix)


def wrong_device(name: str, x: Tensor, device: torch.device) -> ArgumentError:
    return ArgumentError(
        name, describe(x), f"it must be on the device of the other tensors, {device}", f"pass {name}.to('{device}')"
    )


def strided(name: str, x: Tensor) -> ArgumentError:
    return ArgumentError(
        name, f"strides {list(x.stride())}", "the stride of its last dim must be 1", f"pass {name}.contiguous(), or another view"
    )


def wrong_dtype(name: str, x: Tensor) -> UniattnError:
    if x.dtype in QUANTISED:
        return quantised(name, x.dtype, target_of(x.device))
    return ArgumentError(
        name, describe(x), "its dtype must be float16, bfloat16 or float32", f"convert it, e.g. {name}.to(torch.bfloat16)"
    )


def quantised(name: str, dtype: torch.dtype, chip: Target) -> UnsupportedError:
    """The refusal of an fp8 or int8 tensor: by the chip where that cannot do it at all, else by this version."""
    word = str(dtype).removeprefix("torch.")
    if word.startswith("float8"):
        if chip.backend == "cuda" and isinstance(chip.arch, int) and chip.arch < 89:
            return UnsupportedError(
                name,
                f"{word} on {chip.name}",
                f"compute capability {_capability(chip)} has no fp8; 8.9 and newer do",
                "use bfloat16 or float16",
            )
        if chip.backend == "hip" and not str(chip.arch).startswith(("gfx94", "gfx95", "gfx12")):
            return UnsupportedError(
                name, f"{word} on {chip.name}", f"{chip.arch} has no fp8; gfx94x, gfx950 and gfx12 do", "use bfloat16 or float16"
            )
    return UnsupportedError(
        name,
        word,
        "quantised tensors are not supported in this version",
        "use bfloat16, float16 or float32, dequantised by the caller",
    )


def check_chip(name: str, x: Tensor) -> None:
    """Raise where the chip that bf16 tensor `x` is on cannot run the kernels with it."""
    chip = target_of(x.device)
    if bfloat16_missing(chip) and os.environ.get("UNIATTN_BACKEND", "auto") != "reference":
        raise UnsupportedError(
            name,
            f"bfloat16 on {chip.name}",
            f"Triton has no bfloat16 for compute capability {_capability(chip)}; 8.0 and newer do",
            "use float16, or UNIATTN_BACKEND=reference for the slow path",
        )


def bfloat16_missing(chip: Target) -> bool:
    """Whether Triton cannot compile bf16 for the chip: CUDA before compute capability 8.0."""
    return chip.backend == "cuda" and isinstance(chip.arch, int) and chip.arch < 80


def check_no_grad(**tensors: Tensor | None) -> None:
    """Raise if a tensor wants a gradient, which no path here computes; call it only while grad is enabled."""
    for name, x in tensors.items():
        if x is not None and x.requires_grad:
            raise ArgumentError(
                name, "requires_grad=True while grad is enabled", "uniattn is for inference: it computes no gradients",
                f"call under torch.no_grad(), or pass {name}.detach()",
            )  # fmt: skip


def _capability(chip: Target) -> str:
    return ".".join(str(part) for part in divmod(int(chip.arch), 10))
