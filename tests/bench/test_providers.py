"""Which peers can run and why others cannot; that outputs are judged; the command line on a machine without a GPU."""

import re
import sys
import types
from dataclasses import replace

import pytest
import torch
from bench_tools import recorded_run

from uniattn import cli
from uniattn.bench import batch, check, providers, records
from uniattn.bench.providers.flash_attention import Fa2Package, Fa3Library
from uniattn.bench.providers.ours import Uniattn
from uniattn.bench.providers.pytorch import TorchSdpa
from uniattn.bench.providers.vllm_triton import VllmTriton
from uniattn.bench.workloads import Workload

MIX = Workload("mix", "g", ((1, 40), (7, 30), (33, 33), (1, 5)), num_q_heads=4, num_kv_heads=2, head_dim=32)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "reference")
    monkeypatch.delenv("UNIATTN_FA3_SO", raising=False)


def test_fa3_tells_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Fa3Library(providers.Paths()).available().startswith("no vllm is installed; name its _vllm_fa3_C library by --fa3")
    assert "there is no file" in Fa3Library(providers.Paths(fa3=tmp_path / "no.so")).available()
    (tmp_path / "bad.so").write_text("not a library")
    assert "does not load" in Fa3Library(providers.Paths(fa3=tmp_path / "bad.so")).available()
    monkeypatch.setenv("UNIATTN_FA3_SO", str(tmp_path / "env.so"))
    assert "env.so" in Fa3Library(providers.Paths()).available()


def test_packages_tell_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "flash_attn" in Fa2Package().available()
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert Fa2Package().available() == "flash_attn has no flash_attn_varlen_func"
    assert Fa2Package().covers(MIX) == "page sizes that are no multiple of 256"
    assert Fa2Package().covers(replace(MIX, page_size=512)) is None


def test_select_providers():
    chosen, missing = providers.select(["torch-sdpa", "uniattn", "fa2"], providers.Paths())
    assert [p.key for p in chosen] == ["uniattn", "torch-sdpa"]
    assert list(missing) == ["flash-attn 2"]
    with pytest.raises(ValueError, match="'fa5' is no provider; there are uniattn, fa3"):
        providers.select(["fa5"], providers.Paths())


def test_vllm_kernel_from_a_file(tmp_path, monkeypatch):
    path = tmp_path / "triton_unified_attention.py"
    assert "there is no file" in VllmTriton(providers.Paths(vllm_kernel=path)).available()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    path.with_name("triton_attention_helpers.py").write_text("from vllm.triton_utils import tl, triton\nHELP = 2\n")
    path.write_text(
        "import vllm.envs as envs\nfrom vllm.logger import init_logger\nfrom vllm.platforms import current_platform\n"
        "from vllm.v1.attention.ops.triton_attention_helpers import HELP\nfrom vllm.v1.kv_cache_interface import KVQuantMode\n"
        "logger = init_logger(__name__)\nassert not envs.VLLM_BATCH_INVARIANT and not current_platform.is_rocm()\n"
        "def unified_attention(q, k, v, out, softmax_scale, window_size, block_table):\n    out.fill_(HELP)\n"
    )
    provider = VllmTriton(providers.Paths(vllm_kernel=path))
    try:
        assert provider.available() is None
        # Only what the function takes is passed.
        assert provider.prepare(batch.build(MIX, "cpu")).run().eq(2).all()
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "vllm":
                del sys.modules[name]


@pytest.mark.parametrize("changes", [{}, {"window": (9, 0)}, {"softcap": 5.0}, {"page_size": 3}, {"dtype": "float16"}])
def test_right_outputs_pass_the_check(changes):
    b = batch.build(replace(MIX, **changes), "cpu")
    checker = check.Checker(b, 12)
    for provider in (Uniattn(), TorchSdpa()):
        if provider.covers(b.workload) is None:
            verdict = checker.verdict(provider.prepare(b).run())
            assert verdict.failure is None, provider.label
            assert 0 < verdict.of_allowed <= 1
            assert verdict.relative < 1e-2


