"""The choice of tiles, by pure functions of a chip's facts. That they compile without spills: scripts/compile_all.py."""

import itertools

import pytest

from uniattn.launch.target import Target
from uniattn.schedule import tiles

HEAD_DIMS = [(8, 8), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (512, 512), (576, 512)]
CHIPS = {
    "sm_80": Target("A100", "cuda", 80, 108, 166912),
    "sm_86": Target("A10", "cuda", 86, 72, 101376),
    "sm_90": Target("H200", "cuda", 90, 132, 232448),
    "sm_100": Target("B200", "cuda", 100, 148, 232448),
    "gfx942": Target("MI300X", "hip", "gfx942", 304, 65536),
    "gfx950": Target("MI355X", "hip", "gfx950", 256, 163840),
}


@pytest.mark.parametrize(("rows", "chosen"), [(1, (16, 32, 7, 4)), (16, (16, 32, 7, 4)), (64, (64, 64, 5, 4)), (4096, (128, 64, 5, 8))])
def test_what_was_measured_on_an_h200_stays(rows, chosen):
    t = tiles.choose(rows, 128, 128, 2, 232448, "wgmma")
    assert (t.block_m, t.block_n, t.num_stages, t.num_warps) == chosen


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS.keys())
def test_everything_fits_into_shared_memory(chip):
    for (head_dim, v_head_dim), itemsize in itertools.product(HEAD_DIMS, (2, 4)):
        for t in tiles.every(head_dim, v_head_dim, itemsize, chip.max_shared_bytes, chip.matrix_unit):
            for m, n, stages in ((t.block_m, t.block_n, t.num_stages), (t.small_m, t.small_n, t.small_stages)):
                assert m == 0 or n >= 16
                assert tiles.smem_bytes(m, n, stages, head_dim, v_head_dim, itemsize) <= chip.max_shared_bytes or (n, stages) == (16, 1)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS.keys())
def test_every_names_all_that_is_chosen(chip):
    for (head_dim, v_head_dim), itemsize in itertools.product(HEAD_DIMS, (2, 4)):
        facts = (head_dim, v_head_dim, itemsize, chip.max_shared_bytes, chip.matrix_unit)
        chosen = {tiles.choose(rows, *facts) for rows in [*range(300), 10**4, 10**6]}
        assert chosen == set(tiles.every(*facts))
