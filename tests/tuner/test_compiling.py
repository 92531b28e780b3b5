"""Compiling in processes beside: what is asked once, what crashes, and that a call compiles all that it launches."""

import os
from dataclasses import replace

import pytest
import torch
from tuner_tools import DECODES, H200, PREFILL

from uniattn.schedule import hopper
from uniattn.schedule.tiles import Tiles
from uniattn.tuner import compiling
from uniattn.tuner.compiling import Compiler, spec_of
from uniattn.tuner.resources import Resources

TILES = Tiles(16, 32, 3, 4, bulk=False)


def compiled(w, spec, target):
    """Stands for a compiler: blocks of 64 tokens raise, those of 128 crash."""
    if spec.block_n == 64:
        raise RuntimeError("PassManager::run failed\nmore")
    if spec.block_n == 128:
        os._exit(1)
    return Resources(len(w.name), 0, 0, os.getpid())


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 2)
    made = Compiler(("cuda", 90, 32), H200, compiled)
    yield made
    made.close()


def test_faults_are_told_and_a_crash_harms_no_other_call(compiler):
    w = DECODES[0]
    for n in (32, 64, 128, 16):
        compiler.ask(w, replace(TILES, block_n=n))
    assert compiler.resources(w, replace(TILES, block_n=64)) == "RuntimeError: PassManager::run failed"
    assert compiler.resources(w, replace(TILES, block_n=128)) == "the compiler crashed"
    assert compiler.resources(w, replace(TILES, block_n=16)).registers == len(w.name)
    first = compiler.resources(w, TILES)
    assert first.shared != os.getpid()
    # Lengths and slots are no part of a binary: another batch of the shape takes what is there.
    assert compiler.resources(replace(DECODES[2], name="longer"), replace(TILES, programs_per_sm=7)) == first
    assert compiler.resources(replace(w, head_dim=64, name="other"), TILES).registers == len("other")


@pytest.mark.parametrize("w", [DECODES[0], PREFILL], ids=lambda w: w.name)
@pytest.mark.parametrize("tiles", [TILES, hopper.choose(128, 128)], ids=lambda t: t.kernel)
def test_a_call_compiles_all_that_it_launches(w, tiles, monkeypatch):
    """In place of compiling, what is asked for is noted."""
    from uniattn.launch import attend, cache, merge, plan

    asked = []

    def note(fn, source, target):
        asked.append((fn, target))
        return "kernel"

    monkeypatch.setattr(cache.direct, "compiled", note)
    monkeypatch.setattr(cache._state, "compiles_for", None)
    monkeypatch.setattr("uniattn.tuner.resources.of", lambda kernel, backend: (kernel, backend))
    for module, name in ((attend, "KERNELS"), (plan, "KERNELS"), (merge, "PIECES_KERNELS")):
        old = getattr(module, name)
        monkeypatch.setattr(module, name, cache.Kernels(old.fn, old.source))
    kernels = [plan.KERNELS.fn, attend.KERNELS.fn]
    if tiles.kernel == "hopper":
        from uniattn.launch import hopper as launch_hopper

        monkeypatch.setattr(launch_hopper, "KERNELS", cache.Kernels(launch_hopper.KERNELS.fn, launch_hopper.KERNELS.source))
        kernels[1] = launch_hopper.KERNELS.fn
    spec = spec_of(w, tiles, H200)
    if spec.num_partials:
        kernels.insert(1, merge.PIECES_KERNELS.fn)
    assert compiling.compile_call(w, spec, ("cuda", 90, 32)) == ("kernel", "cuda")
    assert [fn for fn, _ in asked] == kernels
    assert {str(target.arch) for _, target in asked} == {"90"}
    assert torch.empty(0).device.type == "cpu"


@pytest.mark.timeout(300)
def test_a_real_kernel_is_compiled_for_a_chip_that_is_not_here(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(compiling.os, "cpu_count", lambda: 2)
    made = Compiler(("cuda", 90, 32), H200)
    try:
        used = made.resources(DECODES[0], replace(TILES, num_stages=7))
    finally:
        made.close()
    assert (used.spills_in_loop, used.shared) == (0, 55040)
    assert 32 < used.registers <= 128
