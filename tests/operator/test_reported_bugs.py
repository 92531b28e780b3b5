"""Bugs of other paged-attention kernels, found by reading them or reported by their users, each by what triggers it."""

import pytest
import torch
from operator_backends import plan_for, tiny_tiles, two_tile_sizes

from uniattn.testing import assert_matches_oracle


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(1, 1), (2, 1), (4, 1)])
@pytest.mark.parametrize("causal", [False, [False]], ids=str)
def test_non_causal_window_with_several_queries_a_tile(backend, num_q_heads, num_kv_heads, causal):
    batch = backend.batch(
        [(40, 60)], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=16, causal=causal, window=(7, -1)
    )
    backend.check(batch, plan=tiny_tiles(batch))


def test_nan_in_the_tail_of_the_last_page(backend):
    out, _ = backend.check(backend.batch([(3, 19)], page_size=16))
    assert out.isfinite().all()


@pytest.mark.parametrize("plan", [tiny_tiles, plan_for], ids=lambda f: f.__name__)
def test_fully_masked_rows_of_more_queries_than_keys(backend, plan):
    batch = backend.batch([(4, 2)])
    out, _ = backend.check(batch, plan=plan(batch))
    assert (out[:2] == 0).all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2, 4])
def test_padded_rows_with_seq_len_zero(backend, num_splits, sinks):
    """One query over no keys, beside a sequence long enough to split: the split path must still write its row."""
    batch = backend.batch([(1, 0), (1, 150), (1, 0)], head_dim=16, sinks=sinks)
    out, _ = backend.check(batch, plan=tiny_tiles(batch, num_splits=num_splits))
    assert (out[[0, 2]] == 0).all()


