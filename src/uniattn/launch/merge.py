"""Launch of the merge kernel."""

from torch import Tensor

from uniattn.kernels.merge import merge_kernel
from uniattn.launch.target import on_device
from uniattn.schedule.tiles import next_power_of_2


def merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Merge `outs` `[num_parts, num_tokens, num_heads, dim]` by `lses` `[num_parts, num_heads, num_tokens]` into `out`, `lse`."""
    num_parts, num_tokens, num_heads, dim = outs.shape
    if num_tokens == 0 or num_heads == 0:
        return
    with on_device(outs.device):
        merge_kernel[(num_tokens * num_heads,)](
            outs, lses, out, lse, outs.stride()[:-1], lses.stride(), out.stride()[:-1], (0, 0) if lse is None else lse.stride(),
            num_parts, num_tokens, num_heads, DIM=dim, BLOCK_D=next_power_of_2(dim),
            BLOCK_P=min(16, next_power_of_2(num_parts)), num_warps=4,
        )  # fmt: skip
