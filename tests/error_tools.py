"""What the tests of wrong calls share: small sizes, odd tensors, and ops that must not be reached."""

import pytest
import torch

from uniattn import ops
from uniattn.kernels import eager

S, T, HQ, HKV, D, DV, PAGES, PAGE_SIZE = 3, 7, 4, 2, 16, 8, 6, 4
POISON = 7.0


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


def forbid_ops(monkeypatch):
    """Make every way to a kernel fail the test."""

    def reached(*args, **kwargs):
        pytest.fail("a wrong call reached the op")

    for name in ("attend", "merge", "write_kv"):
        monkeypatch.setattr(torch.ops.uniattn, name, reached)
        monkeypatch.setattr(ops, name, reached)
        monkeypatch.setattr(eager, name, reached)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def strided(*shape):
    """A tensor whose last dim has stride 2."""
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
