"""The direct launch: its arguments under the installed Triton, its way back to Triton's own launch, and it on a GPU."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import uniattn
from uniattn.launch import cache, direct
from uniattn.launch.cache import Kernels, Source
from uniattn.testing import assert_matches_oracle, make_batch

needs_a_compiler = pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("cc")), reason="Triton's launcher needs a C compiler")


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """What launches come to in a process whose libcuda is a fake; see fake_cuda.py."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    program = Path(__file__).with_name("fake_cuda.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("UNIATTN_BACKEND", None)
    done = subprocess.run([sys.executable, program, folder], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


on_a_fake = [needs_a_compiler, pytest.mark.skipif(torch.cuda.is_available(), reason="a fake libcuda must not meet a real one")]


class TestOnAFakeDriver:
    pytestmark = on_a_fake

    def test_a_hit_launches_what_the_miss_did(self, launches):
        miss, hit = launches["miss"], launches["hit"]
        assert hit["count"] == miss["count"] + 1
        assert {**hit, "count": 0} == {**miss, "count": 0}
        assert miss["compilations"] == 1

    def test_parameters_arrive_in_order(self, launches):
        hit = launches["hit"]
        strides = [128, 64, 128, 64, 512, 128, 64, 512, 128, 64]
        assert hit["params"] == [*hit["addresses"], *strides, 1, 5 * 4, 2]
        assert hit["grid"] == [3, 1, 1]
        assert hit["threads"] == 128

    def test_an_absent_pointer_is_not_passed(self, launches):
        launch = launches["absent pointer"]
        assert launch["params"] == [*launch["addresses"], 640, 128, 64, 10, 5, 1, 128, 64, 0, 0, 3, 5, 2]
        assert launch["grid"] == [10, 1, 1]

    def test_profilers_hooks_are_called(self, launches):
        assert launches["names"] == ["merge_kernel"]
        assert launches["hooked"]["params"] == launches["absent pointer"]["params"]
        assert launches["hooked"]["compilations"] == launches["absent pointer"]["compilations"]

    def test_this_triton_needs_no_way_back(self, launches):
        assert launches["broken"] is False


class Plain:
    """Stands for a jit function: notes what `fn[grid](...)` is given."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls.append((grid, args, kwargs))


def example(key):
    return Source(
        pointers={"a": torch.float32, "b": None},
        numbers={"strides": ("i32", "i32"), "n": "i32"},
        constants={"BLOCK": key},
        divisors={"a": 16, "b": 16, "strides": 8},
        options={"num_warps": 4},
    )


@pytest.fixture
def unbroken(monkeypatch):
    monkeypatch.setattr(cache._state, "direct_is_broken", False)
    monkeypatch.setattr(cache, "interpreted", lambda: False)


def test_a_source_as_triton_sees_it():
    source = example(32)
    assert source.signature() == {"a": "*fp32", "b": "constexpr", "strides": ("i32", "i32"), "n": "i32", "BLOCK": "constexpr"}
    assert source.constexprs() == {"b": None, "BLOCK": 32}
    promise = [["tt.divisibility", 8]]
    assert source.attributes() == {(0,): [["tt.divisibility", 16]], (2, 0): promise, (2, 1): promise}
    assert source.flat_types() == ["*fp32", "i32", "i32", "i32"]


GRID, ARGUMENTS = (3, 1, 1), ((torch.zeros(1), None), (5, 6, 7))
PLAIN_CALL = (GRID, (ARGUMENTS[0][0], None, (5, 6), 7), {"BLOCK": 32, "num_warps": 4})


def test_a_triton_that_cannot_compile_so_falls_back_with_one_warning(monkeypatch, unbroken):
    def changed(fn, source):
        raise AttributeError("no ASTSource")

    monkeypatch.setattr(direct, "launch", changed)
    kernels = Kernels(Plain(), example)
    with pytest.warns(RuntimeWarning, match="no ASTSource"):
        kernels[32](GRID, *ARGUMENTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels[32](GRID, *ARGUMENTS)
        kernels[64](GRID, *ARGUMENTS)
    assert kernels.fn.calls[0] == kernels.fn.calls[1] == PLAIN_CALL
    assert len(kernels.fn.calls) == 3


def test_a_triton_that_launches_otherwise_falls_back_at_the_first_launch(monkeypatch, unbroken):
    def broken_launch(grid, pointers, numbers):
        raise TypeError("function takes exactly 99 arguments")

    monkeypatch.setattr(direct, "launch", lambda fn, source: broken_launch)
    kernels = Kernels(Plain(), example)
    with pytest.warns(RuntimeWarning, match="99 arguments"):
        kernels[32](GRID, *ARGUMENTS)
    kernels[32](GRID, *ARGUMENTS)
    assert kernels.fn.calls == [PLAIN_CALL] * 2


def test_a_kernel_that_does_not_fit_is_the_callers_to_see(monkeypatch, unbroken):
    def too_large(fn, source):
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(direct, "launch", too_large)
    kernels = Kernels(Plain(), example)
    with pytest.raises(RuntimeError, match="out of resource"):
        kernels[32]
    assert not cache._state.direct_is_broken
    assert 32 not in kernels


SHAPE = dict(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)


def gpu_batch(lengths, **how):
    return make_batch(lengths, device="cuda", **{**SHAPE, **how})


def check(batch, **changes):
    out, lse = uniattn.attention(**batch.kwargs(return_lse=True, **changes))
    assert_matches_oracle(batch, out, lse, **{k: v for k, v in changes.items() if k != "out"})


@pytest.mark.gpu
def test_the_direct_launch_serves_this_gpu():
    check(gpu_batch([(1, 40), (20, 33)]))
    assert not cache._state.direct_is_broken


@pytest.mark.gpu
def test_a_thousand_batches_after_warm_up_compile_nothing():
    uniattn.warmup(8, 2, 64, return_lse=True)
    before = cache.num_compilations()
    rng = random.Random(0)
    for i in range(1000):
        lengths = []
        for _ in range(rng.choice([1, 1, 2, 3, 15, 16, 17])):
            kv_len = rng.choice([1, 15, 16, 17, rng.randint(1, 3000)])
            lengths.append((min(kv_len, rng.choice([1, 1, 1, 2, 16, rng.randint(1, 200)])), kv_len))
        batch = gpu_batch(lengths, seed=i)
        if i % 50 == 0:
            check(batch)
        else:
            uniattn.attention(**batch.kwargs(return_lse=True))
    assert cache.num_compilations() == before


@pytest.mark.gpu
def test_numbers_share_a_binary_and_are_right():
    lengths = [(1, 400), (30, 300)]
    check(gpu_batch(lengths), window=(20, 0), softcap=10.0)
    before = cache.num_compilations()
    for window, softcap, scale in [((1, 0), 3.0, 0.1), ((16, 0), 50.0, 0.5), ((300, 0), 10.0, None)]:
        check(gpu_batch(lengths), window=window, softcap=softcap, softmax_scale=scale)
    assert cache.num_compilations() == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_odd_addresses_and_strides_are_right(dtype):
    for how in (dict(head_dim=64), dict(head_dim=60), dict(head_dim=72)):
        batch = gpu_batch([(1, 100), (70, 90), (3, 17)], dtype=dtype, **how)
        q = torch.empty(batch.q.numel() + 1, dtype=dtype, device="cuda")[1:].view(batch.q.shape).copy_(batch.q)
        wide = torch.zeros(*batch.k_cache.shape[:3], batch.k_cache.shape[3] + 3, dtype=dtype, device="cuda")
        k = wide[..., 1:-2].copy_(batch.k_cache)
        check(batch.replace(q=q))
        check(batch.replace(k_cache=k))
        check(batch.replace(q=q, k_cache=k))


@pytest.mark.gpu
def test_a_binary_serves_its_device_alone():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        check(make_batch([(1, 40), (20, 33)], device=device, **SHAPE))


@pytest.mark.gpu
def test_profilers_see_launches_on_a_gpu():
    import triton

    names = []
    batch = gpu_batch([(1, 40)])
    triton.knobs.runtime.launch_enter_hook.add(enter := lambda metadata: names.append(metadata.get()["name"]))
    try:
        uniattn.attention(**batch.kwargs())
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(enter)
    assert "attend_kernel" in names


@pytest.mark.gpu
@torch.inference_mode()
def test_host_time_of_a_call():
    """Printed (`pytest -s`) and held loosely: a slow or busy host must not fail it, Triton's own launch must."""
    batch = make_batch([(1, 1000)] * 64, num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
    kwargs = batch.kwargs(max_seqlen_q=1)
    names = ("q", "k_cache", "v_cache", "cu_seqlens_q", "seqlens_k", "page_table", "max_seqlen_q")
    plan = uniattn.plan(**{name: kwargs[name] for name in names})
    for name, plan_of_call in (("without", None), ("with", plan)):
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                uniattn.attention(**kwargs, plan=plan_of_call)
            times.append((time.perf_counter() - start) / 20 * 1e6)
        print(f"host time of a call {name} a plan: {min(times):.1f} us (median {sorted(times)[15]:.1f})")
        assert min(times) < 150
