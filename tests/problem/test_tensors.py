"""What a chip cannot do, by stub targets."""

import pytest
import torch

from uniattn import UnsupportedError
from uniattn.launch.target import Target
from uniattn.problem import tensors

V100 = Target("Tesla V100", "cuda", 70, 80, 98304)
A100 = Target("NVIDIA A100", "cuda", 80, 108, 166912)
L40 = Target("NVIDIA L40", "cuda", 89, 142, 101376)
H200 = Target("NVIDIA H200", "cuda", 90, 132, 232448)
MI250 = Target("AMD Instinct MI250X", "hip", "gfx90a", 104, 65536)
MI300 = Target("AMD Instinct MI300X", "hip", "gfx942", 304, 65536)
CPU = Target("cpu", "cpu", "cpu", 4, 65536)


@pytest.mark.parametrize(
    ("chip", "words"),
    [
        (A100, ["q: got float8_e4m3fn on NVIDIA A100", "8.0 has no fp8", "8.9"]),
        (MI250, ["q: got float8_e4m3fn on AMD Instinct MI250X", "gfx90a has no fp8"]),
        *((chip, ["q: got float8_e4m3fn;", "not supported in this version"]) for chip in (L40, H200, MI300, CPU)),
    ],
)
def test_fp8(chip, words):
    error = tensors.quantised("q", torch.float8_e4m3fn, chip)
    assert isinstance(error, UnsupportedError)
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(("chip", "missing"), [(V100, True), (A100, False), (H200, False), (MI250, False), (CPU, False)])
def test_bfloat16(chip, missing, monkeypatch):
    assert tensors.bfloat16_missing(chip) is missing
    monkeypatch.setattr(tensors, "target_of", lambda device: chip)
    monkeypatch.delenv("UNIATTN_BACKEND", raising=False)
    x = torch.zeros(1, dtype=torch.bfloat16)
    if missing:
        with pytest.raises(
            UnsupportedError, match=r"q: got bfloat16 on Tesla V100; .* capability 7.0; 8.0 and newer do; use float16"
        ):
            tensors.check_chip("q", x)
        monkeypatch.setenv("UNIATTN_BACKEND", "reference")
    tensors.check_chip("q", x)
