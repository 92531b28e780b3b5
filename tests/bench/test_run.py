"""A row on the way: what is checked before it is timed, and what a failing provider leaves standing."""

import sys

import pytest
import torch
from bench_tools import PEAKS

import uniattn
from uniattn.bench import run as runner
from uniattn.bench.providers.base import Prepared, Provider
from uniattn.bench.providers.ours import Uniattn
from uniattn.bench.workloads import Workload

SMALL = Workload("small", "g", ((1, 40), (7, 30)), num_q_heads=4, num_kv_heads=2, head_dim=32)


class Fake(Provider):
    """uniattn's output times `factor`; raises `error` instead where one is given."""

    def __init__(self, key, factor=1.0, error=None, lacks=None):
        self.key = self.label = key
        self._factor, self._error, self._lacks = factor, error, lacks

    def available(self):
        return None

    def covers(self, w):
        return self._lacks

    def prepare(self, batch):
        inner = Uniattn().prepare(batch)

        def run():
            if self._error:
                raise self._error
            return inner.run() * self._factor

        return Prepared(run, plan=lambda: None)


class FakeTimer:
    """Stands in for the GPU's timer: a capture is the call itself, which every round runs."""

    def __init__(self, refuses=()):
        self.captures = 0
        self.refuses = refuses

    def capture(self, call):
        self.captures += 1
        if self.captures in self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return call

    def rounds(self, captured, count):
        for call in captured.values():
            call()
        return {key: [5.0 + i for i in range(count)] for key in captured}


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "reference")


def measured(providers, timer=None, w=SMALL):
    row = runner.empty_row(w, PEAKS)
    runner.measure(row, w, providers, timer or FakeTimer(), 3, device="cpu")
    return row.results


def test_each_provider_gets_what_it_deserves(reference):
    results = measured([
        Fake("right"), Fake("off", factor=1.1), Fake("nan", factor=torch.nan), Fake("broken", error=ValueError("no\nmore")),
        Fake("narrow", lacks="windows"),
    ])  # fmt: skip
    assert results["right"].rounds_us == [5.0, 6.0, 7.0]
    assert (results["right"].us, results["right"].spread_us, results["right"].plan_us) == (6.0, 2.0, 6.0)
    assert 0 < results["right"].error_of_allowed <= 1
    assert results["off"].status.startswith("wrong: ")
    assert results["off"].error_of_allowed > 1
    assert "NaN" in results["nan"].status
    assert results["broken"].status == "failed: ValueError: no"
    assert results["narrow"].status == "not covered: windows"
    for key in ("off", "nan", "broken", "narrow"):
        assert results[key].rounds_us == []
        assert results[key].us is None


def test_what_no_graph_can_hold(reference):
    results = measured([Fake("a"), Fake("b")], FakeTimer(refuses=(2, 3)))
    assert results["a"].status == "ok"
    assert results["a"].plan_failure == "RuntimeError: operation not permitted when stream is capturing"
    assert results["b"].status.startswith("failed: RuntimeError: operation not permitted")


def test_a_point_of_a_sweep_times_no_plan(reference):
    assert measured([Fake("a")], w=Workload("p", "sweep x", ((1, 9),), head_dim=32, x=1))["a"].plan_us is None


def test_a_row_that_cannot_be_built_leaves_a_row(reference, monkeypatch):
    def build(w, device):
        raise MemoryError("too large")

    monkeypatch.setattr(runner.batches, "build", build)
    row = runner._measure_or_tell(SMALL, [Fake("a"), Fake("b")], PEAKS, FakeTimer(), 3)
    assert {result.status for result in row.results.values()} == {"failed: MemoryError: too large"}


def test_facts_name_versions():
    found = runner.facts()
    assert found["torch"] == torch.__version__
    assert {"card", "triton", "python", "date"} <= set(found)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch):
    w = Workload("tiny", "g", ((1, 300), (1, 40), (70, 200)), num_q_heads=4, num_kv_heads=2, head_dim=64)
    report = runner.run([w], [Uniattn()], {}, PEAKS, rounds=3, quiet=True)
    result = report.rows[0].results["uniattn"]
    assert result.status == "ok"
    assert len(result.rounds_us) == 3
    assert 1 < result.us < 1000
    assert result.plan_us is not None
    assert report.host["uniattn"].run_us > 0

    right = uniattn.attention

    def broken(*args, out, **kwargs):
        right(*args, out=out, **kwargs)
        out[-1] *= 1.1
        return out

    monkeypatch.setattr(uniattn, "attention", broken)
    result = runner.run([w], [Uniattn()], {}, PEAKS, rounds=3, quiet=True).rows[0].results["uniattn"]
    assert result.status.startswith("wrong: ")
    assert result.us is None
    assert result.rounds_us == []


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_bar_on_a_terminal_only(terminal, capsys, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    assert list(runner._progress([SMALL, SMALL], quiet=False)) == [SMALL, SMALL]
    err = capsys.readouterr().err
    if terminal:
        assert "small: 100%" in err
    else:
        assert err == "[1/2] small\n[2/2] small\n"
