"""The `backend` fixture: one test body runs on the reference path, on the kernel in Triton's interpreter, and on a GPU."""

import pytest
import torch
from operator_backends import REFERENCE_CPU, TRITON_GPU, TRITON_INTERPRETER, Backend

# Where there is a GPU, Triton is not in interpreter mode, and the kernel runs there instead.
_ON_CPU = [REFERENCE_CPU] if torch.cuda.is_available() else [REFERENCE_CPU, TRITON_INTERPRETER]
_GPU = pytest.param(TRITON_GPU, marks=pytest.mark.gpu)


@pytest.fixture(params=[*_ON_CPU, _GPU], ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend of this run of the test, forced by `UNIATTN_BACKEND`."""
    monkeypatch.setenv("UNIATTN_BACKEND", request.param.uniattn_backend)
    return request.param


@pytest.fixture(params=[*_ON_CPU[1:], _GPU], ids=lambda backend: backend.name)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backends that run the Triton kernel, for what only a kernel of tiles promises."""
    monkeypatch.setenv("UNIATTN_BACKEND", request.param.uniattn_backend)
    return request.param
