"""Shared by every test: Triton's interpreter where there is no GPU, and which tests can run here.

`TRITON_INTERPRET` is read when Triton is first imported, so it is set before anything else.
"""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, tests marked `gpu` are deselected (not skipped, so that a skip always means something)."""
    if HAS_GPU:
        return
    if "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr:
        raise pytest.UsageError("-m gpu was asked for, but torch sees no GPU")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
