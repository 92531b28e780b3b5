"""K/V split over programs and merged gives what the unsplit launch gives, empty splits, sinks and padding included."""

import pytest
import torch
from operator_backends import plan_for, tiny_tiles, two_tile_sizes

# The first is long enough for several splits; the others leave later splits empty or all of them but one.
LENGTHS = [(1, 300), (2, 70), (3, 5), (4, 2), (1, 0)]


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": (100, -1)}, {"softcap": 2.0, "alibi": True}], ids=str)
def test_forced_splits(backend, options):
    batch = backend.batch(LENGTHS, head_dim=16, num_padding_rows=2, **options)
    backend.check(batch, plan=tiny_tiles(batch, num_splits=4))


@pytest.mark.parametrize("num_splits", [2, 3, 7, 30])
def test_any_number_of_splits(backend, num_splits):
    batch = backend.batch([(1, 200)], num_q_heads=1, head_dim=16, sinks=True)
    backend.check(batch, plan=tiny_tiles(batch, num_splits=num_splits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_splits_in_16_bits(backend, dtype):
    batch = backend.batch([(1, 280), (2, 40)], head_dim=32, v_head_dim=24, dtype=dtype)
    backend.check(batch, plan=tiny_tiles(batch, num_splits=3))


def test_splits_with_two_tile_sizes(backend):
    batch = backend.batch([(20, 150), (1, 150)], head_dim=16, causal=[False, True])
    backend.check(batch, plan=two_tile_sizes(batch, num_splits=2))


def test_split_and_unsplit_agree(backend):
    batch = backend.batch([(1, 260), (3, 90)], head_dim=16, sinks=True)
    whole = backend.check(batch, plan=tiny_tiles(batch, num_splits=1))
    split = backend.check(batch, plan=tiny_tiles(batch, num_splits=4))
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)


def test_a_long_decode_is_split_without_being_asked(backend):
    """The rule itself: few programs over long K/V split, many programs do not."""
    long = backend.batch([(1, 700)], num_q_heads=1, head_dim=8, page_size=64)
    backend.check(long)
    if backend.uniattn_backend == "triton":
        num_items = [int(plan_for(batch).buffer[0]) for batch in (long, backend.batch([(1, 30)], head_dim=8))]
        assert num_items[0] > 1
        assert num_items[1] == 1


def test_a_plan_is_shared_by_layers_of_one_batch(backend):
    batch = backend.batch([(1, 90), (2, 40)], head_dim=16)
    plan = plan_for(batch)
    backend.check(batch, plan=plan)
    other = backend.batch([(1, 90), (2, 40)], head_dim=16, seed=7, softcap=3.0, sinks=True)
    backend.check(other, plan=plan)
