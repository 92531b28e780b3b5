"""Tiles from a chip's facts, by pure functions. That they compile without spills, and live as counted: scripts/compile_all.py."""

import itertools
from dataclasses import replace

import pytest
import torch

from uniattn.launch.target import target_of
from uniattn.schedule import tiles
from uniattn.schedule.tiles import Tiles
from uniattn.tuning import heuristic
from uniattn.tuning.cards import CARDS

HEAD_DIMS = [(8, 8), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (512, 512), (576, 512)]
H200 = CARDS["h200"]
DECODE_128 = Tiles(16, 32, 7, 4, bulk=False, programs_per_sm=4, heads_first=True, item_overhead=32)


@pytest.mark.parametrize(
    ("rows", "dim", "chosen"),
    [
        (1, 128, DECODE_128), (16, 128, DECODE_128),
        (64, 128, Tiles(64, 64, 5, 4, 16, 32, 5, programs_per_sm=2, heads_first=True)),
        (4096, 128, Tiles(128, 64, 5, 8, 16, 64, 5)),
        (1, 256, replace(DECODE_128, programs_per_sm=2)),
        (1, 512, replace(DECODE_128, block_n=16, programs_per_sm=2)),
        (4096, 512, Tiles(64, 32, 3, 8, 16, 16, 5, bulk=False)),
    ],
)  # fmt: skip
def test_what_was_measured_on_an_h200_stays(rows, dim, chosen):
    assert heuristic.choose(rows, dim, dim, 2, H200) == chosen
    # Where torch does not tell the bandwidth, nothing else is chosen.
    assert heuristic.choose(rows, dim, dim, 2, replace(H200, memory_bytes_per_s=None)) == chosen


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS.keys())
@pytest.mark.parametrize("paged", [True, False])
def test_everything_fits_into_shared_memory(card, paged):
    for (head_dim, v_head_dim), itemsize in itertools.product(HEAD_DIMS, (2, 4)):
        for t in heuristic.every(head_dim, v_head_dim, itemsize, card, paged):
            for m, n, stages in ((t.block_m, t.block_n, t.num_stages), (t.small_m, t.small_n, t.small_stages)):
                assert m == 0 or n >= 16
                assert tiles.smem_bytes(m, n, stages, head_dim, v_head_dim, itemsize) <= card.max_shared_bytes or (n, stages) == (16, 1)
            # Compiled, 512 dims of fp32 take less than this estimate on the chips with the least shared memory.
            if itemsize == 2:
                assert tiles.shared_bytes(t, head_dim, v_head_dim, itemsize, card.matrix_unit, paged) <= card.max_shared_bytes


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS.keys())
def test_every_names_all_that_is_chosen(card):
    for (head_dim, v_head_dim), itemsize, paged in itertools.product(HEAD_DIMS, (2, 4), (True, False)):
        facts = (head_dim, v_head_dim, itemsize, card, paged)
        chosen = {heuristic.choose(rows, *facts) for rows in [*range(300), 10**4, 10**6]}
        assert chosen == set(heuristic.every(*facts))


def test_what_an_sm_holds_is_counted():
    """Of four decode programs, an A100's SM holds 164 KB: they live with less K/V in flight each. An MI300X holds 64 KB."""
    few = {name: heuristic.choose(1, 128, 128, 2, CARDS[name]) for name in ("a100", "l40s", "mi300x", "b200")}
    assert {name: (t.programs_per_sm, t.num_stages) for name, t in few.items()} == {
        "a100": (4, 6), "l40s": (4, 4), "mi300x": (4, 2), "b200": (4, 7),
    }  # fmt: skip
    # A tcgen05 kernel takes 2 KB beside Q, K and V where a wgmma one takes 1: two of these programs fit an H200's SM to the byte.
    medium = {name: heuristic.choose(64, 128, 128, 2, CARDS[name]).programs_per_sm for name in ("h200", "b200", "mi300x")}
    assert medium == {"h200": 2, "b200": 1, "mi300x": 1}


def test_bandwidth_keeps_bytes_in_flight():
    """An A100's SM holds four programs of two buffers of 14 KB (96 dims), or three of three, which have more in flight."""
    card = CARDS["a100"]

    def few(kb_in_flight):
        bandwidth = kb_in_flight * 1024 * card.num_sms / heuristic.MEMORY_LATENCY_S
        t = heuristic.choose(1, 96, 96, 2, replace(card, memory_bytes_per_s=bandwidth))
        return t.programs_per_sm, t.num_stages

    assert few(20) == few(112) == (4, 6)
    assert few(113) == few(126) == (3, 7)
    # What no choice covers is served by the most programs.
    assert few(200) == (4, 6)


def test_the_interpreter_counts_as_it_did():
    t = heuristic.choose(1, 128, 128, 2, target_of(torch.device("cpu")))
    assert (t.block_m, t.block_n, t.num_stages, t.programs_per_sm) == (16, 32, 4, 4)
