"""The contract check finds what is missing or changed, in a folder and in a wheel, and is silent where all is there."""

import importlib.util
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_vllm_contract.py"
REGISTRY = """
class AttentionBackendEnum:
    TRITON_ATTN = "somewhere"
    CUSTOM = None
def register_backend(backend, class_path=None, is_mamba=False): ...
"""
PLATFORM = """
class DeviceCapability:
    major: int
    minor: int
class Platform:
    def is_cuda_alike(self): ...
    def is_cuda(self): ...
    def fp8_dtype(cls): ...
"""
BACKEND = """
class AttentionImpl:
    @abstractmethod
    def forward(self, layer): ...
    @abstractmethod
    def something_new(self): ...
class CommonAttentionMetadata:
    query_start_loc: int
    seq_lens: int
"""


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check_vllm_contract", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(check, tmp_path):
    """A tree of some of vLLM's files."""

    def make(version="0.26.0", **changes):
        files = {
            "_version.py": f"__version__ = version = '{version}'",
            "v1/attention/backends/registry.py": REGISTRY,
            "plugins/__init__.py": 'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"',
            "platforms/interface.py": PLATFORM,
            "v1/attention/backend.py": BACKEND,
        }
        for name, text in (files | changes).items():
            path = tmp_path / version / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return check.Tree(tmp_path / version)

    return make


def test_what_is_there_is_found(check, tree):
    t = tree()
    assert t.version == "0.26.0"
    assert t.release == (0, 26)
    assert list(check.registry(t)) == []
    assert list(check.platform(t)) == []


def test_what_is_missing_is_named(check, tree):
    t = tree(**{"v1/attention/backends/registry.py": REGISTRY.replace("CUSTOM", "OTHER").replace("class_path", "path")})
    assert list(check.registry(t)) == ["AttentionBackendEnum has no CUSTOM", "register_backend takes other arguments"]
    assert "AttentionImpl.something_new is abstract" in list(check.abstract(t))
    assert "CommonAttentionMetadata has no slot_mapping" in list(check.batch(t))
    assert "CommonAttentionMetadata has no seq_lens" not in list(check.batch(t))
    assert "AttentionImpl.forward takes other arguments" in list(check.layer(t))


def test_names_are_expected_from_the_release_that_has_them(check, tree):
    assert "names can be added before 0.32, or not from then on" in list(check.registry(tree("0.32.0")))


def test_a_wheel_is_read_without_unpacking(check, tree, tmp_path):
    folder = tree().path
    wheel = tmp_path / "vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in folder.rglob("*.py"):
            archive.write(path, path.relative_to(folder))
    t = check.Tree(wheel)
    assert t.version == "0.26.0"
    assert list(check.registry(t)) == []


def test_the_command_says_what_is_amiss(check, tree, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check", str(tree().path)])
    assert check.main() == 1
    out = capsys.readouterr().out
    assert "| The platform tells what the backend asks it | yes |" in out
    assert "0.26.0: AttentionImpl.something_new is abstract" in out
