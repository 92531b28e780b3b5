"""Each wrong argument beside its right sibling: the message names argument, what came, limit and fix, and nothing is written."""
# ruff: noqa: E501 -- tables, one case a line

import inspect
import pickle

import pytest
import torch
from error_tools import DV, HKV, HQ, PAGE_SIZE, PAGES, POISON, D, S, T, forbid_ops, ints, meta, strided
from torch import nan

import uniattn
from uniattn import ArgumentError, UniattnError, UnsupportedError


@pytest.fixture
def no_op(monkeypatch):
    forbid_ops(monkeypatch)


def paged(**changes):
    """A right paged call: a prefill of 4 tokens, a chunk of 2, a decode."""
    call = {
        "q": torch.randn(T, HQ, D),
        "k_cache": torch.randn(PAGES, PAGE_SIZE, HKV, D),
        "v_cache": torch.randn(PAGES, PAGE_SIZE, HKV, DV),
        "cu_seqlens_q": ints(0, 4, 6, 7),
        "seqlens_k": ints(4, 6, 7),
        "page_table": ints([0, -1], [1, 2], [3, 4]),
        "out": torch.full((T, HQ, DV), POISON),
    }
    return {**call, **changes}


def contiguous(**changes):
    """The same lengths without pages."""
    call = {
        "k_cache": torch.randn(17, HKV, D),
        "v_cache": torch.randn(17, HKV, DV),
        "cu_seqlens_k": ints(0, 4, 10, 17),
        "seqlens_k": None,
        "page_table": None,
    }
    return paged(**{**call, **changes})


