"""The torch ops under the front door: opcheck, `torch.compile(fullgraph=True)`, fake tensors, CUDA graphs."""

import pytest
import torch
from operator_backends import TRITON_GPU, plan_for

import uniattn
from uniattn.problem.layout import UNBOUNDED
from uniattn.testing import assert_matches_oracle, poison_unread, poisoned_out

LENGTHS = [(2, 9), (1, 20), (0, 3)]


def attend_args(batch, *, out, lse, sinks=None, alibi_slopes=None, causal_per_seq=None, plan=None):
    """The arguments of `torch.ops.uniattn.attend` for a causal call of `batch`."""
    return (
        batch.q, batch.k_cache, batch.v_cache, batch.cu_seqlens_q, batch.seqlens_k, batch.page_table, batch.cu_seqlens_k,
        batch.num_tokens, 0.25, True, causal_per_seq, UNBOUNDED, UNBOUNDED, 0.0, sinks, alibi_slopes,
        None if plan is None else plan.spec.as_ints(), None if plan is None else plan.buffer, out, lse,
    )  # fmt: skip


def finite(batch):
    """opcheck compares inputs before and after a call, and NaN is not equal to itself."""
    for tensor in (batch.q, batch.k_cache, batch.v_cache):
        tensor.nan_to_num_(0.0)
    return batch


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("page_size", [8, None])
def test_opcheck_attend(backend, page_size, optional):
    batch = finite(backend.batch(LENGTHS, head_dim=16, page_size=page_size, lengths_as="seqlens_k" if page_size else "both"))
    heads = torch.zeros(2, device=backend.device)
    out = torch.zeros_like(batch.q)
    extra = {}
    if optional:
        flags = torch.tensor([True, False, True], device=backend.device)
        plan = plan_for(batch.replace(options={"causal": flags}), 2)
        extra = {"sinks": heads, "alibi_slopes": heads + 0.5, "causal_per_seq": flags, "plan": plan}
    lse = torch.zeros(2, batch.num_tokens, device=backend.device) if optional else None
    results = torch.library.opcheck(torch.ops.uniattn.attend.default, attend_args(batch, out=out, lse=lse, **extra))
    assert set(results.values()) == {"SUCCESS"}


def test_compiles_with_a_plan_that_nothing_has_used_before(backend):
    batch = finite(backend.batch(LENGTHS, head_dim=24, num_padding_rows=5))
    plan = plan_for(batch)
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q", "seqlens_k", "page_table")
    call = {name: getattr(batch, name) for name in names}
    torch._dynamo.reset()
    compiled = torch.compile(lambda call, plan: uniattn.attention(**call, plan=plan), fullgraph=True, backend="aot_eager")
    out = compiled(call, plan)
    assert torch.equal(out, uniattn.attention(**call, plan=plan))


def test_compiles_with_a_plan_made_inside(backend):
    batch = finite(backend.batch(LENGTHS, head_dim=24, num_padding_rows=4))
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q", "seqlens_k", "page_table")
    call = {name: getattr(batch, name) for name in names}
    torch._dynamo.reset()
    step = torch.compile(lambda call: uniattn.attention(**call, plan=uniattn.plan(**call)), fullgraph=True, backend="aot_eager")
    assert torch.equal(step(call), uniattn.attention(**call))


@pytest.mark.parametrize("paged", [False, True])
def test_opcheck_build_plan(backend, paged):
    batch = backend.batch(LENGTHS, head_dim=16, page_size=8 if paged else None, lengths_as="seqlens_k" if paged else "both")
    plan = plan_for(batch)
    lengths = (batch.cu_seqlens_q, batch.seqlens_k, batch.cu_seqlens_k, None)
    args = (*lengths, paged, 64, plan.spec.as_ints(), torch.zeros_like(plan.buffer))
    results = torch.library.opcheck(torch.ops.uniattn.build_plan.default, args)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_merge(backend, with_lse):
    outs, lses = torch.randn(3, 2, 4, 8, device=backend.device), torch.randn(3, 4, 2, device=backend.device)
    lse = torch.zeros(4, 2, device=backend.device) if with_lse else None
    results = torch.library.opcheck(torch.ops.uniattn.merge.default, (outs, lses, torch.zeros_like(outs[0]), lse))
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_write_kv(backend):
    k, v = torch.randn(2, 1, 8, device=backend.device), torch.randn(2, 1, 8, device=backend.device)
    caches = (torch.zeros(2, 4, 1, 8, device=backend.device), torch.zeros(2, 4, 1, 8, device=backend.device))
    slots = torch.tensor([5, -1], device=backend.device)
    results = torch.library.opcheck(torch.ops.uniattn.write_kv.default, (k, v, *caches, slots))
    assert set(results.values()) == {"SUCCESS"}


@pytest.fixture
def compiled(backend):
    """`torch.compile(fullgraph=True)` with the backend that this machine has; `mark` says which dimension is dynamic."""
    torch.compiler.reset()
    yield lambda f: torch.compile(f, fullgraph=True, backend="inductor" if backend.is_gpu else "aot_eager")
    torch.compiler.reset()


