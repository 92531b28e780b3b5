"""Measuring on a device: on the CPU with the reference path and a timer that counts; on a GPU as it is."""

import functools
from dataclasses import replace

import pytest
import torch
from tuner_tools import H200

import uniattn
from uniattn.bench.workloads import Workload
from uniattn.schedule.tiles import Tiles
from uniattn.tuner import measure
from uniattn.tuner.measure import Gpu
from uniattn.tuner.resources import Resources

SMALL = Workload("small", "tune", ((1, 40), (7, 30)), num_q_heads=4, num_kv_heads=2, head_dim=32)
TILES = [Tiles(16, n, 3, 4) for n in (16, 32, 64)]


class FakeTimer:
    """A capture is the call itself; its time is its number."""

    def capture(self, call):
        return call

    def rounds(self, captured, count):
        return {key: [10.0 * int(key) + i for i in range(count)] for key in captured}


class FakeCompiler:
    def __init__(self, answers=None):
        self.answers, self.asked = answers or {}, []

    def ask(self, w, t):
        self.asked.append(t)

    def resources(self, w, t):
        return self.answers.get(t, Resources(88, 0, 0, 55040))


def gpu(answers=None):
    return Gpu(H200, FakeCompiler(answers), FakeTimer(), device="cpu")


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "reference")


def test_the_median_of_the_rounds(reference):
    assert gpu().times(SMALL, TILES, 3) == [1.0, 11.0, 21.0]


def test_what_the_check_refuses_has_no_time(reference, monkeypatch):
    right = uniattn.attention

    def wrong_with_32(*args, plan, out, **kwargs):
        right(*args, plan=plan, out=out, **kwargs)
        if plan.spec.block_n == 32:
            out[-1] *= 1.1
        return out

    monkeypatch.setattr(uniattn, "attention", wrong_with_32)
    first, second, third = gpu().times(SMALL, TILES, 3)
    assert (first, third) == (1.0, 21.0)
    assert second.startswith("wrong: ")


def test_what_fails_has_no_time_and_ends_nothing(reference, monkeypatch):
    right = uniattn.plan

    @functools.wraps(right)
    def fails_with_16(*args, tiles, **kwargs):
        if tiles.block_n == 16:
            raise RuntimeError("out of resource: shared memory")
        return right(*args, tiles=tiles, **kwargs)

    monkeypatch.setattr(uniattn, "plan", fails_with_16)
    times = gpu({TILES[1]: "the compiler crashed"}).times(SMALL, TILES, 1)
    assert times == ["failed: RuntimeError: out of resource: shared memory", "the compiler crashed", 20.0]


def test_a_batch_that_cannot_be_built_has_no_times(reference, monkeypatch):
    def build(w, device):
        raise MemoryError("too large")

    monkeypatch.setattr("uniattn.bench.batch.build", build)
    assert gpu().times(SMALL, TILES, 1) == ["failed: MemoryError: too large"] * 3


def test_a_batch_is_built_once_for_questions_in_a_row(reference, monkeypatch):
    from uniattn.bench import batch

    built = []
    right = batch.build
    monkeypatch.setattr(batch, "build", lambda w, device: built.append(w.name) or right(w, device))
    meter = gpu()
    for w in (SMALL, SMALL, replace(SMALL, name="other"), SMALL):
        meter.times(w, TILES[:1], 1)
    assert built == ["small", "other", "small"]


def test_programs_are_counted_from_what_was_compiled():
    hopper = replace(TILES[0], kernel="hopper")
    answers = {TILES[1]: Resources(168, 0, 0, 108288), TILES[2]: Resources(88, 0, 0, 262144), hopper: Resources(255, 0, 0, 200000)}
    first, second, third, other = gpu(answers).counted(SMALL, [*TILES, hopper])
    assert (first.programs_per_sm, second.programs_per_sm) == (4, 2)
    assert third == "it takes 262144 bytes of shared memory and 88 registers a thread"
    assert other == hopper


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch):
    from uniattn.launch.target import target_of
    from uniattn.tuner.compiling import Compiler

    monkeypatch.delenv("UNIATTN_BACKEND", raising=False)
    w = Workload("tiny", "tune", ((1, 300), (1, 40), (70, 200)), num_q_heads=4, num_kv_heads=2, head_dim=64)
    target = target_of(torch.device("cuda"))
    compiler = Compiler(measure.triton_target(), target)
    try:
        with torch.inference_mode():
            meter = measure.current_gpu(target, compiler)
            counted = meter.counted(w, TILES)
            assert all(isinstance(t, Tiles) and t.programs_per_sm >= 1 for t in counted)
            times = meter.times(w, counted, 3)
    finally:
        compiler.close()
    assert all(1 < us < 1000 for us in times)