# (id, wrong changes, right changes, words of the message); `paged` is the base.
CASES = [
    ("q-list", {"q": [[0.0]]}, {}, ["q: got list", "tensor [num_tokens, num_q_heads, head_dim]", "torch.Tensor"]),
    ("q-rank", {"q": torch.randn(1, T, HQ, D)}, {}, ["q: got float32 tensor [1, 7, 4, 16]", "3 dims", "q.flatten(0, 1)"]),
    ("q-float64", {"q": torch.randn(T, HQ, D).double()}, {}, ["q: got float64", "float16, bfloat16 or float32", ".to("]),
    ("q-int8", {"q": torch.ones(T, HQ, D, dtype=torch.int8)}, {}, ["q: got int8", "not supported in this version", "bfloat16"]),
    ("q-fp8", {"q": torch.ones(T, HQ, D).to(torch.float8_e4m3fn)}, {}, ["q: got float8_e4m3fn", "not supported in this version"]),
    ("q-dtype", {"q": torch.randn(T, HQ, D).half()}, {}, ["k_cache: got dtypes float16, float32", "must be equal", "q.to("]),
    ("q-stride", {"q": strided(T, HQ, D)}, {"q": strided(T, HQ, D).contiguous()}, ["q: got strides", "must be 1", "q.contiguous()"]),
    ("q-heads", {"q": torch.randn(T, 3, D)}, {}, ["q: got 3 query heads for 2 KV heads", "multiple of num_kv_heads", "order of dims"]),
    ("q-heads-0", {"q": torch.randn(T, 0, D), "out": None}, {}, ["q: got 0 query heads for 2 KV heads", "both at least 1"]),
    ("q-grad", {"q": torch.randn(T, HQ, D, requires_grad=True)}, {}, ["q: got requires_grad=True", "inference", "torch.no_grad()"]),
    ("head-dim-small", {"q": torch.randn(T, HQ, 4), "k_cache": torch.randn(PAGES, PAGE_SIZE, HKV, 4)},
     {"q": torch.randn(T, HQ, 8), "k_cache": torch.randn(PAGES, PAGE_SIZE, HKV, 8)}, ["q: got a head dim of 4", "8 to 576"]),
    ("head-dim-large", {"q": torch.randn(T, HQ, 577), "k_cache": torch.randn(PAGES, PAGE_SIZE, HKV, 577)},
     {"q": torch.randn(T, HQ, 576), "k_cache": torch.randn(PAGES, PAGE_SIZE, HKV, 576)}, ["q: got a head dim of 577", "8 to 576"]),
    ("head-dim-v", {"v_cache": torch.randn(PAGES, PAGE_SIZE, HKV, 513), "out": None},
     {"v_cache": torch.randn(PAGES, PAGE_SIZE, HKV, 512), "out": None}, ["v_cache: got a head dim of 513", "8 to 512"]),
    ("k-none", {"k_cache": None}, {}, ["k_cache: got NoneType", "must be a tensor [num_pages, page_size"]),
    ("k-rank", {"k_cache": torch.randn(24, HKV, D)}, {}, ["k_cache: got float32 tensor [24, 2, 16]", "4 dims", "drop page_table"]),
    ("k-dim", {"k_cache": torch.randn(PAGES, PAGE_SIZE, HKV, 32)}, {}, ["k_cache: got head_dim 32", "q has head_dim 16"]),
    ("k-stride", {"k_cache": strided(PAGES, PAGE_SIZE, HKV, D)}, {}, ["k_cache: got strides", "must be 1"]),
    ("k-fp8", {"k_cache": torch.ones(PAGES, PAGE_SIZE, HKV, D).to(torch.float8_e5m2)}, {}, ["k_cache: got float8_e5m2", "version"]),
    ("k-device", {"k_cache": meta(PAGES, PAGE_SIZE, HKV, D)}, {}, ["k_cache: got", "on meta", "other tensors, cpu", ".to('cpu')"]),
    ("page-size-0", {"k_cache": torch.randn(PAGES, 0, HKV, D), "v_cache": torch.randn(PAGES, 0, HKV, DV)}, {}, ["page_size 0"]),
    ("v-dtype", {"v_cache": torch.randn(PAGES, PAGE_SIZE, HKV, DV).half()}, {}, ["v_cache: got dtypes", "must be equal"]),
    ("v-heads", {"v_cache": torch.randn(PAGES, PAGE_SIZE, 1, DV)}, {}, ["v_cache: got shape [6, 4, 1, 8]", "[6, 4, 2]"]),
    ("v-pages", {"v_cache": torch.randn(5, PAGE_SIZE, HKV, DV)}, {}, ["v_cache: got shape [5, 4, 2, 8]", "[6, 4, 2]"]),
    ("v-page-size", {"v_cache": torch.randn(PAGES, 8, HKV, DV)}, {}, ["v_cache: got shape [6, 8, 2, 8]", "[6, 4, 2]"]),
    ("v-device", {"v_cache": meta(PAGES, PAGE_SIZE, HKV, DV)}, {}, ["v_cache: got", "on meta"]),
    ("cu-q-list", {"cu_seqlens_q": [0, 4, 6, 7]}, {}, ["cu_seqlens_q: got list [0, 4, 6, 7]", "[num_seqs + 1]", "dtype=torch.int32"]),
    ("cu-q-long", {"cu_seqlens_q": ints(0, 4, 6, 7).long()}, {}, ["cu_seqlens_q: got int64", "int32", "cu_seqlens_q.int()"]),
    ("cu-q-rank", {"cu_seqlens_q": ints([0, 4, 6, 7])}, {}, ["cu_seqlens_q: got int32 tensor [1, 4]", "[num_seqs + 1]"]),
    ("cu-q-empty", {"cu_seqlens_q": ints()}, {}, ["cu_seqlens_q: got int32 tensor [0]", "0 first"]),
    ("cu-q-device", {"cu_seqlens_q": meta(4, dtype=torch.int32)}, {}, ["cu_seqlens_q: got", "on meta"]),
    ("cu-q-stride", {"cu_seqlens_q": ints(0, 0, 4, 4, 6, 6, 7, 7)[::2]}, {}, ["cu_seqlens_q: got strides [2]", "must be 1"]),
    ("cu-q-length", {"cu_seqlens_q": ints(0, 4, 7)}, {}, ["seqlens_k: got int32 tensor [3]", "[num_seqs] = [2]"]),
    ("lens-long", {"seqlens_k": ints(4, 6, 7).long()}, {}, ["seqlens_k: got int64", "int32", "seqlens_k.int()"]),
    ("lens-shape", {"seqlens_k": ints(4, 6)}, {}, ["seqlens_k: got int32 tensor [2]", "[num_seqs] = [3]"]),
    ("lens-none", {"seqlens_k": None}, {"seqlens_k": None, "cu_seqlens_k": ints(0, 4, 10, 17)}, ["seqlens_k: got None", "pass"]),
    ("lens-both", {"cu_seqlens_k": ints(0, 4, 10, 17)}, {}, ["both seqlens_k and cu_seqlens_k", "drop cu_seqlens_k"]),
    ("cu-k-shape", {"seqlens_k": None, "cu_seqlens_k": ints(0, 4, 10)}, {}, ["cu_seqlens_k: got int32 tensor [3]", "[4]"]),
    ("table-list", {"page_table": [[0], [1], [2]]}, {}, ["page_table: got list", "[num_seqs, max_pages]"]),
    ("table-rank", {"page_table": ints(0, 1, 2)}, {}, ["page_table: got int32 tensor [3]", "[num_seqs, max_pages]"]),
    ("table-rows", {"page_table": ints([0, 1], [2, 3])}, {}, ["page_table: got int32 tensor [2, 2]", "num_seqs = 3", "one row"]),
    ("table-long", {"page_table": ints([0, -1], [1, 2], [3, 4]).long()}, {}, ["page_table: got int64", "page_table.int()"]),
    ("table-device", {"page_table": meta(3, 2, dtype=torch.int32)}, {}, ["page_table: got", "on meta"]),
    ("table-stride", {"page_table": ints([0, 1, 3], [-1, 2, 4]).T}, {}, ["page_table: got strides [1, 3]", "must be 1"]),
    ("max-q-float", {"max_seqlen_q": 4.0}, {"max_seqlen_q": 4}, ["max_seqlen_q: got float 4.0", "an int", "int(max_seqlen_q)"]),
    ("max-q-bool", {"max_seqlen_q": True}, {"max_seqlen_q": 5}, ["max_seqlen_q: got bool", "an int"]),
    ("max-q-negative", {"max_seqlen_q": -1}, {"max_seqlen_q": 4}, ["max_seqlen_q: got -1", "at least 0"]),
    ("max-k-tensor", {"max_seqlen_k": torch.tensor(7)}, {"max_seqlen_k": 7}, ["max_seqlen_k: got int64 tensor []", "host"]),
    ("max-k-negative", {"max_seqlen_k": -7}, {"max_seqlen_k": 10**6}, ["max_seqlen_k: got -7", "at least 0"]),
    ("scale-zero", {"softmax_scale": 0.0}, {"softmax_scale": 1}, ["softmax_scale: got 0.0", "more than 0", "default"]),
    ("scale-nan", {"softmax_scale": nan}, {"softmax_scale": 0.1}, ["softmax_scale: got nan", "finite"]),
    ("scale-inf", {"softmax_scale": float("inf")}, {"softmax_scale": 1e3}, ["softmax_scale: got inf", "finite"]),
    ("scale-tensor", {"softmax_scale": torch.tensor(0.1)}, {}, ["softmax_scale: got float32 tensor", "float(softmax_scale)"]),
    ("softcap-negative", {"softcap": -1.0}, {"softcap": 1.0}, ["softcap: got -1.0", "at least 0"]),
    ("softcap-none", {"softcap": None}, {"softcap": 0}, ["softcap: got NoneType", "0 turns it off"]),
    ("softcap-inf", {"softcap": float("inf")}, {"softcap": 50.0}, ["softcap: got inf", "finite"]),
    ("causal-int", {"causal": 1}, {"causal": False}, ["causal: got int 1", "bool tensor [num_seqs]", "bool(causal)"]),
    ("causal-dtype", {"causal": ints(1, 0, 1)}, {"causal": ints(1, 0, 1).bool()}, ["causal: got int32", "causal.bool()"]),
    ("causal-shape", {"causal": torch.ones(T, dtype=torch.bool)}, {}, ["causal: got bool tensor [7]", "[num_seqs] = [3]"]),
    ("causal-device", {"causal": meta(S, dtype=torch.bool)}, {}, ["causal: got", "on meta"]),
    ("window-int", {"window": 4}, {"window": (4, 0)}, ["window: got int 4", "pair (left, right)", "pass (4, 0)"]),
    ("window-three", {"window": (1, 2, 3)}, {"window": (1, 2)}, ["window: got tuple (1, 2, 3)", "pair"]),
    ("window-negative", {"window": (-2, 0)}, {"window": (-1, 0)}, ["window: got left = int -2", "at least 0", "pass None"]),
    ("window-float", {"window": (4, 0.5)}, {"window": (4, None)}, ["window: got right = float 0.5", "must be an int"]),
    ("sinks-list", {"sinks": [0.0] * HQ}, {}, ["sinks: got list", "[num_q_heads]", "torch.float32"]),
    ("sinks-int", {"sinks": ints(0, 0, 0, 0)}, {"sinks": torch.zeros(HQ).bfloat16()}, ["sinks: got int32", "sinks.float()"]),
    ("sinks-shape", {"sinks": torch.zeros(HKV)}, {"sinks": torch.zeros(HQ)}, ["sinks: got float32 tensor [2]", "[num_q_heads] = [4]"]),
    ("sinks-grad", {"sinks": torch.nn.Parameter(torch.zeros(HQ))}, {}, ["sinks: got requires_grad", "sinks.detach()"]),
    ("alibi-dtype", {"alibi_slopes": torch.ones(HQ).half()}, {"alibi_slopes": torch.ones(HQ)}, ["alibi_slopes: got float16", "float32"]),
    ("alibi-shape", {"alibi_slopes": torch.ones(HQ, 1)}, {}, ["alibi_slopes: got float32 tensor [4, 1]", "[num_q_heads] = [4]"]),
    ("alibi-stride", {"alibi_slopes": torch.ones(2 * HQ)[::2]}, {}, ["alibi_slopes: got strides [2]", "must be 1"]),
    ("lse-int", {"return_lse": 1}, {"return_lse": True}, ["return_lse: got int 1", "True or False"]),
    ("deterministic", {"deterministic": "yes"}, {"deterministic": True}, ["deterministic: got str 'yes'", "True or False"]),
    ("plan", {"plan": {}}, {}, ["plan: got dict", "a Plan", "uniattn.plan("]),
    ("mask", {"mask": torch.ones(T, T)}, {}, ["mask: got float32 tensor [7, 7]", "not supported in this version", "leave mask out"]),
    *(
        (name, {name: torch.ones(1)}, {name: None}, [f"{name}: got float32 tensor [1]", "not supported in this version"])
        for name in ("q_scale", "k_scale", "v_scale", "out_scale")
    ),
    ("kv-format", {"kv_format": "int4"}, {}, ["kv_format: got str 'int4'", "not supported in this version"]),
    ("out-type", {"out": "x"}, {}, ["out: got str", "[num_tokens, num_q_heads, head_dim_v]"]),
    ("out-shape", {"out": torch.full((T, HQ, D), POISON)}, {}, ["out: got float32 tensor [7, 4, 16]", "= [7, 4, 8]", "q.new_empty"]),
    ("out-dtype", {"out": torch.full((T, HQ, DV), POISON).half()}, {}, ["out: got float16", "dtype must be q's, float32"]),
    ("out-device", {"out": meta(T, HQ, DV)}, {}, ["out: got", "on meta"]),
    ("out-stride", {"out": torch.full((T, HQ, 2 * DV), POISON)[..., ::2]}, {"out": torch.full((T, HQ, 2 * DV), POISON)[..., :DV]},
     ["out: got strides", "must be 1"]),
    ("out-expanded", {"out": torch.full((1, HQ, DV), POISON).expand(T, HQ, DV)}, {}, ["out: got shape [7, 4, 8] with strides [0,"]),
    ("out-grad", {"out": torch.full((T, HQ, DV), POISON, requires_grad=True)}, {}, ["out: got requires_grad"]),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "words"), [pytest.param(c[1], c[3], id=c[0]) for c in CASES])
