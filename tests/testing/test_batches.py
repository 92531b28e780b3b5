"""Batches hold what they say, in the memory layout asked for, and everything else is poison."""

import pytest
import torch

from uniattn import reference
from uniattn.testing import LAYOUTS, make_batch, poison_page_table, poison_unread, poisoned_allocations, poisoned_out
from uniattn.testing.poison import read_slots

LENGTHS = [(3, 19), (1, 1), (0, 5), (2, 0), (4, 33)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_the_same_numbers(layout):
    v_head_dim = 8 if layout == "interleaved" else 6
    how = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": v_head_dim, "page_size": 5}
    batch, split = make_batch(LENGTHS, layout=layout, **how), make_batch(LENGTHS, **how)
    assert batch.k_cache.stride(-1) == batch.v_cache.stride(-1) == 1
    assert batch.k_cache.shape == split.k_cache.shape
    assert batch.v_cache.shape == split.v_cache.shape
    torch.testing.assert_close(batch.k_cache, split.k_cache, rtol=0, atol=0, equal_nan=True)
    if layout == "mla":
        assert batch.v_cache.data_ptr() == batch.k_cache.data_ptr()
    else:
        torch.testing.assert_close(batch.v_cache, split.v_cache, rtol=0, atol=0, equal_nan=True)


def test_layouts_differ_in_strides():
    page, dim = 4, 8
    strides = {}
    for layout in LAYOUTS:
        batch = make_batch([(1, 9)], num_q_heads=2, num_kv_heads=2, head_dim=dim, page_size=page, layout=layout)
        strides[layout] = batch.k_cache.stride()
    assert strides["split"] == strides["flat"] == (page * 2 * dim, 2 * dim, dim, 1)
    assert strides["hnd"] == (page * 2 * dim, dim, page * dim, 1)
    assert strides["packed"] == (page * 2 * 2 * dim, 2 * 2 * dim, 2 * dim, 1)
    assert strides["interleaved"] == (2 * page * 2 * dim, 2 * dim, dim, 1)


def test_unused_memory_is_nan_and_table_padding_is_filler():
    batch = make_batch(LENGTHS, page_size=16, table_filler=123456, num_padding_rows=2, num_spare_pages=3)
    used = sum(kv_len for _, kv_len in LENGTHS)
    assert int(batch.k_cache[:, :, 0, 0].isfinite().sum()) == used
    assert int(batch.v_cache[:, :, 0, 0].isfinite().sum()) == used
    counts = [-(-kv_len // 16) for _, kv_len in LENGTHS]
    assert batch.k_cache.shape[0] == sum(counts) + 3
    assert (batch.page_table != 123456).sum(1).tolist() == counts
    assert batch.q[-2:].isnan().all()
    assert batch.q[:-2].isfinite().all()


def test_pages_are_shuffled():
    batch = make_batch([(1, 640)], page_size=16)
    ids = batch.page_table[0, :40].tolist()
    assert len(set(ids)) == 40
    assert ids != sorted(ids)


def test_contiguous_rows_leave_gaps_where_both_lengths_are_given():
    batch = make_batch([(1, 4), (2, 3)], page_size=None, lengths_as="both")
    assert batch.cu_seqlens_k.tolist() == [0, 6, 11]
    assert batch.seqlens_k.tolist() == [4, 3]
    assert batch.k_cache[:, 0, 0].isnan().tolist() == [i in (4, 5, 9, 10) for i in range(11)]


def test_poison_reaches_exactly_what_no_query_sees():
    batch = make_batch([(2, 40)], page_size=16, window=(3, 0))
    # Queries stand at 38 and 39 and see 35..38 and 36..39: the third page's rows 3 to 7.
    read = read_slots(batch)
    assert read.nonzero().tolist() == [[int(batch.page_table[0, 2]), row] for row in range(3, 8)]
    before = reference.attention(**batch.kwargs())
    poison_page_table(poison_unread(batch, torch.inf), -7)
    assert batch.k_cache[~read].isinf().all()
    assert (batch.page_table[0] == -7).tolist() == [True, True, False, True, True]
    torch.testing.assert_close(reference.attention(**batch.kwargs()), before, rtol=0, atol=0)


def test_poisoned_out_is_nan_with_gaps():
    batch = make_batch([(2, 4)], v_head_dim=32)
    out = poisoned_out(batch, gap=4)
    assert out.shape == (2, 2, 32)
    assert out.stride() == (72, 36, 1)
    assert out.isnan().all()


def test_poisoned_allocations_fill_new_memory_and_restore_torch():
    with poisoned_allocations():
        assert torch.empty(4).isnan().all()
        assert torch.zeros(1).new_empty(4, dtype=torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_row_is_named_by_its_sequence():
    batch = make_batch([(3, 19), (2, 2)], num_padding_rows=1)
    assert batch.where(4) == "sequence 1 (q_len 2, kv_len 2), its query token 1"
    assert batch.where(5).startswith("padding row 5")
