"""Which path serves a call: the device decides, `UNIATTN_BACKEND` overrides."""

import os

from torch import Tensor

from uniattn.errors import UnsupportedError
from uniattn.launch import triton_version

CHOICES = ("auto", "reference", "triton", "hopper")


def choose(x: Tensor) -> str:
    """`"reference"` or `"triton"` for tensors on `x`'s device; raises where the forced path cannot run there."""
    asked = _asked()
    if asked == "reference" or (asked == "auto" and not x.is_cuda):
        return "reference"
    if asked == "auto":
        triton_version.require()
        return "triton"
    if asked == "triton":
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET", "0") != "1":
            raise UnsupportedError(
                "UNIATTN_BACKEND",
                got="triton with CPU tensors",
                limit="Triton kernels run on a GPU, or on CPU tensors in Triton's interpreter",
                fix="set TRITON_INTERPRET=1 before Python starts, or UNIATTN_BACKEND=auto",
            )
        triton_version.require()
        return asked
    limit = f"one of {', '.join(CHOICES)} in this version"
    raise UnsupportedError("UNIATTN_BACKEND", got=repr(asked), limit=limit, fix="unset it to let the device decide")


def _asked() -> str:
    """`UNIATTN_BACKEND` now, "auto" where it is unset."""
    # os.environ raises and catches two KeyErrors for what is unset: 1.2 us a call. Its own dict, where there is one as in
    # CPython on Linux, answers in 0.1.
    if _ENVIRONMENT is not None and _VARIABLE not in _ENVIRONMENT:
        return "auto"
    return os.environ.get("UNIATTN_BACKEND", "auto")


_ENVIRONMENT = getattr(os.environ, "_data", None)
_VARIABLE = b"UNIATTN_BACKEND"