@pytest.mark.parametrize(
    "options",
    [{}, {"window": (5, 2), "causal": False, "softcap": 2.0}, {"causal": [True, False, True], "sinks": True, "alibi": True}],
    ids=str,
)
def test_compile_attention(backend, compiled, options):
    batch = backend.batch(LENGTHS, head_dim=16, page_size=8, **options)
    out, lse = compiled(lambda **kwargs: uniattn.attention(return_lse=True, **kwargs))(**batch.kwargs())
    assert_matches_oracle(batch, out, lse)


def test_compile_attention_into_out_inside_a_model(backend, compiled):
    """A projection before and after, `out` written in place, two batch sizes through one graph."""
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).to(backend.device) / 6

    def layer(x, out, **kwargs):
        q = (x @ weight).view(-1, 2, 16)
        uniattn.attention(q, out=out, **kwargs)
        return out.flatten(1) @ weight

    for lengths in (LENGTHS, [(5, 9), (1, 20), (1, 3)]):
        batch = backend.batch(lengths, head_dim=16, page_size=8)
        kwargs = batch.kwargs()
        x = kwargs.pop("q").flatten(1)
        got = compiled(layer)(x, poisoned_out(batch), **kwargs)
        want = layer(x, poisoned_out(batch), **kwargs)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_compile_merge_states_and_write_kv(backend, compiled):
    outs, lses = torch.randn(2, 3, 2, 8, device=backend.device), torch.randn(2, 2, 3, device=backend.device)
    got = compiled(lambda a, b: uniattn.merge_states([a[0], a[1]], [b[0], b[1]]))(outs, lses)
    torch.testing.assert_close(got, uniattn.merge_states(outs, lses))
    k = torch.randn(2, 1, 8, device=backend.device)
    caches = [torch.zeros(2, 4, 1, 8, device=backend.device) for _ in range(2)]
    compiled(uniattn.write_kv)(k, k + 1, *caches, torch.tensor([5, -1], device=backend.device))
    assert torch.equal(caches[0][1, 1], k[0])
    assert torch.equal(caches[1][1, 1], k[0] + 1)
    assert int(caches[0].any(-1).sum()) == 1


def test_fake_tensors_need_no_device(backend):
    from torch._subclasses.fake_tensor import FakeTensorMode

    batch = backend.batch(LENGTHS, head_dim=16, v_head_dim=24)
    with FakeTensorMode() as mode:
        kwargs = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in batch.kwargs().items()}
        out, lse = uniattn.attention(**kwargs, return_lse=True)
    assert (out.shape, out.dtype) == ((batch.num_tokens, 2, 24), batch.dtype)
    assert (lse.shape, lse.dtype) == ((2, batch.num_tokens), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("planned", "num_splits"), [(False, None), (True, None), (True, 4)])
def test_cuda_graph_replays_with_other_lengths_tables_and_values(monkeypatch, planned, num_splits):
    """Captured for 8 sequences and 64 rows; replayed for batches that use less, tables and values replaced in place."""
    backend = TRITON_GPU
    monkeypatch.setenv("UNIATTN_BACKEND", backend.uniattn_backend)
    how = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "sinks": True}

    def padded(lengths, seed):
        lengths = [*lengths, *[(0, 0)] * (8 - len(lengths))]
        used = sum(-(-kv // 16) for _, kv in lengths)
        batch = backend.batch(
            lengths, num_padding_rows=64 - sum(q for q, _ in lengths), num_spare_pages=256 - used, seed=seed, **how
        )
        wide = torch.full((8, 80), -1, dtype=torch.int32, device="cuda")
        wide[:, : batch.page_table.shape[1]] = batch.page_table
        return batch.replace(page_table=wide)

    static = padded([(8, 100)] * 8, seed=0)
    sizes = {name: value for name, value in static.kwargs().items() if name not in ("sinks", "return_lse")}
    plan = uniattn.plan(**sizes, num_splits=num_splits) if planned else None

    def step():
        if planned:
            uniattn.plan(**sizes, num_splits=num_splits, out=plan)
        return uniattn.attention(**static.kwargs(return_lse=True, plan=plan))

    step()  # compile outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for seed, lengths in enumerate(
        [[(8, 100)] * 8, [(1, 900), (1, 3)], [(60, 60), (1, 700), (0, 5)], [], [(3, 1), (1, 1000)]], 1
    ):
        batch = padded(lengths, seed)
        for name in ("q", "k_cache", "v_cache", "cu_seqlens_q", "seqlens_k", "page_table"):
            getattr(static, name).copy_(getattr(batch, name))
        static.options["sinks"].copy_(batch.options["sinks"])
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_matches_oracle(batch, out, lse)


@pytest.mark.gpu
def test_attention_never_waits_for_the_device(monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "triton")
    batch = poison_unread(TRITON_GPU.batch([(3, 40), (1, 500)], head_dim=64, dtype=torch.bfloat16))
    kwargs = batch.kwargs(return_lse=True)
    uniattn.attention(**kwargs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = uniattn.attention(**kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_matches_oracle(batch, out, lse)
