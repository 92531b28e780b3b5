"""`write_kv` against its twin: the slots named get the tokens' bits, nothing else changes."""

import pytest
import torch

import uniattn
from uniattn import reference
from uniattn.testing import LAYOUTS
from uniattn.testing.batches import allocate


def tokens(num_tokens, num_kv_heads, head_dim, v_head_dim, dtype, device):
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(num_tokens, num_kv_heads, head_dim, generator=gen).to(dtype).to(device)
    return k, torch.randn(num_tokens, num_kv_heads, v_head_dim, generator=gen).to(dtype).to(device)


def check(backend, slots, *, layout="split", page_size=4, num_pages=5, num_kv_heads=2, head_dim=24, v_head_dim=24,
          dtype=torch.float32, slot_dtype=torch.int64):  # fmt: skip
    """Write into caches full of NaN and compare every bit of them, the gaps between rows included, with the twin's."""
    k, v = tokens(len(slots), num_kv_heads, head_dim, v_head_dim, dtype, backend.device)
    k_cache, v_cache = allocate(
        layout, num_pages, page_size, num_kv_heads, head_dim, v_head_dim, dtype=dtype, device=backend.device
    )
    slot_mapping = torch.tensor(slots, dtype=slot_dtype, device=backend.device)
    want_k, want_v = reference.write_kv(k, v, k_cache, v_cache, slot_mapping)
    before = k_cache.untyped_storage().tolist() if layout == "gapped" and not backend.is_gpu else None
    uniattn.write_kv(k, v, k_cache, v_cache, slot_mapping)
    torch.testing.assert_close(k_cache, want_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v_cache, want_v, rtol=0, atol=0, equal_nan=True)
    if before is not None:
        k_cache.fill_(torch.nan)
        assert k_cache.untyped_storage().tolist() == before
    return k_cache, v_cache


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "mla"])
def test_layouts(backend, layout):
    check(backend, [3, 0, 17, 9], layout=layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes(backend, dtype, slot_dtype):
    check(backend, [3, -1, 19, 0], dtype=dtype, slot_dtype=slot_dtype)


@pytest.mark.parametrize("slots", [[-1], [-1, -1, 2], [5, -1, 6], [-100, 7, -1]], ids=str)
def test_negative_slots_are_skipped(backend, slots):
    k_cache, _ = check(backend, slots)
    assert int(k_cache[..., 0, 0].isfinite().sum()) == sum(slot >= 0 for slot in slots)


@pytest.mark.parametrize("page_size", [1, 3, 16, 272, 1056])
def test_page_sizes(backend, page_size):
    last = 2 * page_size - 1
    check(backend, [last, 0, page_size - 1] if page_size > 1 else [last, 0], page_size=page_size, num_pages=2)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(8, 8), (80, 80), (192, 128), (40, 128), (576, 512)])
def test_head_dims(backend, head_dim, v_head_dim):
    check(backend, [3, 8], head_dim=head_dim, v_head_dim=v_head_dim, num_kv_heads=3)


def test_slots_outside_the_cache_write_nothing(backend):
    """An engine's bug must not become another request's corruption."""
    k, v = tokens(3, 1, 8, 8, torch.float32, backend.device)
    k_cache, v_cache = torch.zeros(2, 4, 1, 8, device=backend.device), torch.zeros(2, 4, 1, 8, device=backend.device)
    inner_k, inner_v = k_cache[:1], v_cache[:1]
    uniattn.write_kv(k, v, inner_k, inner_v, torch.tensor([4, 2**31, 1], device=backend.device))
    assert k_cache.abs().sum(-1).flatten().nonzero().flatten().tolist() == [1]
    assert v_cache.abs().sum(-1).flatten().nonzero().flatten().tolist() == [1]


def test_strided_tokens(backend):
    """K and V as views of a fused QKV projection."""
    fused = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(0)).to(backend.device)
    k, v = fused[:, 2:4], fused[:, 4:6]
    k_cache, v_cache = allocate("packed", 3, 4, 2, 16, 16, dtype=torch.float32, device=backend.device)
    slots = torch.tensor([9, -1, 4], device=backend.device)
    want = reference.write_kv(k, v, k_cache, v_cache, slots)
    uniattn.write_kv(k, v, k_cache, v_cache, slots)
    torch.testing.assert_close((k_cache, v_cache), want, rtol=0, atol=0, equal_nan=True)


def test_no_tokens(backend):
    k_cache, _ = check(backend, [])
    assert k_cache.isnan().all()


def test_what_was_written_is_what_attention_reads(backend):
    """A decode step: write each sequence's newest token, then attend."""
    batch = backend.batch([(1, 20), (1, 33)], head_dim=16, page_size=8)
    want, _ = backend.check(batch)
    newest = torch.tensor([19, 32], device=batch.q.device)
    pages = batch.page_table[torch.arange(2, device=batch.q.device), newest // 8].long()
    k, v = (cache[pages, newest % 8].clone() for cache in (batch.k_cache, batch.v_cache))
    batch.k_cache[pages, newest % 8] = batch.v_cache[pages, newest % 8] = torch.nan
    uniattn.write_kv(k, v, batch.k_cache, batch.v_cache, pages * 8 + newest % 8)
    assert torch.equal(backend.check(batch)[0], want)
