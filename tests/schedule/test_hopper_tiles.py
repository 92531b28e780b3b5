"""What the Hopper kernel serves: pure functions of shapes and strides, asked without a chip."""

import pytest
import torch

from uniattn.schedule import hopper
from uniattn.schedule.tiles import dim_parts
from uniattn.testing.batches import allocate


def caches(page_size=16, head_dim=128, v_head_dim=None, layout="split", dtype=torch.bfloat16):
    return allocate(layout, 3, page_size, 2, head_dim, v_head_dim or head_dim, dtype=dtype, device="cpu")


@pytest.mark.parametrize("layout", ["split", "hnd", "packed", "packed_hnd", "interleaved", "flat", "mixed"])
@pytest.mark.parametrize("page_size", [16, 24, 544])
def test_every_layout_of_whole_16_bytes_is_served(layout, page_size):
    assert hopper.readable(*caches(page_size, layout=layout))


@pytest.mark.parametrize(
    "how",
    [
        {"page_size": 8}, {"page_size": 20}, {"dtype": torch.float32}, {"layout": "gapped"}, {"head_dim": 32}, {"head_dim": 264},
        {"head_dim": 68}, {"v_head_dim": 512},
    ],
    ids=str,
)  # fmt: skip
def test_what_tma_or_the_kernel_cannot_read_is_not_served(how):
    assert not hopper.readable(*caches(**how))


def test_contiguous_keys_are_not_served():
    assert not hopper.serves(*caches(), page_table=None)
    assert hopper.serves(*caches(), page_table=torch.zeros(1, 1, dtype=torch.int32))


def test_lone_pages_and_heads_may_have_any_stride():
    """What torch says of a dim of one element means nothing, and a map gets a stride that TMA takes."""
    cache = torch.zeros(1, 16, 1, 128, dtype=torch.float16).as_strided((1, 16, 1, 128), (3, 128, 5, 1))
    assert hopper.readable(cache, cache)


@pytest.mark.parametrize("page_size", [16, 24, 40, 64, 128, 272, 544, 1056])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_boxes_fill_blocks_and_never_cross_a_page(page_size, head_dim):
    block_n = hopper.choose(head_dim, head_dim).block_n
    box = hopper.box_tokens(page_size, block_n)
    assert block_n % box == page_size % box == box % 8 == 0


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 72)], ids=str)
def test_tiles_fit_in_shared_memory(dims):
    t = hopper.choose(*dims)
    d, dv = (hopper.padded(dim) for dim in dims)
    queries = hopper.q_stages(*dims) * t.block_m * d
    assert 2 * (queries + t.num_stages * t.block_n * (d + dv)) <= 227 * 1024 - 2048
    assert d >= sum(dim_parts(dims[0])) // 2


def test_offsets_of_a_tile_stay_in_32_bits():
    assert hopper.rows_in_reach(4096, 128, 48)
    assert not hopper.rows_in_reach(1 << 24, 128, 4)
    assert not hopper.rows_in_reach(4096, 1 << 30, 4)
