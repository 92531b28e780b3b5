"""What each argument of `uniattn.warmup` may be; `validate.py` tells the rules."""

import torch

from uniattn.errors import ArgumentError, UnsupportedError
from uniattn.problem import validate
from uniattn.problem.tensors import FLOATS, QUANTISED, describe


def shapes(num_q_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None, page_size: int | None) -> None:
    """Check the layer's numbers."""
    numbers = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    numbers |= {} if v_head_dim is None else {"v_head_dim": v_head_dim}
    numbers |= {} if page_size is None else {"page_size": page_size}
    for name, number in numbers.items():
        if type(number) is not int or number < 1:
            limit = "it must be an int, at least 1" + (", or None for contiguous K/V" if name == "page_size" else "")
            raise ArgumentError(name, describe(number), limit, "pass the sizes of one device's share of the model")
    if num_q_heads % num_kv_heads:
        raise ArgumentError(
            "num_q_heads",
            f"{num_q_heads} query heads for {num_kv_heads} KV heads",
            "num_q_heads must be a multiple of num_kv_heads, and both at least 1",
            "pass the head counts of one device's share of the model",
        )
    validate.head_dims(("head_dim", head_dim), ("v_head_dim", head_dim if v_head_dim is None else v_head_dim))


def dtypes(dtype: torch.dtype, sinks: torch.dtype | None) -> None:
    """Check the dtypes of q and the caches, and of the sinks."""
    for name, came in (("dtype", dtype), ("sinks", sinks)):
        if came not in FLOATS and not (name == "sinks" and came is None):
            error = UnsupportedError if name == "dtype" and came in QUANTISED else ArgumentError
            version = " in this version" if error is UnsupportedError else ""
            limit = f"it must be torch.float16, torch.bfloat16 or torch.float32{version}"
            raise error(name, describe(came), limit, f"pass the {name} that attention will get")


def present(device: torch.device) -> None:
    """Check that torch has the device."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(
            "device",
            str(device),
            f"torch sees {torch.cuda.device_count() or 'no'} GPUs here",
            "call it where the model runs; on a CPU, device='cpu', there is nothing to compile",
        )
