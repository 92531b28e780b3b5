"""The backend of vLLM on stand-ins of a release."""

import pytest
import vllm_standins
from vllm_tools import NEWEST


@pytest.fixture
def load(monkeypatch):
    """Imports the backend on a release's stand-ins: `load(release)`, the newest one without."""
    return lambda release=NEWEST: vllm_standins.install(release, monkeypatch)
