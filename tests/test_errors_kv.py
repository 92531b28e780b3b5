"""Wrong arguments of `merge_states` and `write_kv`, beside right ones."""


import pytest
import torch
from error_tools import DV, HKV, HQ, PAGE_SIZE, PAGES, POISON, D, T, forbid_ops, meta, strided

import uniattn
from uniattn import ArgumentError, UniattnError, UnsupportedError


@pytest.fixture
def no_op(monkeypatch):
    forbid_ops(monkeypatch)


def merged(**changes):
    parts = {"outs": [torch.randn(T, HQ, DV) for _ in range(2)], "lses": [torch.randn(HQ, T) for _ in range(2)]}
    return {**parts, **changes}


MERGE = [
    ("outs-type", {"outs": None}, ["outs: got NoneType", "list of tensors"]),
    ("outs-empty", {"outs": [], "lses": []}, ["outs: got list []", "at least one part"]),
    ("outs-rank", {"outs": torch.randn(2, T, DV)}, ["outs: got float32 tensor [2, 7, 8]", "4 dims"]),
    (
        "outs-part",
        {"outs": [torch.randn(T, HQ, DV), torch.randn(T, HQ, D)]},
        ["outs[1]: got float32 tensor [7, 4, 16]", "like outs[0]"],
    ),
    ("outs-dtype", {"outs": [torch.randn(T, HQ, DV), torch.randn(T, HQ, DV).half()]}, ["outs[1]: got float16", "like outs[0]"]),
    ("outs-device", {"outs": [torch.randn(T, HQ, DV), meta(T, HQ, DV)]}, ["outs[1]: got", "on meta"]),
    ("outs-grad", {"outs": [torch.randn(T, HQ, DV), torch.randn(T, HQ, DV, requires_grad=True)]}, ["outs: got requires_grad"]),
    ("lses-count", {"lses": [torch.randn(HQ, T)]}, ["lses: got 1 parts", "2 parts"]),
    ("lses-dtype", {"lses": torch.randn(2, HQ, T).half()}, ["lses: got float16", "float32"]),
    ("lses-shape", {"lses": torch.randn(2, T, HQ)}, ["lses: got float32 tensor [7, 4]", "= [4, 7]", "transpose"]),
    ("lses-part", {"lses": [torch.randn(HQ, T), torch.randn(T, HQ)]}, ["lses[1]: got float32 tensor [7, 4]", "= [4, 7]"]),
    ("lses-device", {"lses": [torch.randn(HQ, T), meta(HQ, T)]}, ["lses[1]: got", "on meta"]),
]


@pytest.mark.parametrize(("wrong", "words"), [pytest.param(*c[1:], id=c[0]) for c in MERGE])
def test_merge_states(wrong, words, no_op):
    with pytest.raises(ArgumentError) as error:
        uniattn.merge_states(**merged(**wrong))
    for word in words:
        assert word in str(error.value)


def test_merge_states_right():
    call = merged()
    from_lists = uniattn.merge_states(**call)
    stacked = uniattn.merge_states(torch.stack(call["outs"]), torch.stack(call["lses"]))
    assert all(torch.equal(a, b) for a, b in zip(from_lists, stacked, strict=True))


def written(**changes):
    call = {
        "k": torch.randn(T, HKV, D),
        "v": torch.randn(T, HKV, DV),
        "k_cache": torch.full((PAGES, PAGE_SIZE, HKV, D), POISON),
        "v_cache": torch.full((PAGES, PAGE_SIZE, HKV, DV), POISON),
        "slot_mapping": torch.arange(T),
    }
    return {**call, **changes}