def test_wrong_outputs_fail_the_check():
    b = batch.build(MIX, "cpu")
    checker = check.Checker(b, 12)
    right = Uniattn().prepare(b).run()
    last = right.clone()
    last[-1] *= 1.1
    verdict = checker.verdict(last)
    assert "query token 41" in verdict.failure
    assert verdict.of_allowed > 1
    unwritten = right.clone()
    unsampled = next(t for t in range(42) if t not in check.sample(MIX, 12))
    unwritten[unsampled, 0, 0] = torch.nan
    assert checker.verdict(unwritten).failure == "1 elements are NaN or infinite"
    assert "are NaN" in checker.verdict(b.poisoned_out()).failure


def test_uniattn_serves_every_call_of_a_prepared_batch():
    b = batch.build(MIX, "cpu")
    prepared = Uniattn().prepare(b)
    assert torch.equal(prepared.run().clone(), prepared.unplanned())
    assert prepared.plan() is not None


def test_sample_has_ends_and_extremes():
    tokens = check.sample(MIX, 12)
    assert {0, 41} <= set(tokens) <= set(range(42))
    # The longest sequence is the first, the shortest the last.
    many = Workload("many", "g", ((1, 100),) * 300 + ((5000, 5000),))
    tokens = check.sample(many, 24)
    assert len(tokens) <= 27
    assert sum(t >= 300 for t in tokens) > 8
    assert sum(t < 300 for t in tokens) > 8


def test_single_queries_see_what_they_saw():
    b = batch.build(MIX, "cpu")
    alone = b.single_queries([0, 3, 41])
    assert alone.lengths == ((1, 40), (1, 26), (1, 5))
    assert torch.equal(alone.page_table, b.page_table[[0, 1, 3]])


def test_built_tables_are_shuffled_and_disjoint():
    b = batch.build(replace(MIX, page_size=4), "cpu")
    used = torch.cat([row[: -(-kv // 4)] for row, (_, kv) in zip(b.page_table, MIX.lengths, strict=True)])
    assert used.unique().numel() == used.numel()
    assert used.tolist() != sorted(used.tolist())
    assert int(b.page_table.max()) < b.k_cache.shape[0]
    assert b.poisoned_out().isnan().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert cli.main(["bench", "--only", "decode"]) == 2
    assert "uniattn bench: GPU: got none that torch sees" in capsys.readouterr().err


def test_list_needs_no_gpu(capsys):
    assert cli.main(["bench", "--list", "--only", "spec,chunk 512"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"spec +8 x 8 queries at 8192 +62\.7 us", out)
    assert "chunk 512 of 131072" in out
    assert "prefill 1 x 512 " not in out
    assert re.search(r"fa2 +flash-attn 2 +\S", out)


def test_load_renders_and_compares(tmp_path, capsys):
    records.save(recorded_run(480.0), tmp_path / "old.json")
    records.save(recorded_run(400.0), tmp_path / "new.json")
    page = tmp_path / "page.html"
    options = ["--load", str(tmp_path / "new.json"), "--compare", str(tmp_path / "old.json"), "--html", str(page)]
    assert cli.main(["bench", *options]) == 0
    assert "uniattn: 480.0 -> 400.0 us, -16.7%" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_a_wrong_uniattn_is_an_exit_status(tmp_path):
    run = recorded_run()
    run.rows[0].results["uniattn"].status = "wrong: off"
    records.save(run, tmp_path / "run.json")
    assert cli.main(["bench", "--load", str(tmp_path / "run.json")]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "nothing like it", "--list"], "--only: got nothing like it; "),
        (["--load", "gone.json"], "--load: got gone.json; there is no such file; check the path\n"),
        (["--load", "."], "--load: got .; Is a directory; check the path\n"),
        (["--load", "gone.json", "--html", "no/folder/x.html"], "--html: got no/folder/x.html; its folder must exist"),
        (["--load", "gone.json", "--compare", "old.json"], "--compare: got old.json; "),
    ],
)
def test_wrong_options(capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *options]) == 2
    assert message in capsys.readouterr().err
