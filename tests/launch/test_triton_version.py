"""A missing or old Triton is told with its fix, before any kernel module is imported."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import uniattn
from uniattn import UnsupportedError
from uniattn.launch import triton_version


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0+git1234", "3.10.0", "4.0"])
def test_new_enough(version):
    triton_version.check(version)


@pytest.mark.parametrize(
    ("version", "got"), [("3.5.1", "Triton 3.5.1"), ("2.1", "Triton 2.1"), ("odd", "Triton odd"), (None, "no importable")]
)
def test_too_old_or_missing(version, got):
    with pytest.raises(UnsupportedError) as error:
        triton_version.check(version)
    assert str(error.value).startswith(f"triton: got {got}")
    assert "need Triton 3.6 or newer" in str(error.value)
    assert 'pip install "uniattn[triton]"' in str(error.value)


@pytest.fixture
def forget():
    triton_version.require.cache_clear()
    yield
    triton_version.require.cache_clear()


def importing(monkeypatch, answer):
    real = importlib.import_module

    def import_module(name, *args):
        if name != "triton":
            return real(name, *args)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(importlib, "import_module", import_module)


@pytest.mark.parametrize(
    ("answer", "got"), [(ImportError("no"), "no importable package"), (SimpleNamespace(__version__="3.4.0"), "Triton 3.4.0")]
)
def test_launch_path_asks(monkeypatch, forget, answer, got):
    importing(monkeypatch, answer)
    monkeypatch.setenv("UNIATTN_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = torch.full((1, 2, 16), 7.0)
    lengths = torch.tensor([0, 1], dtype=torch.int32)
    x = torch.randn(1, 2, 16)
    call = {"q": x, "k_cache": x, "v_cache": x, "out": out}
    with pytest.raises(UnsupportedError, match=got):
        uniattn.attention(**call, cu_seqlens_q=lengths, cu_seqlens_k=lengths)
    assert (out == 7.0).all()
    monkeypatch.setenv("UNIATTN_BACKEND", "reference")
    uniattn.attention(**call, cu_seqlens_q=lengths, cu_seqlens_k=lengths)


def test_cpu_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import torch, uniattn; "
        "n = torch.tensor([0, 1], dtype=torch.int32); x = torch.randn(1, 2, 16); "
        "print(*uniattn.attention(x, x, x, cu_seqlens_q=n, cu_seqlens_k=n).shape)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.stdout.split() == ["1", "2", "16"], shown.stderr