def test_wrong_call(wrong, words, no_op):
    call = paged(**wrong)
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor) and not x.is_meta}
    with pytest.raises(UniattnError) as error:
        uniattn.attention(**call)
    for word in words:
        assert word in str(error.value)
    assert str(error.value).startswith(error.value.argument + ": got ")
    for name, x in before.items():
        assert torch.equal(call[name], x), f"{name} was written"


@pytest.mark.parametrize("right", [pytest.param(c[2], id=c[0]) for c in CASES])
def test_right_sibling(right):
    call = paged(**right)
    result = uniattn.attention(**call)
    out = result[0] if call.get("return_lse") else result
    assert out.shape == (T, HQ, call["v_cache"].shape[-1])
    assert out.isfinite().all()
    assert (out != POISON).any()


def test_each_argument_has_a_wrong_case():
    changed = {name for _, wrong, _, _ in CASES for name in wrong}
    assert set(inspect.signature(uniattn.attention).parameters) <= changed


CONTIGUOUS = [
    ("k-rank", {"k_cache": torch.randn(PAGES, PAGE_SIZE, HKV, D)}, {}, ["k_cache: got float32 tensor [6, 4, 2, 16]", "3 dims", "page_table"]),
    ("v-tokens", {"v_cache": torch.randn(16, HKV, DV)}, {}, ["v_cache: got shape [16, 2, 8]", "[17, 2]"]),
    ("no-lengths", {"cu_seqlens_k": None}, {"cu_seqlens_k": None, "seqlens_k": ints(4, 6, 7)}, ["seqlens_k: got None", "cu_seqlens_k None"]),
    ("lens-shape", {"seqlens_k": ints(4)}, {"seqlens_k": ints(4, 5, 7)}, ["seqlens_k: got int32 tensor [1]", "[num_seqs] = [3]"]),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "right", "words"), [pytest.param(*c[1:], id=c[0]) for c in CONTIGUOUS])
