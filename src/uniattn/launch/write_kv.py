"""Launch of the K/V write."""

from torch import Tensor

from uniattn.kernels.write_kv import write_kv_kernel
from uniattn.launch.target import on_device
from uniattn.schedule.tiles import cdiv, next_power_of_2


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write `k`, `v` `[num_tokens, num_kv_heads, dim]` into the slots of `slot_mapping` `[num_tokens]`; below 0 is skipped."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    num_elements = num_heads * max(head_dim, v.shape[-1])
    block = min(1024, next_power_of_2(num_elements))
    with on_device(k.device):
        write_kv_kernel[(num_tokens, cdiv(num_elements, block))](
            k, v, k_cache, v_cache, slot_mapping, k.stride()[:-1], v.stride()[:-1], k_cache.stride()[:-1], v_cache.stride()[:-1],
            slot_mapping.stride(0), k_cache.shape[0] * k_cache.shape[1], num_heads, HEAD_DIM=head_dim,
            V_HEAD_DIM=v.shape[-1], PAGE_SIZE=k_cache.shape[1], BLOCK=block, num_warps=4,
        )  # fmt: skip
