"""NaN and Inf in what no query sees, garbage in the page table: none of it reaches the output. Outputs are written in full."""

import pytest
import torch
from operator_backends import plan_for, tiny_tiles, two_tile_sizes

import uniattn
from uniattn.testing import LAYOUTS, assert_matches_oracle, poison_page_table, poison_unread, poisoned_out

LENGTHS = [(3, 37), (1, 50), (2, 1)]
PLANS = [tiny_tiles, two_tile_sizes, plan_for]


@pytest.mark.parametrize("plan", PLANS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{}, {"window": (6, -1)}, {"window": (6, 3), "causal": False}], ids=str)
def test_poison_in_unread_keys_and_values(backend, options, value, plan):
    batch = poison_unread(backend.batch(LENGTHS, head_dim=16, page_size=8, **options), value)
    backend.check(batch, plan=plan(batch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_poison_between_the_rows_of_a_strided_cache(backend, layout):
    """Head dims that are no power of two, so that a tile's padding lies over the neighbouring head, token or V."""
    v_head_dim = 24 if layout in ("interleaved", "mla") else 40
    batch = backend.batch(
        LENGTHS[:2], num_q_heads=2, num_kv_heads=2, head_dim=24, v_head_dim=v_head_dim, layout=layout, page_size=8
    )
    backend.check(batch)


@pytest.mark.parametrize("filler", [-1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("window", [None, (6, 0)], ids=str)
def test_garbage_in_the_page_table(backend, filler, window):
    batch = poison_page_table(backend.batch(LENGTHS, head_dim=16, page_size=8, window=window), filler)
    backend.check(batch)
    backend.check(batch, plan=tiny_tiles(batch, num_splits=3))


def test_pages_shared_by_sequences(backend):
    """A common prefix: two sequences read the same pages, and only one of them is inside its window there."""
    batch = backend.batch([(2, 40), (1, 40)], head_dim=16, page_size=8, window=(20, -1))
    batch.page_table[1, :5] = batch.page_table[0, :5]
    backend.check(batch)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("gap", [0, 8])
def test_out_is_written_in_full_and_nothing_beside_it(backend, gap, num_splits):
    batch = backend.batch([*LENGTHS, (4, 2), (2, 0)], head_dim=16, num_padding_rows=3)
    out = poisoned_out(batch, gap)
    got, lse = backend.run(batch, out=out, plan=plan_for(batch, num_splits))
    assert got is out
    assert_matches_oracle(batch, out, lse)
    beside = out.as_strided((*out.shape[:2], gap), out.stride(), out.shape[2])
    assert beside.isnan().all()


def test_out_may_be_a_view_with_heads_first(backend):
    batch = backend.batch(LENGTHS, head_dim=16)
    out = torch.full((2, batch.num_tokens, 16), torch.nan, device=batch.q.device).transpose(0, 1)
    _, lse = backend.run(batch, out=out)
    assert_matches_oracle(batch, out, lse)


def test_inputs_are_not_written(backend):
    batch = backend.batch(LENGTHS, head_dim=16, sinks=True, alibi=True)
    tensors = {name: value for name, value in batch.kwargs().items() if isinstance(value, torch.Tensor)}
    before = {name: value.clone() for name, value in tensors.items()}
    backend.check(batch)
    for name, value in tensors.items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_without_return_lse_only_out_comes_back(backend):
    batch = backend.batch(LENGTHS, head_dim=16)
    want, _ = backend.check(batch)
    assert torch.equal(uniattn.attention(**batch.kwargs()), want)
    assert torch.equal(uniattn.attention(**batch.kwargs(), plan=plan_for(batch, 1)), want)


@pytest.mark.parametrize(("window", "causal"), [(None, True), ((-1, 3), False)], ids=str)
def test_a_tile_stops_where_its_last_row_stops_seeing(kernel, window, causal):
    """The causal end bounds the loop, not the mask alone: rows of earlier tiles never touch a NaN that only later rows see."""
    batch = kernel.batch([(64, 64)], num_q_heads=1, head_dim=16, page_size=8, window=window, causal=causal)
    last_page = batch.page_table[0, 7]
    batch.k_cache[last_page] = batch.v_cache[last_page] = torch.nan  # keys 56 to 63
    out, lse = kernel.run(batch, plan=tiny_tiles(batch))
    assert out[:48].isfinite().all()
    assert lse[:, :48].isfinite().all()
    assert out[56:].isnan().all()


def test_a_tile_starts_where_its_first_row_starts_seeing(kernel):
    """The same for the start of a window."""
    batch = kernel.batch([(64, 64)], num_q_heads=1, head_dim=16, page_size=8, window=(5, 0))
    first_page = batch.page_table[0, 0]
    batch.k_cache[first_page] = batch.v_cache[first_page] = torch.nan  # keys 0 to 7
    out, lse = kernel.run(batch, plan=tiny_tiles(batch))
    assert out[16:].isfinite().all()
    assert lse[:, 16:].isfinite().all()
    assert out[:8].isnan().all()