WRITE = [
    ("k-rank", {"k": torch.randn(T, D)}, {}, ["k: got float32 tensor [7, 16]", "3 dims"]),
    ("k-heads", {"k": torch.randn(T, 1, D), "v": torch.randn(T, 1, DV)}, {}, ["k: got shape [7, 1, 16]", "[2, 16]"]),
    ("k-dim", {"k": torch.randn(T, HKV, 8)}, {}, ["k: got shape [7, 2, 8]", "[2, 16]"]),
    ("k-grad", {"k": torch.randn(T, HKV, D, requires_grad=True)}, {}, ["k: got requires_grad", "torch.no_grad()"]),
    ("v-type", {"v": 1}, {}, ["v: got int 1", "tensor [num_tokens"]),
    ("v-tokens", {"v": torch.randn(6, HKV, DV)}, {}, ["v: got shape [6, 2, 8]", "[7, 2]"]),
    ("v-dim", {"v": torch.randn(T, HKV, D)}, {}, ["v: got shape [7, 2, 16]", "[2, 8]"]),
    ("v-dtype", {"v": torch.randn(T, HKV, DV).half()}, {}, ["v: got float16", "k's, torch.float32"]),
    ("k-cache-rank", {"k_cache": torch.randn(24, HKV, D)}, {}, ["k_cache: got float32 tensor [24, 2, 16]", "4 dims"]),
    ("k-cache-fp8", {"k_cache": torch.ones(PAGES, PAGE_SIZE, HKV, D).to(torch.float8_e4m3fn)}, {}, ["k_cache: got float8_e4m3fn"]),
    ("k-cache-device", {"k_cache": meta(PAGES, PAGE_SIZE, HKV, D)}, {}, ["k_cache: got", "on meta"]),
    ("k-cache-expanded", {"k_cache": torch.full((1, PAGE_SIZE, HKV, D), POISON).expand(PAGES, -1, -1, -1)}, {}, ["different addresses"]),
    ("v-cache-pages", {"v_cache": torch.full((5, PAGE_SIZE, HKV, DV), POISON)}, {}, ["v_cache: got shape [5, 4, 2, 8]", "[6, 4]"]),
    ("v-cache-stride", {"v_cache": strided(PAGES, PAGE_SIZE, HKV, DV)}, {}, ["v_cache: got strides"]),
    ("slots-list", {"slot_mapping": list(range(T))}, {}, ["slot_mapping: got list", "int32 or int64", "torch.int64"]),
    ("slots-dtype", {"slot_mapping": torch.arange(T).float()}, {"slot_mapping": torch.arange(T).int()}, ["slot_mapping: got float32"]),
    ("slots-shape", {"slot_mapping": torch.arange(6)}, {}, ["slot_mapping: got int64 tensor [6]", "[num_tokens] = [7]", "-1"]),
    ("slots-device", {"slot_mapping": meta(T, dtype=torch.int64)}, {}, ["slot_mapping: got", "on meta"]),
    ("slots-stride", {"slot_mapping": torch.arange(2 * T)[::2]}, {}, ["slot_mapping: got strides [2]"]),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "words"), [pytest.param(c[1], c[3], id=c[0]) for c in WRITE])
def test_write_kv(wrong, words, no_op):
    call = written(**wrong)
    with pytest.raises(UniattnError) as error:
        uniattn.write_kv(**call)
    for word in words:
        assert word in str(error.value)
    for name in ("k_cache", "v_cache"):
        if name not in wrong:
            assert (call[name] == POISON).all()


@pytest.mark.parametrize("right", [pytest.param(c[2], id=c[0]) for c in WRITE if c[2]] + [pytest.param({}, id="base")])
def test_write_kv_right(right):
    call = written(**right)
    uniattn.write_kv(**call)
    assert torch.equal(call["k_cache"].flatten(0, 1)[:T], call["k"])
    assert torch.equal(call["v_cache"].flatten(0, 1)[:T], call["v"])
    assert (call["k_cache"].flatten(0, 1)[T:] == POISON).all()


def test_write_kv_from_its_own_cache(no_op):
    call = written()
    call["k"] = call["k_cache"].flatten(0, 1)[:T]
    with pytest.raises(ArgumentError, match="k_cache: got memory that k also uses"):
        uniattn.write_kv(**call)


def test_compiled_write_kv():
    call = written()
    torch.compile(uniattn.write_kv, fullgraph=True, backend="aot_eager")(**call)
    assert torch.equal(call["k_cache"].flatten(0, 1)[:T], call["k"])


