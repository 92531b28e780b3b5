"""Which path serves a call: the device decides, `UNIATTN_BACKEND` overrides."""

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from uniattn.errors import UnsupportedError
from uniattn.launch import triton_version
from uniattn.launch.target import interpreted, target_of

CHOICES = ("auto", "reference", "triton", "hopper")


def choose(x: Tensor) -> str:
    """`"reference"` or `"triton"` for tensors on `x`'s device; raises where the forced path cannot run there.

    The Hopper kernel is one of Triton's path: `launch.choice` takes it for the batches that it serves.
    """
    name = asked()
    if name == "reference" or (name == "auto" and not x.is_cuda):
        return "reference"
    if name == "auto":
        triton_version.require()
        return "triton"
    if name == "hopper":
        chip = target_of(x.device)
        if chip.arch != 90:
            limit = "the Hopper kernel runs on chips of compute capability 9.0"
            raise UnsupportedError("UNIATTN_BACKEND", f"hopper on {chip.name}", limit, "set UNIATTN_BACKEND=auto")
        triton_version.require()
        return "triton"
    if name == "triton":
        if not x.is_cuda and not interpreted():
            raise UnsupportedError(
                "UNIATTN_BACKEND",
                got="triton with CPU tensors",
                limit="Triton kernels run on a GPU, or on CPU tensors in Triton's interpreter",
                fix="set TRITON_INTERPRET=1 before Python starts, or UNIATTN_BACKEND=auto",
            )
        triton_version.require()
        return name
    limit = f"one of {', '.join(CHOICES)} in this version"
    raise UnsupportedError("UNIATTN_BACKEND", got=repr(name), limit=limit, fix="unset it to let the device decide")


def asked() -> str:
    """`UNIATTN_BACKEND` now, "auto" where it is unset or empty."""
    # os.environ raises and catches two KeyErrors for what is unset: 1.2 us a call. Its own dict, where there is one as in
    # CPython, answers in 0.1.
    if _ENVIRONMENT is not None and _VARIABLE not in _ENVIRONMENT:
        return "auto"
    return os.environ.get("UNIATTN_BACKEND") or "auto"


def own_dict(environ: Any, variable: str) -> tuple[Mapping[Any, Any] | None, Any]:
    """The dict that holds `environ`'s variables, and what it calls `variable`: bytes on Linux, a str on Windows. None without."""
    encode = getattr(environ, "encodekey", None)
    return (None, variable) if encode is None else (getattr(environ, "_data", None), encode(variable))


_ENVIRONMENT, _VARIABLE = own_dict(os.environ, "UNIATTN_BACKEND")
