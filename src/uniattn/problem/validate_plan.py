"""What a plan and the arguments of `uniattn.plan` beyond those of `uniattn.attention` may be; `validate.py` tells the rules."""

from dataclasses import fields

import torch
from torch import Tensor

from uniattn.errors import ArgumentError, UnsupportedError
from uniattn.launch.target import target_of
from uniattn.problem.layout import causal_code, window_bounds
from uniattn.problem.tensors import describe
from uniattn.schedule import hopper
from uniattn.schedule.plan import MAX_CUT_TILES, Plan, PlanSpec
from uniattn.schedule.tiles import Tiles, broken_rule

MAX_SPLITS = 128


def of_call(
    plan: object,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    causal: bool | Tensor,
    window: tuple[int | None, int | None] | None,
) -> None:
    """Raise unless `plan` is a plan for an `attention` call with these arguments, its lengths aside."""
    if not isinstance(plan, Plan):
        raise ArgumentError("plan", describe(plan), "it must be a Plan", "pass what uniattn.plan(...) returned, or no plan")
    num_tokens, num_q_heads, head_dim = q.shape
    came = (
        num_tokens, cu_seqlens_q.shape[0] - 1, num_q_heads, k_cache.shape[-2], head_dim, v_cache.shape[-1], q.element_size(),
        causal_code(causal), *window_bounds(window),
    )  # fmt: skip
    if plan.spec.facts != came:
        for field, got in zip(fields(PlanSpec), came, strict=False):
            planned = getattr(plan.spec, field.name)
            if planned != got:
                raise ArgumentError(
                    "plan",
                    f"a plan for {field.name}={planned} with a call of {field.name}={got}",
                    "a plan serves calls of its own sizes, causality and window only",
                    "make one with uniattn.plan(...) from this call's arguments",
                )
    _check_buffer("plan", plan, q.device, "make one with uniattn.plan(...) from this call's arguments")


def to_rebuild(out: object, spec: PlanSpec, device: torch.device) -> None:
    """Raise unless `out` is a plan that a plan of `spec` can be built into."""
    fix = "leave it out to have one allocated"
    limit = "only a plan of the same sizes, causality, window, bounds, num_splits and tiles can be rebuilt in place"
    if not isinstance(out, Plan):
        raise ArgumentError("out", describe(out), limit, fix)
    if out.spec != spec:
        # The numbers of tiles and items follow from what was asked, so num_splits comes before them.
        names = [field.name for field in fields(PlanSpec)]
        for name in sorted(names, key=lambda name: 10 if name == "num_splits" else names.index(name)):
            planned, got = getattr(out.spec, name), getattr(spec, name)
            if planned != got:
                raise ArgumentError("out", f"a plan for {name}={planned} with a call of {name}={got}", limit, fix)
    _check_buffer("out", out, device, fix)


def _check_buffer(name: str, plan: Plan, device: torch.device, fix: str) -> None:
    buffer, needed = plan.buffer, plan.spec.buffer_ints
    if buffer.device != device:
        limit = f"its buffer must be on the device of the other tensors, {device}"
        raise ArgumentError(name, f"a plan on {buffer.device}", limit, fix)
    if buffer.dtype is not torch.int32 or buffer.numel() < needed or not buffer.is_contiguous():
        limit = f"its buffer must be a contiguous int32 tensor of at least {needed} elements"
        raise ArgumentError(name, f"a plan with a buffer of {describe(buffer)}", limit, fix)


def num_splits(pieces: object) -> None:
    """Raise unless `pieces` is None or a number of pieces that tiles may be cut into."""
    if pieces is not None and (type(pieces) is not int or not 1 <= pieces <= MAX_SPLITS):
        limit = f"it must be an int, at least 1 and at most {MAX_SPLITS}"
        raise ArgumentError("num_splits", describe(pieces), limit, "leave it out to have it chosen")


def can_be_cut(spec: PlanSpec) -> None:
    """Raise where the plan was asked to cut more tiles than the builder holds."""
    if spec.num_splits > 1 and spec.num_tiles > MAX_CUT_TILES:
        raise UnsupportedError(
            "num_splits",
            f"{spec.num_splits} with a bound of {spec.num_tiles} query tiles",
            f"batches of more than {MAX_CUT_TILES} query tiles are not cut",
            "leave it out, or raise tiles' block_m",
        )


def tiles(asked: object, kernels: tuple[str, ...], head_dim: int, v_head_dim: int, itemsize: int, device: torch.device) -> None:
    """Raise unless `asked` is None or tile sizes that one of `kernels`, which can serve the call, can be compiled for."""
    if asked is None:
        return
    fix = "leave it out to have them chosen"
    if not isinstance(asked, Tiles):
        raise ArgumentError("tiles", describe(asked), "it must be a uniattn.schedule.tiles.Tiles", fix)
    broken = broken_rule(asked)
    if broken is not None:
        name, limit = broken
        raise ArgumentError("tiles", f"{name}={getattr(asked, name)!r}", f"{name} {limit}", fix)
    if asked.kernel not in kernels:
        limit = f"kernel must be one that serves this call here: {', '.join(kernels)}"
        raise ArgumentError("tiles", f"kernel={asked.kernel!r}", limit, fix)
    if asked.kernel == "hopper":
        fault = hopper.fault(asked, head_dim, v_head_dim, itemsize, True, target_of(device))
        if fault is not None:
            raise ArgumentError("tiles", repr(asked), fault, fix)
