"""What a table may ask of a chip: each wrong configuration beside its valid sibling; the estimate beside what Triton allocated."""

import re
from dataclasses import replace

import pytest

from uniattn.schedule import hopper
from uniattn.schedule.tiles import SHARED_MARGIN, Tiles, shared_bytes
from uniattn.tuning import limits
from uniattn.tuning.cards import CARDS

GOOD = Tiles(64, 64, 5, 4, 16, 32, 5)
HOPPER = hopper.choose(128, 128)

# Chip, bytes an element, head dims, tiles, paged: shared memory of the kernel that Triton 3.7.1 compiled.
COMPILED = [
    ("h200", 2, (128, 128), Tiles(16, 32, 7, 4, bulk=False), True, 55040),
    ("h200", 2, (128, 128), Tiles(16, 32, 7, 4, bulk=False), False, 103424),
    ("h200", 2, (128, 128), Tiles(64, 64, 5, 4, 16, 32, 5), True, 115712),
    ("h200", 2, (128, 128), Tiles(64, 64, 3, 4, 16, 32, 5), False, 114688),
    ("h200", 2, (128, 128), Tiles(128, 128, 5, 8, 16, 64, 5), True, 231424),
    ("h200", 2, (192, 128), Tiles(128, 32, 5, 8, 16, 32, 5), True, 111616),
    ("h200", 2, (512, 512), Tiles(64, 32, 3, 8, 16, 16, 5, False), True, 196864),
    ("h200", 2, (512, 512), Tiles(64, 32, 3, 8, 16, 16, 5, False), False, 262144),
    ("h200", 4, (128, 128), Tiles(16, 32, 3, 4, bulk=False), True, 43264),
    ("a100", 2, (96, 96), Tiles(64, 32, 5, 4, 16, 32, 5, False), True, 45568),
    ("b200", 2, (128, 128), Tiles(64, 64, 5, 4, 16, 32, 5), True, 116736),
    ("b200", 2, (192, 192), Tiles(128, 32, 5, 8, 16, 32, 5), True, 137216),
    ("mi300x", 2, (128, 128), Tiles(16, 32, 3, 4, bulk=False), True, 16640),
    ("mi300x", 2, (256, 256), Tiles(128, 16, 1, 8, 16, 32, 2), True, 65536),
    ("mi355x", 2, (128, 128), Tiles(128, 64, 4, 8, 16, 64, 5), True, 98304),
    ("mi355x", 4, (512, 512), Tiles(16, 16, 2, 4, bulk=False), True, 66560),
]


@pytest.mark.parametrize(("card", "itemsize", "dims", "tiles", "paged", "allocated"), COMPILED)
def test_shared_memory_is_known_before_compiling(card, itemsize, dims, tiles, paged, allocated):
    estimate = shared_bytes(tiles, *dims, itemsize, CARDS[card].matrix_unit, paged)
    assert allocated - SHARED_MARGIN <= estimate <= allocated + SHARED_MARGIN


@pytest.mark.parametrize(
    ("card", "tiles", "told"),
    [
        ("h200", replace(GOOD, block_m=48), "block_m is 48; it must be a power of two"),
        ("h200", replace(GOOD, num_stages=0), "num_stages is 0; it must be an int, at least 1"),
        ("h200", replace(GOOD, block_n=64.0), "block_n is 64.0; it must be a power of two"),
        ("h200", replace(GOOD, num_stages=13), "it may take [0-9]+ bytes of shared memory; a program may have 232448"),
        ("l40s", replace(GOOD, block_n=128), "it may take [0-9]+ bytes of shared memory; a program may have 101376"),
        ("h200", replace(GOOD, block_m=256), "accumulators and operands take 384 registers a thread; 191 of 255"),
        ("mi300x", replace(GOOD, block_n=32, num_stages=2, num_warps=32), "32 warps are 2048 threads; a program may have 1024"),
        ("a100", HOPPER, "the hopper kernel runs on Hopper alone, and NVIDIA A100"),
        ("h200", replace(HOPPER, num_stages=4, small_stages=4), "it takes 328704 bytes of shared memory; a program may have 232448"),
        ("h200", replace(HOPPER, block_n=256, small_n=256, num_stages=1, small_stages=1), "take 256 registers a thread; 184 may"),
        ("h200", replace(HOPPER, num_warps=4), "differ in block_n, num_stages and item_overhead alone; these would be"),
        ("h200", replace(HOPPER, kernel="cuda"), "kernel is 'cuda'"),
    ],
)  # fmt: skip
def test_what_a_chip_cannot_run_is_refused(card, tiles, told):
    assert limits.fault(GOOD, 128, 128, 2, True, CARDS["h200"]) is None
    assert limits.fault(HOPPER, 128, 128, 2, True, CARDS["h200"]) is None
    fault = limits.fault(tiles, 128, 128, 2, True, CARDS[card])
    assert fault is not None
    assert re.search(told, fault), fault


@pytest.mark.parametrize(
    ("dims", "itemsize", "paged"), [((512, 512), 2, True), ((128, 132), 2, True), ((128, 128), 4, True), ((128, 128), 2, False)]
)
def test_what_the_hopper_kernel_does_not_serve(dims, itemsize, paged):
    assert "serves paged 16-bit K/V" in limits.fault(HOPPER, *dims, itemsize, paged, CARDS["h200"])


def test_programs_an_sm():
    h200, mi300x = CARDS["h200"], CARDS["mi300x"]
    # Two programs of 115712 bytes and 1 KB each fill an H200's 228 KB; one byte more, and one lives.
    assert (h200.programs_per_sm(115712, 4, 222), h200.programs_per_sm(115713, 4, 222)) == (2, 1)
    # 128 threads of 88 registers: 5 programs by registers, of 168: 3; 8 warps of 255 fill the SM.
    assert (h200.programs_per_sm(16384, 4, 88), h200.programs_per_sm(16384, 4, 168), h200.programs_per_sm(16384, 8, 255)) == (5, 3, 1)
    # A wavefront of 64 threads with 128 registers each: 4 on each of 4 units.
    assert (mi300x.programs_per_sm(16384, 4, 128), mi300x.programs_per_sm(16640, 4, 128), mi300x.programs_per_sm(8192, 4, 0)) == (4, 3, 8)