PACKED = {
    "k-then-v": lambda x: x.view(2, PAGES, PAGE_SIZE, HKV, D).unbind(0),
    "in-a-page": lambda x: x.view(PAGES, 2, PAGE_SIZE, HKV, D).unbind(1),
    "in-a-token": lambda x: x.view(PAGES, PAGE_SIZE, 2, HKV, D).unbind(2),
    "in-a-head": lambda x: x.view(PAGES, PAGE_SIZE, HKV, 2 * D).split(D, -1),
    "in-a-head-v-short": lambda x: x.view(PAGES, PAGE_SIZE, HKV, 2 * D).split([D, DV, D - DV], -1)[:2],
    "heads-first": lambda x: x.view(PAGES, HKV, PAGE_SIZE, 2 * D).transpose(1, 2).split(D, -1),
    "heads-first-in-a-page": lambda x: x.view(PAGES, 2, HKV, PAGE_SIZE, D).transpose(2, 3).unbind(1),
    "pages-by-turns": lambda x: (x.view(2 * PAGES, PAGE_SIZE, HKV, D)[::2], x.view(2 * PAGES, PAGE_SIZE, HKV, D)[1::2]),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("swapped", [False, True])
def test_write_kv_to_views_of_one_packed_buffer(name, swapped):
    k_cache, v_cache = PACKED[name](torch.full((2 * PAGES * PAGE_SIZE * HKV * D,), POISON))
    if swapped:
        k_cache, v_cache = v_cache, k_cache
    k, v = torch.randn(T, HKV, k_cache.shape[-1]), torch.randn(T, HKV, v_cache.shape[-1])
    uniattn.write_kv(k, v, k_cache, v_cache, torch.arange(T))
    assert torch.equal(k_cache.flatten(0, 1)[:T], k)
    assert torch.equal(v_cache.flatten(0, 1)[:T], v)


MEETING = {
    "the same": lambda x: (x, x),
    "a part of each row": lambda x: (x, x[..., DV:]),
    "one page on": lambda x: (x[:-1], x[1:]),
    "one place on": lambda x: (x[:, :-1], x[:, 1:]),
    "one head on": lambda x: (x[:, :, :-1], x[:, :, 1:]),
    "half a row on": lambda x: (x.view(-1)[: x[1:].numel()].view_as(x[1:]), x.view(-1)[8 : x[1:].numel() + 8].view_as(x[1:])),
}


@pytest.mark.parametrize("name", MEETING)
@pytest.mark.parametrize("swapped", [False, True])
def test_write_kv_to_caches_that_meet(name, swapped, no_op):
    buffer = torch.full((PAGES + 1, PAGE_SIZE, 3, D), POISON)
    k_cache, v_cache = MEETING[name](buffer)
    if swapped:
        k_cache, v_cache = v_cache, k_cache
    k, v = (torch.randn(T, *x.shape[2:]) for x in (k_cache, v_cache))
    with pytest.raises(ArgumentError, match="v_cache: got memory that k_cache also uses; K and V would be written to the same"):
        uniattn.write_kv(k, v, k_cache, v_cache, torch.arange(T))
    assert (buffer == POISON).all()


def test_write_kv_of_a_latent_that_holds_v():
    latent, cache = torch.randn(T, 1, D), torch.full((PAGES, PAGE_SIZE, 1, D), POISON)
    uniattn.write_kv(latent, latent[..., :DV], cache, cache[..., :DV], torch.arange(T))
    assert torch.equal(cache.flatten(0, 1)[:T], latent)


WARMUP = [
    ({"num_q_heads": 0}, ArgumentError, "num_q_heads: got int 0; it must be an int, at least 1"),
    ({"num_kv_heads": 0}, ArgumentError, "num_kv_heads: got int 0"),
    ({"num_kv_heads": -2}, ArgumentError, "num_kv_heads: got int -2"),
    ({"num_q_heads": 6}, ArgumentError, "num_q_heads: got 6 query heads for 4 KV heads"),
    ({"head_dim": 64.0}, ArgumentError, "head_dim: got float 64.0"),
    ({"head_dim": 7000}, UnsupportedError, "head_dim: got a head dim of 7000; 8 to 576"),
    ({"head_dim": 576}, UnsupportedError, "v_head_dim: got a head dim of 576; 8 to 512"),
    ({"v_head_dim": 4}, UnsupportedError, "v_head_dim: got a head dim of 4"),
    ({"page_size": 0}, ArgumentError, "page_size: got int 0; .*None for contiguous"),
    ({"dtype": torch.int8}, UnsupportedError, "dtype: got dtype torch.int8; .*in this version"),
    ({"dtype": torch.float64}, ArgumentError, "dtype: got dtype torch.float64"),
    ({"dtype": "half"}, ArgumentError, "dtype: got str 'half'"),
    ({"sinks": torch.int8}, ArgumentError, "sinks: got dtype torch.int8"),
    ({"device": "cuda:99"}, UnsupportedError, "device: got cuda:99; torch sees .* GPUs here"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WARMUP)
def test_warmup(wrong, error, message):
    right = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim": 64, "device": "cpu"}
    with pytest.raises(error, match=message):
        uniattn.warmup(**{**right, **wrong})


def test_warmup_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match=r"device: got cuda; torch sees no GPUs here; .*device='cpu'"):
        uniattn.warmup(8, 4, 64)
