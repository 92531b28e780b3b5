"""Device facts, from stub properties."""

from types import SimpleNamespace

import pytest
import torch

from uniattn.launch.target import Target, from_properties, interpreted, target_of


def test_cuda():
    h200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448)
    assert from_properties(h200, hip=False) == Target("NVIDIA H200", "cuda", 90, 132, 232448)


def test_hip():
    mi300 = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304)
    assert from_properties(mi300, hip=True) == Target("AMD Instinct MI300X", "hip", "gfx942", 304, 65536)


def test_lds_of_a_compute_unit():
    mi355 = SimpleNamespace(name="AMD Instinct MI355X", gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=256)
    assert from_properties(mi355, hip=True).max_shared_bytes == 163840


@pytest.mark.parametrize(
    ("backend", "arch", "unit"),
    [
        ("cuda", 80, "mma"), ("cuda", 89, "mma"), ("cuda", 90, "wgmma"), ("cuda", 100, "tcgen05"), ("cuda", 103, "tcgen05"),
        ("cuda", 120, "mma"), ("hip", "gfx942", "mfma"), ("hip", "gfx950", "mfma"), ("cpu", "cpu", "wgmma"),
    ],
)  # fmt: skip
def test_matrix_unit(backend, arch, unit):
    assert Target("", backend, arch, 1, 1).matrix_unit == unit


def test_cpu_asks_no_driver():
    assert target_of(torch.device("cpu")).backend == "cpu"
    assert target_of(torch.device("meta")).backend == "cpu"


def test_device_is_asked_once(monkeypatch):
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(name="stub", major=8, minor=6, multi_processor_count=1, shared_memory_per_block_optin=1)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 101)
    try:
        assert target_of(torch.device("cuda", 101)) is target_of(torch.device("cuda"))
    finally:
        from uniattn.launch import target

        target._of_index.cache_clear()
    assert asked == [101]


@pytest.mark.parametrize("word", ["1", "true", "TRUE", "yes", "Yes", "on", "On", "y", "0", "false", "no", "off", "", "2", "t"])
def test_interpreted_is_what_triton_takes_for_true(word, monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setenv("TRITON_INTERPRET", word)
    assert interpreted() == bool(knobs.runtime.interpret)
