"""Every page size, head dim, group, layout and dtype, on a batch that mixes a short prefill, decodes and an empty sequence."""

import pytest
import torch
from operator_backends import plan_for

from uniattn.testing import LAYOUTS

LENGTHS = [(3, 37), (0, 3), (1, 18)]


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 48, 64, 100, 256, 272, 544, 1056, 1072])
def test_page_sizes(backend, page_size):
    # Ends past a page, at a page's last slot, and one short of it.
    lengths = [(2, page_size + 3), (1, page_size), (1, page_size - 1)]
    batch = backend.batch(lengths, num_q_heads=1, head_dim=16, page_size=page_size)
    backend.check(batch, plan=plan_for(batch, block_n=16 if page_size < 100 else 128))


HEAD_DIMS = [(d, d) for d in (8, 16, 24, 64, 80, 96, 128, 160, 192, 256, 512)] + [(192, 128), (576, 512), (64, 40), (40, 128)]
IN_16_BITS = [(8, 8), (80, 80), (128, 128), (192, 128)]


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "dtype"),
    [(*dims, torch.float32) for dims in HEAD_DIMS]
    + [(*dims, dtype) for dims in IN_16_BITS for dtype in (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_head_dims(backend, head_dim, v_head_dim, dtype):
    backend.check(backend.batch(LENGTHS, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype))


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "dtype"),
    [(*heads, torch.float32) for heads in ((1, 1), (2, 2), (6, 2), (5, 1), (6, 1), (14, 2), (16, 1), (48, 1))]
    + [(14, 2, torch.float16), (48, 1, torch.float16)],
    ids=str,
)
def test_groups(backend, num_q_heads, num_kv_heads, dtype):
    lengths = [(2, 30), (0, 3), (1, 18)]
    backend.check(backend.batch(lengths, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=16, dtype=dtype))


@pytest.mark.parametrize(("page_size", "dtype"), [(16, torch.float32), (5, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend, layout, page_size, dtype):
    v_head_dim = {"interleaved": 24, "mla": 16}.get(layout, 32)
    batch = backend.batch(
        LENGTHS,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=24,
        v_head_dim=v_head_dim,
        page_size=page_size,
        layout=layout,
        dtype=dtype,
    )
    backend.check(batch)


@pytest.mark.parametrize("layout", ["split", "packed", "gapped"])
@pytest.mark.parametrize("lengths_as", ["seqlens_k", "cu_seqlens_k", "both"])
def test_contiguous_keys_and_values(backend, lengths_as, layout):
    batch = backend.batch(
        LENGTHS, num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=None, layout=layout, lengths_as=lengths_as
    )
    backend.check(batch)


def test_paged_lengths_from_cu_seqlens_k(backend):
    backend.check(backend.batch(LENGTHS, lengths_as="cu_seqlens_k", table_filler=2**31 - 1))


def test_strided_queries(backend):
    """Q as a view into a fused QKV projection."""
    batch = backend.batch(LENGTHS, num_q_heads=4, num_kv_heads=2, head_dim=32)
    fused = torch.full((batch.num_tokens, 8, 40), torch.nan, device=batch.q.device)
    fused[:, 2:6, 3:35] = batch.q
    want, want_lse = backend.check(batch)
    out, lse = backend.check(batch.replace(q=fused[:, 2:6, 3:35]))
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_the_same_numbers_in_every_layout_give_the_same_bits(backend):
    how = {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 24, "dtype": torch.float16}
    want = backend.check(backend.batch(LENGTHS, **how))
    for layout in ("hnd", "packed", "gapped"):
        got = backend.run(backend.batch(LENGTHS, layout=layout, **how))
        assert torch.equal(got[0], want[0]), layout
        assert torch.equal(got[1], want[1]), layout


def test_page_table_rows_may_be_strided(backend):
    batch = backend.batch(LENGTHS)
    wide = torch.full((len(LENGTHS), batch.page_table.shape[1] + 7), -1, dtype=torch.int32, device=batch.q.device)
    wide[:, : batch.page_table.shape[1]] = batch.page_table
    backend.check(batch.replace(page_table=wide[:, : batch.page_table.shape[1]]))
