"""The backends that the operator tests run on, and how a test runs and checks a batch on one."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

import uniattn
from uniattn.schedule.tiles import Tiles
from uniattn.testing import Batch, assert_matches_oracle, make_batch, poison_unread, poisoned_allocations


@dataclass(frozen=True)
class Backend:
    """Where a test runs, and the value of `UNIATTN_BACKEND` that puts it there."""

    name: str
    device: str
    uniattn_backend: str

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def is_kernel(self) -> bool:
        return self.uniattn_backend == "triton"

    def batch(self, lengths: Sequence[tuple[int, int]], **how: Any) -> Batch:
        """`make_batch` on this backend's device, with NaN in every slot that no query sees."""
        return poison_unread(make_batch(lengths, device=self.device, **how))

    def run(self, batch: Batch, **changes: Any) -> tuple[Tensor, Tensor]:
        """Output and LSE of the batch, computed while uninitialised memory is NaN."""
        with poisoned_allocations():
            out, lse = uniattn.attention(**batch.kwargs(return_lse=True, **changes))
        return out, lse

    def check(self, batch: Batch, **changes: Any) -> tuple[Tensor, Tensor]:
        """Run the batch and compare output and LSE with the oracle; returns both."""
        out, lse = self.run(batch, **changes)
        assert_matches_oracle(batch, out, lse, **changes)
        return out, lse


def plan_for(batch: Batch, num_splits: int | None = None, **tiles: Any) -> uniattn.Plan:
    """The plan of `batch` with `num_splits` and some of its tile sizes forced."""
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q", "seqlens_k", "page_table", "cu_seqlens_k")
    call = {name: getattr(batch, name) for name in names} | {
        name: batch.options[name] for name in ("causal", "window") if name in batch.options
    }
    spec = uniattn.plan(**call).spec
    chosen = {field.name: getattr(spec, field.name) for field in fields(Tiles) if hasattr(spec, field.name)}
    return uniattn.plan(**call, num_splits=num_splits, tiles=Tiles(**chosen | tiles))


def tiny_tiles(batch: Batch, num_splits: int = 1) -> uniattn.Plan:
    """A plan of 16 x 16 tiles, so that short sequences have unmasked blocks, masked edges and many tiles."""
    return plan_for(batch, num_splits, block_m=16, block_n=16, num_stages=1, num_warps=4, small_m=0, bulk=True)


def two_tile_sizes(batch: Batch, num_splits: int = 1) -> uniattn.Plan:
    """A plan whose launch has a tile size for few query rows and another for many.

    The larger has fewer columns than rows, so that under a window its last rows see nothing of its first block.
    """
    return plan_for(
        batch, num_splits, block_m=64, block_n=16, num_stages=1, num_warps=4, small_m=16, small_n=16, small_stages=1, bulk=True
    )


REFERENCE_CPU = Backend("reference-cpu", "cpu", "reference")
TRITON_INTERPRETER = Backend("triton-interpreter", "cpu", "triton")
TRITON_GPU = Backend("triton-gpu", "cuda", "triton")
HOPPER_GPU = Backend("hopper-gpu", "cuda", "hopper")