def test_contiguous(wrong, right, words):
    uniattn.attention(**contiguous(**right))
    call = contiguous(**wrong)
    with pytest.raises(ArgumentError) as error:
        uniattn.attention(**call)
    for word in words:
        assert word in str(error.value)
    assert (call["out"] == POISON).all()


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_out_overlaps(name, no_op):
    call = paged(v_cache=torch.randn(PAGES, PAGE_SIZE, HKV, D))
    out = call[name].view(-1)[: T * HQ * D].unflatten(0, (-1, HQ, D))
    call["out"] = out[:T] if len(out) >= T else None
    if call["out"] is None:  # a cache smaller than out: lay both over one buffer
        buffer = torch.randn(T * HQ * D)
        call[name] = buffer[: call[name].numel()].view_as(call[name])
        call["out"] = buffer.view(T, HQ, D)
    before = call["out"].clone()
    with pytest.raises(
        ArgumentError, match=rf"out: got memory that {name} also uses; .*must not overlap; pass a buffer of its own"
    ):
        uniattn.attention(**call)
    assert torch.equal(call["out"], before)


def test_out_may_be_a_slice_beside_q_and_k():
    rows = torch.randn(T, HQ + HQ, D)
    call = paged(v_cache=torch.randn(PAGES, PAGE_SIZE, HKV, D), q=rows[:, :HQ], out=rows[:, HQ:])
    want = uniattn.attention(**{**call, "out": None})
    assert torch.equal(uniattn.attention(**call), want)