@pytest.mark.parametrize(("head_dim", "num_q_heads", "num_kv_heads"), [(512, 8, 4), (160, 2, 1)])
def test_head_dims_of_512_and_160(backend, head_dim, num_q_heads, num_kv_heads):
    batch = backend.batch([(2, 20), (1, 9)], num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    backend.check(batch)


def test_layers_of_different_head_dims_share_no_scratch(backend):
    """Scratch sized once, by the model's head dim, overflowed in the layers that have a larger one."""
    for head_dim in (32, 128, 32):
        batch = backend.batch([(1, 100)], num_q_heads=1, head_dim=head_dim)
        backend.check(batch, plan=tiny_tiles(batch, num_splits=3))


def test_groups_above_16(backend):
    batch = backend.batch([(2, 40), (1, 17)], num_q_heads=48, num_kv_heads=1, head_dim=16)
    backend.check(batch, plan=tiny_tiles(batch))


def test_group_7_of_28_heads(backend):
    lengths = [(1, 256)] if backend.name != "triton-interpreter" else [(1, 50)]
    backend.check(backend.batch(lengths, num_q_heads=28, num_kv_heads=4, head_dim=128, page_size=16))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_in_values_freed_by_the_window(backend, num_splits):
    """Pages left behind by a sliding window are reused; 0 x NaN is NaN, so they must not be loaded at all."""
    batch = backend.batch([(1, 100), (3, 80)], head_dim=16, page_size=8, window=(12, 0), sinks=True)
    assert batch.v_cache[batch.page_table[0, 0]].isnan().all()
    out, _ = backend.check(batch, plan=tiny_tiles(batch, num_splits=num_splits))
    assert out.isfinite().all()


def test_window_that_starts_off_a_tile(backend):
    for left in (15, 16, 17, 31, 32, 33):
        batch = backend.batch([(2, 75)], num_q_heads=1, head_dim=8, page_size=4, window=(left, 0))
        backend.check(batch, plan=tiny_tiles(batch))


def test_page_16_with_a_local_window(backend):
    batch = backend.batch([(20, 64), (1, 64)], head_dim=16, page_size=16, window=(15, 0), num_spare_columns=0)
    backend.check(batch)


@pytest.mark.parametrize("lengths", [[(1, 1), (1, 3)], [(1, 32), (1, 64), (1, 96), (1, 48)]], ids=str)
def test_nan_in_unused_slots_of_a_preallocated_cache(backend, lengths):
    """A cache of one page of 128 slots a sequence, as static caches are."""
    batch = backend.batch(lengths, num_q_heads=2, num_kv_heads=2, head_dim=16, page_size=128, num_spare_columns=0)
    out, _ = backend.check(batch)
    assert out.isfinite().all()


def test_fewer_keys_than_16(backend):
    batch = backend.batch([(8, 9)], num_q_heads=14, num_kv_heads=2, head_dim=64, page_size=16)
    backend.check(batch)


def test_scattered_pages(backend):
    batch = backend.batch([(1, 9), (2, 40)], head_dim=16, page_size=4, num_spare_pages=50)
    out, _ = backend.check(batch)
    assert (out != 0).all()


@pytest.mark.parametrize("lengths", [[(0, 3), (1, 4), (0, 2), (1, 5)], [(0, 4), (12, 30), (8, 20), (0, 0)]], ids=str)
def test_zero_lengths_among_others(backend, lengths):
    batch = backend.batch(lengths, head_dim=16)
    backend.check(batch)
    backend.check(batch, plan=two_tile_sizes(batch))


def test_a_row_does_not_depend_on_its_neighbours(backend):
    """14 query and 2 KV heads, cu_seqlens_q [0, 1, 10] against [0, 1, 11]: with tiles fixed, the first row keeps its bits."""
    how = {"num_q_heads": 14, "num_kv_heads": 2, "head_dim": 64 if backend.is_gpu else 16, "page_size": 16}
    kv_len = 19802 if backend.is_gpu else 70
    ten = backend.batch([(1, kv_len), (10, 12)], **how)
    nine = ten.replace(lengths=((1, kv_len), (9, 12)), q=ten.q[:10], cu_seqlens_q=ten.cu_seqlens_q - ten.cu_seqlens_q // 11)
    assert nine.cu_seqlens_q.tolist() == [0, 1, 10]
    (out, lse), (out_of_nine, lse_of_nine) = (backend.check(b, plan=tiny_tiles(b, num_splits=2)) for b in (ten, nine))
    assert torch.equal(out[0], out_of_nine[0])
    assert torch.equal(lse[:, 0], lse_of_nine[:, 0])


def test_the_tile_does_not_follow_the_page_size(backend):
    """A tile as large as a page of 1056 took half an hour to compile."""
    sizes = {
        page_size: plan_for(backend.batch([(1, 20)], num_q_heads=1, head_dim=8, page_size=page_size, num_spare_pages=0), 1)
        for page_size in (16, 544, 1056)
    }
    assert len({(p.spec.block_m, p.spec.block_n) for p in sizes.values()}) == 1


def test_no_sinks_after_sinks(backend):
    """The same shapes with and without an optional argument must not share a kernel."""
    batch = backend.batch([(2, 20)], head_dim=16)
    sinks = torch.zeros(2, device=batch.q.device)
    backend.check(batch, sinks=sinks)
    backend.check(batch)
    backend.check(batch, alibi_slopes=torch.ones(2, device=batch.q.device))
    backend.check(batch)


def test_layers_that_differ_in_window_softcap_and_dtype(backend):
    """A launch cache that forgets an argument gives a layer its neighbour's kernel."""
    for dtype in (torch.float32, torch.float16):
        for options in ({"window": (5, 0)}, {}, {"softcap": 2.0}, {"window": (9, 0)}):
            backend.check(backend.batch([(2, 30)], num_q_heads=1, head_dim=16, dtype=dtype, **options))


def test_misaligned_inputs_after_aligned_ones(backend):
    """Vector loads chosen for 16-byte aligned tensors must not serve others."""
    batch = backend.batch([(2, 30)], head_dim=16, dtype=torch.float16)
    want = backend.check(batch)
    for name in ("q", "k_cache", "v_cache", "page_table", "cu_seqlens_q", "seqlens_k"):
        tensor = getattr(batch, name)
        shifted = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
        shifted.copy_(tensor)
        out, lse = backend.run(batch.replace(**{name: shifted}))
        assert_matches_oracle(batch, out, lse)
        assert torch.equal(out, want[0]), name
