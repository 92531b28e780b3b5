"""The Hopper kernel against the oracle, on its chip: every kind of item, and each edge of what it serves."""

import pytest
import torch
from operator_backends import HOPPER_GPU

import uniattn
from uniattn import UnsupportedError
from uniattn.testing import assert_matches_oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="a chip of 9.0"),
]

MIXED = [(1, 3000), (1, 17), (300, 1500), (0, 8), (4, 900), (129, 129), (1, 0), (65, 40)]
CALL = ("q", "k_cache", "v_cache", "cu_seqlens_q", "seqlens_k", "page_table", "cu_seqlens_k")
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "hopper")
    return HOPPER_GPU


def heads(group, num_kv_heads=2):
    return {"num_q_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (256, 256), (96, 96), (192, 192), (192, 128), (40, 72), (128, 64)], ids=str)
def test_head_dims(hopper, dims, dtype):
    hopper.check(hopper.batch(MIXED, **heads(4), head_dim=dims[0], v_head_dim=dims[1], dtype=dtype))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16, 48])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_groups(hopper, group, head_dim):
    hopper.check(hopper.batch(MIXED, **heads(group), head_dim=head_dim, dtype=torch.bfloat16))


@pytest.mark.parametrize("page_size", [16, 24, 32, 40, 64, 128, 256, 272, 544, 1056])
@pytest.mark.parametrize("layout", ["split", "hnd", "packed", "packed_hnd", "interleaved", "flat", "mixed"])
def test_pages_and_layouts(hopper, page_size, layout):
    batch = hopper.batch(MIXED, **heads(4), head_dim=128, page_size=page_size, layout=layout, dtype=torch.bfloat16)
    hopper.check(batch)


OPTIONS = [
    {"window": (127, 0)},
    {"window": (0, 0)},
    {"window": (1000, 0), "sinks": True},
    {"window": (37, 0), "softcap": 30.0, "sinks": True},
    {"causal": False},
    {"causal": False, "window": (100, 70)},
    {"causal": False, "window": (None, 5)},
    {"window": (200, 100), "causal": [True, False] * 4},
    {"softcap": 50.0},
    {"softcap": 5.0, "magnitude": 8.0},
    {"sinks": True, "causal": [False, True] * 4},
    {"magnitude": 20.0},
    {"num_padding_rows": 200},
    {"lengths_as": "cu_seqlens_k"},
]


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (128, 16), (128, 544), (256, 32)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(hopper, options, head_dim, page_size):
    hopper.check(hopper.batch(MIXED, **heads(4), head_dim=head_dim, page_size=page_size, dtype=torch.bfloat16, **options))


@pytest.mark.parametrize("num_splits", [1, 2, 7, 64])
@pytest.mark.parametrize("window", [None, (500, 0)])
def test_splits(hopper, num_splits, window):
    batch = hopper.batch(MIXED, **heads(8), head_dim=128, dtype=torch.bfloat16, window=window, sinks=True)
    call = {name: getattr(batch, name) for name in CALL}
    plan = uniattn.plan(**call, window=window, num_splits=num_splits)
    assert plan.spec.is_hopper
    hopper.check(batch, plan=plan)


BATCHES = {
    "one decode": [(1, 9000)],
    "one long decode": [(1, 100_003)],
    "many decodes": [(1, 1 + 37 * i) for i in range(200)],
    "speculative rows": [(i % 16 + 1, 700 + 31 * i) for i in range(40)],
    "a prefill": [(4096, 4096)],
    "a chunk of a long context": [(500, 30_001)],
    "prefills": [(100 + 77 * i, 100 + 77 * i) for i in range(20)],
    "decodes and a prefill": [(1, 300 + 50 * i) for i in range(63)] + [(1985, 1985)],
    "queries longer than their keys": [(400, 100), (200, 0), (130, 1), (64, 63)],
    "around a block": [(q, kv) for q in (1, 16, 17, 32, 33) for kv in (127, 128, 129, 255, 256, 257)],
}


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_batches(hopper, lengths, head_dim):
    hopper.check(hopper.batch(lengths, **heads(4), head_dim=head_dim, dtype=torch.bfloat16))


def test_equal_calls_give_equal_bits(hopper):
    batch = hopper.batch(MIXED, **heads(4), head_dim=128, dtype=torch.bfloat16)
    out, lse = hopper.run(batch)
    for _ in range(50):
        again, lse_again = hopper.run(batch)
        assert torch.equal(out, again)
        assert torch.equal(lse, lse_again)


@pytest.mark.parametrize("lengths", [BATCHES["many decodes"], BATCHES["decodes and a prefill"]], ids=["decodes", "mixed"])
def test_a_captured_graph_serves_other_lengths(hopper, lengths):
    """One capture at a batch's sizes, replayed with other lengths, tables and values in the same tensors."""
    batch = hopper.batch(lengths, **heads(4), head_dim=128, dtype=torch.bfloat16)
    hopper.check(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = uniattn.attention(**batch.kwargs(return_lse=True))
    other = [(q, max(q, kv - 13 * (i % 5))) for i, (q, kv) in enumerate(lengths)]
    changed = hopper.batch(other, **heads(4), head_dim=128, dtype=torch.bfloat16, seed=5, num_spare_pages=3)
    pages = min(batch.k_cache.shape[0], changed.k_cache.shape[0])
    batch.k_cache.zero_()[:pages] = changed.k_cache[:pages].nan_to_num()
    batch.v_cache.zero_()[:pages] = changed.v_cache[:pages].nan_to_num()
    columns = min(batch.page_table.shape[1], changed.page_table.shape[1])
    batch.page_table[:, :columns] = changed.page_table[:, :columns].clamp(0, pages - 1)
    batch.q.copy_(changed.q)
    batch.seqlens_k.copy_(changed.seqlens_k)
    graph.replay()
    hopper_batch = batch.replace(lengths=tuple(other))
    assert_matches_oracle(hopper_batch, out, lse)


UNSERVED = {
    "fp32": {"dtype": torch.float32},
    "contiguous K/V": {"page_size": None},
    "a page of 8": {"page_size": 8},
    "a page of 20": {"page_size": 20},
    "a head dim of 512": {"head_dim": 512},
    "a head dim of 68": {"head_dim": 68},
    "ALiBi": {"alibi": True},
    "odd strides": {"layout": "gapped"},
}


@pytest.mark.parametrize("how", UNSERVED.values(), ids=UNSERVED.keys())
def test_what_it_does_not_serve_goes_to_the_portable_kernel(hopper, how, monkeypatch):
    batch = hopper.batch(MIXED, **{"head_dim": 64, "dtype": torch.bfloat16, **heads(4), **how})
    with pytest.raises(UnsupportedError, match="hopper with a call that its kernel does not serve"):
        hopper.run(batch)
    monkeypatch.setenv("UNIATTN_BACKEND", "auto")
    hopper.check(batch)
    hopper.check(batch, plan=uniattn.plan(**{name: getattr(batch, name) for name in CALL}))


@pytest.mark.parametrize("how", [{"page_size": 20}, {"page_size": 8}, {"page_size": 544}, {"page_size": None}], ids=str)
def test_a_plan_from_caches_of_other_pages(hopper, how, monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "auto")
    shape = {"head_dim": 128, "dtype": torch.bfloat16, **heads(4)}
    planned, batch = hopper.batch(MIXED, **shape), hopper.batch(MIXED, **shape, **how)
    plan = uniattn.plan(**{name: getattr(planned, name) for name in CALL})
    assert plan.spec.is_hopper
    hopper.check(batch, plan=plan)