def test_grad_matters_only_while_enabled():
    call = paged(q=torch.randn(T, HQ, D, requires_grad=True))
    with pytest.raises(ArgumentError, match="requires_grad"):
        uniattn.attention(**call)
    with torch.no_grad():
        uniattn.attention(**call)
    uniattn.attention(**{**call, "q": call["q"].detach()})


def test_plan_of_other_sizes(no_op):
    call = paged()
    batch = {name: call[name] for name in ("q", "k_cache", "v_cache", "cu_seqlens_q", "seqlens_k", "page_table")}
    other = uniattn.plan(**{**batch, "q": torch.randn(T + 1, HQ, D)})
    with pytest.raises(ArgumentError, match=r"plan: got a plan for num_tokens=8 with a call of num_tokens=7"):
        uniattn.attention(**call, plan=other)
    with pytest.raises(ArgumentError, match=r"num_splits: got int 0; it must be an int, at least 1"):
        uniattn.plan(**batch, num_splits=0)
    with pytest.raises(ArgumentError, match=r"q: got float64"):
        uniattn.plan(**{**batch, "q": call["q"].double()})


def test_error_classes():
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(UnsupportedError, NotImplementedError)
    error = ArgumentError("q", got=1, limit="two", fix="three")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "q: got 1; two; three"
    assert (type(again), again.argument, again.got, again.limit, again.fix) == (ArgumentError, "q", "1", "two", "three")


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    def layer(**call):
        return uniattn.attention(**call, softmax_scale=0.3, causal=True, window=(3, 0), softcap=2.0, sinks=torch.zeros(HQ))

    call = paged(max_seqlen_q=4, max_seqlen_k=8)
    want = layer(**{**call, "out": None})
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(**call), want)
    # The compiler wraps the error; its report still shows the argument at fault.
    with pytest.raises(Exception, match="seqlens_k"):
        compiled(**{**call, "seqlens_k": call["seqlens_k"].long()})
    with pytest.raises(ArgumentError, match=r"seqlens_k\.int\(\)"):
        torch.compile(layer, backend="aot_eager", dynamic=dynamic)(**{**call, "seqlens_k": call["seqlens_k"].long()})
