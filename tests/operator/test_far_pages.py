"""Pages whose ids pass 2^16 and whose elements lie past 2^31: offsets are 64-bit."""

import pytest
import torch
from operator_backends import tiny_tiles

import uniattn
from uniattn.testing import assert_matches_oracle


def moved_far(batch, num_pages, ids, dtype):
    """`batch` with its pages at `ids` of caches of `num_pages` pages; memory between them is reserved but never touched."""
    used = batch.page_table[batch.page_table >= 0]
    assert len(ids) == len(used)
    caches = []
    for cache in (batch.k_cache, batch.v_cache):
        far = torch.empty((num_pages, *cache.shape[1:]), dtype=dtype, device=cache.device)
        for page, far_page in zip(used.tolist(), ids, strict=True):
            far[far_page] = cache[page]
        caches.append(far)
    table = batch.page_table.clone()
    table[batch.page_table >= 0] = torch.tensor(ids, dtype=torch.int32, device=table.device)
    return batch.replace(k_cache=caches[0], v_cache=caches[1], page_table=table)


@pytest.mark.parametrize(
    ("num_pages", "ids"),
    [(65540, [65535, 65536, 65537]), (70000, [67000, 3, 69999])],
    ids=str,
)
def test_page_ids_past_2_to_the_16(backend, num_pages, ids):
    batch = backend.batch([(2, 20), (1, 9)], num_q_heads=8, num_kv_heads=8, head_dim=16, page_size=16, dtype=torch.float16)
    backend.check(moved_far(batch, num_pages, ids, torch.float16))


def test_elements_past_2_to_the_31(backend):
    """A cache of 2^31 elements and more, as one layer's is on a large chip: its last pages, and one from the middle."""
    num_kv_heads, page_size, head_dim = 8, 16, 256
    num_pages = 2**31 // (num_kv_heads * page_size * head_dim) + 4
    batch = backend.batch(
        [(2, 20), (1, 9)], num_q_heads=8, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size, dtype=torch.float16
    )
    backend.check(moved_far(batch, num_pages, [num_pages - 1, num_pages // 2 + 1, num_pages - 2], torch.float16))


def test_write_past_2_to_the_31_elements(backend):
    num_kv_heads, page_size, head_dim = 8, 16, 256
    num_pages = 2**31 // (num_kv_heads * page_size * head_dim) + 4
    k_cache, v_cache = (
        torch.empty(num_pages, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=backend.device) for _ in range(2)
    )
    k, v = (torch.full((2, num_kv_heads, head_dim), x, dtype=torch.float16, device=backend.device) for x in (3.0, 4.0))
    slots = torch.tensor([num_pages * page_size - 1, num_pages * page_size // 2 + 5], device=backend.device)
    uniattn.write_kv(k, v, k_cache, v_cache, slots)
    for slot in slots.tolist():
        assert (k_cache[slot // page_size, slot % page_size] == 3).all()
        assert (v_cache[slot // page_size, slot % page_size] == 4).all()


def heads_far_apart(x):
    """`x` `[tokens, heads, dim]` with heads so far apart that the last lies past 2^31 elements; the gaps are never touched."""
    num_tokens, num_heads, dim = x.shape
    distance = (2**31 // (num_heads - 1) // dim + 8) * dim
    far = torch.empty(num_heads, distance // dim, dim, dtype=x.dtype, device=x.device).transpose(0, 1)[:num_tokens]
    far.copy_(x)
    return far


@pytest.mark.parametrize("num_splits", [1, 3])
def test_heads_past_2_to_the_31_elements_apart(backend, num_splits):
    """Q and the output as heads-first views; the last of 33 heads times a stride of 2^26 elements needs 64 bits."""
    batch = backend.batch([(2, 50), (1, 40)], num_q_heads=33, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    plan = tiny_tiles(batch, num_splits)
    out = heads_far_apart(batch.q)
    assert (batch.q.shape[1] - 1) * out.stride(1) > 2**31
    batch = batch.replace(q=heads_far_apart(batch.q))
    _, lse = backend.run(batch, plan=plan, out=out)
    assert_matches_oracle(batch, out, lse)


def test_write_heads_past_2_to_the_31_elements_apart(backend):
    k = heads_far_apart(torch.randn(2, 33, 16, device=backend.device).half())
    k_cache, v_cache = (torch.zeros(1, 4, 33, 16, dtype=torch.float16, device=backend.device) for _ in range(2))
    uniattn.write_kv(k, k, k_cache, v_cache, torch.tensor([2, 0], device=backend.device))
    assert torch.equal(k_cache[0, 2], k[0])
    assert torch.equal(v_cache[0, 0], k[1])
