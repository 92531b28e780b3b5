"""`UNIATTN_BACKEND` really chooses: the path asked for runs, and no other does."""

import os
import subprocess
import sys

import pytest
import torch

import uniattn
from uniattn.launch.backend import own_dict
from uniattn.testing import make_batch


class Ran(Exception):
    """Raised in place of a kernel or a path, to prove that it was reached."""


class Raises:
    """Stands for the launches of a Triton kernel: `KERNELS[key](...)`."""

    def __getitem__(self, key):
        raise Ran


def raises(*args, **kwargs):
    raise Ran


def calls(device="cpu"):
    """Each public function with valid arguments, as a call without arguments."""
    batch = make_batch([(1, 5)], head_dim=16, device=device)
    k = torch.zeros(1, 1, 16, device=device)
    outs, lses = torch.zeros(2, 1, 1, 8, device=device), torch.zeros(2, 1, 1, device=device)
    return {
        "attend": lambda: uniattn.attention(**batch.kwargs()),
        "merge": lambda: uniattn.merge_states(outs, lses),
        "write_kv": lambda: uniattn.write_kv(
            k, k, batch.k_cache, batch.v_cache, torch.zeros(1, dtype=torch.int64, device=device)
        ),
    }


@pytest.mark.parametrize("function", ["attend", "merge", "write_kv"])
def test_the_chosen_path_runs_and_no_other(backend, function, monkeypatch):
    call = calls(backend.device)[function]
    call()
    if backend.is_kernel:
        with monkeypatch.context() as broken:
            broken.setattr(f"uniattn.kernels.eager.{function}", raises)
            call()
        monkeypatch.setattr(sys.modules[f"uniattn.launch.{function}"], "KERNELS", Raises())
    else:
        monkeypatch.setattr(f"uniattn.kernels.eager.{function}", raises)
    with pytest.raises(Ran):
        call()


@pytest.mark.parametrize("value", [None, "auto", ""])
@pytest.mark.parametrize("function", ["attend", "merge", "write_kv"])
def test_cpu_tensors_take_the_reference_path_by_default(function, value, monkeypatch):
    if value is None:
        monkeypatch.delenv("UNIATTN_BACKEND", raising=False)
    else:
        monkeypatch.setenv("UNIATTN_BACKEND", value)
    monkeypatch.setattr(f"uniattn.kernels.eager.{function}", raises)
    with pytest.raises(Ran):
        calls()[function]()


@pytest.mark.gpu
def test_gpu_tensors_take_the_kernel_by_default(monkeypatch):
    monkeypatch.delenv("UNIATTN_BACKEND", raising=False)
    calls("cuda")["attend"]()
    monkeypatch.setattr(sys.modules["uniattn.launch.attend"], "KERNELS", Raises())
    with pytest.raises(Ran):
        calls("cuda")["attend"]()


def test_triton_on_cpu_tensors_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(uniattn.UnsupportedError, match=r"UNIATTN_BACKEND.*TRITON_INTERPRET=1"):
        calls()["attend"]()


def test_hopper_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "hopper")
    with pytest.raises(uniattn.UnsupportedError, match=r"UNIATTN_BACKEND: got hopper on cpu; .* capability 9\.0; set UNIATTN_BACKEND=auto"):
        calls()["attend"]()


@pytest.mark.parametrize("value", ["cuda", "Hopper", "Triton"])
def test_unknown_backends_are_refused(value, monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", value)
    message = rf"UNIATTN_BACKEND: got '{value}'; one of auto, reference, triton, hopper in this version"
    with pytest.raises(uniattn.UnsupportedError, match=message):
        calls()["attend"]()


@pytest.mark.parametrize("windows", [False, True])
def test_the_environment_is_looked_up_by_its_own_keys(windows):
    code = (str.upper, str, str, str) if windows else (os.fsencode, os.fsdecode, os.fsencode, os.fsdecode)
    environ = os._Environ({}, *code)
    held, key = own_dict(environ, "UNIATTN_BACKEND")
    assert key not in held
    environ._data[key] = code[2]("triton")
    assert environ["UNIATTN_BACKEND"] == "triton"
    assert key in held
    assert own_dict({}, "UNIATTN_BACKEND")[0] is None


LATE = """
import os, torch, uniattn, uniattn.launch.launches
os.environ["TRITON_INTERPRET"], os.environ["UNIATTN_BACKEND"] = "1", "triton"
x, ints = torch.zeros(1, 1, 16), torch.tensor([0, 1], dtype=torch.int32)
pages = torch.zeros(1, 1, 1, 16)
for call in (
    lambda: uniattn.attention(x, x, x, cu_seqlens_q=ints, cu_seqlens_k=ints),
    lambda: uniattn.plan(x, x, x, cu_seqlens_q=ints, cu_seqlens_k=ints),
    lambda: uniattn.merge_states([x, x], [x[..., 0], x[..., 0]]),
    lambda: uniattn.write_kv(x, x, pages, pages.clone(), ints[:1]),
):
    try:
        call()
    except uniattn.UnsupportedError as error:
        print(error)
"""


def test_an_interpreter_asked_for_too_late_is_told():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", LATE], env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("TRITON_INTERPRET: got set after") and "before Python starts" in line for line in lines)
