"""The serving benchmark's own logic, without vLLM: traffic, measuring on an engine that is a clock, tables, and comparisons."""

import asyncio
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "serving"


@pytest.fixture
def script(monkeypatch):
    """Imports a file of the benchmark."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_random_traffic(script):
    traffic = script("traffic")
    wanted = traffic.requests("random", Path("nowhere"), 3)
    assert [(r.prompt, r.output) for r in wanted] == [(1000, 100)] * 3
    prompts = traffic.prompts(wanted, 50)
    assert [len(p) for p in prompts] == [1000] * 3
    assert prompts[0] != prompts[1]
    assert {min(map(min, prompts)), max(map(max, prompts))} == {10, 49}
    assert prompts == traffic.prompts(wanted, 50)


def test_long_prompts_of_a_trace_are_cut(script, tmp_path):
    rows = [{"input_length": n, "output_length": 7} for n in (5, 200000, 30000)]
    (tmp_path / "mooncake_conversation.jsonl").write_text("\n".join(map(json.dumps, rows)))
    wanted = script("traffic").requests("mooncake", tmp_path)
    assert [(r.prompt, r.output) for r in wanted] == [(5, 7), (30000, 7), (30000, 7)]


def test_arrivals_are_all_at_once_or_at_a_rate(script):
    traffic = script("traffic")
    assert traffic.arrivals(3, None) == [0.0] * 3
    times = traffic.arrivals(4000, 5.0)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(800, rel=0.1)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mistral-small-24b", "gemma-3-12b", "llama-sinks", "tiny"])
def test_shapes_are_configs_that_transformers_reads(script, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(script("shapes").write(name, tmp_path))
    assert config.vocab_size == script("shapes").vocab_size(name)
    assert config.num_attention_heads % config.num_key_value_heads == 0
    if "layer_types" in script("shapes").SHAPES[name]:
        assert set(config.layer_types) == {"full_attention", "sliding_attention"}


def test_the_model_with_sinks_is_known_by_its_metadata(script, tmp_path, monkeypatch):
    for path in script("sinks_model").as_plugin(tmp_path):
        monkeypatch.syspath_prepend(path)
    from importlib.metadata import entry_points

    [entry] = [e for e in entry_points(group="vllm.general_plugins") if e.name == "sinks_model"]
    assert entry.load() is script("sinks_model").register
    with pytest.raises(AttributeError):
        _ = script("sinks_model").SomethingElse


class ClockEngine:
    """Answers each request with its tokens, the first after 20 ms and the others 2 ms apart."""

    def __init__(self):
        self.seen = []

    async def generate(self, prompt, sampling, name):
        self.seen.append((name, len(prompt["prompt_token_ids"]), sampling.max_tokens))
        await asyncio.sleep(0.02)
        for i in range(sampling.max_tokens):
            yield i
            await asyncio.sleep(0.002)


def test_measuring_on_an_engine_that_is_a_clock(script, monkeypatch):
    for name in ("vllm", "vllm.sampling_params"):
        module = ModuleType(name)
        module.SamplingParams = SimpleNamespace
        module.RequestOutputKind = SimpleNamespace(DELTA="delta")
        monkeypatch.setitem(sys.modules, name, module)
    measure, engine = script("measure"), ClockEngine()
    job = dict(limit=5, seconds=1.0, traces=".", vocab_size=64)
    point = asyncio.run(measure.point(engine, job, "random", None))
    assert [(length, out) for _, length, out in engine.seen] == [(1000, 100)] * 5
    assert len({name for name, _, _ in engine.seen}) == 5
    assert point["num_requests"] == 5
    # No upper bounds: a busy machine may take any time over a sleep.
    assert 20 <= point["ttft_p50_ms"] <= point["ttft_p99_ms"] < point["e2e_mean_ms"] <= 1e3 * point["wall_s"]
    assert 2 <= point["tpot_p50_ms"] <= point["tpot_p99_ms"]
    assert point["tokens_per_s"] == pytest.approx(5 * 1100 / point["wall_s"])
    assert point["e2e_mean_ms"] >= point["ttft_p50_ms"] + 99 * 2
    rated = asyncio.run(measure.point(engine, job, "random", 3.0))
    assert rated["num_requests"] == 4
    assert rated["wall_s"] > script("traffic").arrivals(4, 3.0)[-1]


def result(backend, scale, compiled=None):
    point = dict(trace="random", num_requests=5, wall_s=1.0, output_tokens_per_s=1.0, ttft_p50_ms=40.0 * scale, ttft_p99_ms=90.0,
                 tpot_p50_ms=7.0, tpot_p99_ms=9.0, e2e_mean_ms=800.0)  # fmt: skip
    points = [point | dict(rate=rate, tokens_per_s=1000.0 * scale) for rate in (None, 1.0, 9.0)]
    return dict(backend=backend, shape="tiny", start_s=90.0, points=points, vllm="0.26.0", torch="2.11.0", device="H200",
                compiled_while_serving=compiled)  # fmt: skip


def test_the_report(script):
    report = script("report")
    results = [result("FLASH_ATTN", 1.0), result("CUSTOM", 1.25, [0])]
    table = report.table(results)
    assert "| random x 5 at once | uniattn | 1,250 | 50.0 | 90.0 | 7.00 | 9.00 | 800 | 1.250 |" in table
    assert "| random x 5 9/s | FLASH_ATTN | 1,000 |" in table
    assert "compiled while serving: 0." in table
    page = report.page(results)
    assert page.count("<svg") == 4
    assert page.count("<rect") == 2
    assert "no backend" in report.table([])


def test_serve_goes_on_where_a_backend_fails(script, tmp_path, monkeypatch, capsys):
    serve = script("serve")

    def run(command, env, check):
        job = json.loads(command[2])
        assert job["points"] == [["random", None], ["random", 9.0]]
        assert str(FOLDER) in env["PYTHONPATH"]
        if job["backend"] == "CUSTOM":
            Path(job["result"]).write_text(json.dumps(result("CUSTOM", 1.0, [0])))

    monkeypatch.setattr(serve.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["serve.py", "--shape", "tiny", "--trace", "random", "--rates", "9", "--json", str(tmp_path / "x")])
    assert serve.main() == 1
    out = capsys.readouterr().out
    assert "| uniattn | 1,000 |" in out
    assert "failed: FLASH_ATTN, TRITON_ATTN" in out
    assert [r["backend"] for r in json.loads((tmp_path / "x").read_text())] == ["CUSTOM"]


def test_agreement_counts_up_to_the_first_other_token(script):
    compare = script("compare")
    a = {"outputs": [dict(tokens=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0]), dict(tokens=[4, 5], logprobs=[-1.0, -1.0])]}
    b = {"outputs": [dict(tokens=[1, 2, 4], logprobs=[-1.0, -2.5, -9.0]), dict(tokens=[4, 5], logprobs=[-1.0, -1.0])]}
    assert compare.agreement(a, b) == (1, 2.0, 0.5)
    assert compare.agreement(a, a) == (2, 2.5, 0.0)


@pytest.mark.parametrize(("compiled", "turned", "status"), [(0, False, 0), (3, False, 1), (0, True, 1)])
def test_compare_is_right_only_where_fp32_is_equal_and_nothing_compiles(script, monkeypatch, capsys, compiled, turned, status):
    compare = script("compare")
    monkeypatch.setattr(compare, "make_model", lambda name, folder: folder)

    monkeypatch.setattr(compare, "eager", lambda folder: dict(outputs=[dict(tokens=[1] * 4, logprobs=[-1.0] * 4)] * 2))

    def run(job):
        ours = job["engine"]["attention_backend"] == "CUSTOM"
        tokens = [9 if turned and ours else 1] * 4
        return dict(outputs=[dict(tokens=tokens, logprobs=[-1.0] * 4)] * 2, compiled=[20, compiled] if ours else [0, 0])

    monkeypatch.setattr(compare.engines, "run", run)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--models", "llama"])
    assert compare.main() == status
    out = capsys.readouterr().out
    assert "20 kernels ready" in out
    assert f"| llama | float32 | CUSTOM FULL and eager | {0 if turned else 2}/2 |" in out
    assert compare.RUNS[2] == ("float32", "CUSTOM", "FULL")


@pytest.mark.parametrize(("shift", "right"), [(0.0, True), (0.0015, True), (0.01, False)])
def test_log_probabilities_are_compared_with_the_first_backends(script, monkeypatch, tmp_path, shift, right):
    real_model = script("real_model")
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps({"question": f"q{i}", "answer": "a"}) for i in range(3)))
    monkeypatch.setattr(real_model, "encode", lambda folder, words: [[1] * len(text) for text in words])

    def run(job):
        value = -2.0 + (shift if job["engine"]["attention_backend"] == "CUSTOM" else 0.0)
        assert job["sampling"]["prompt_logprobs"] == 0
        return dict(outputs=[dict(prompt_logprobs=[None, *[value] * (len(p) - 1)]) for p in job["prompts"]], compiled=[0, 0])

    monkeypatch.setattr(real_model.engines, "run", run)
    a = SimpleNamespace(model=tmp_path, data=tmp_path / "test.jsonl", limit=2, backends=["FLASH_ATTN", "CUSTOM"])
    assert real_model.logprobs(a) is right


def test_a_failed_engine_is_told(script, monkeypatch, tmp_path, capsys):
    real_model = script("real_model")
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}))
    monkeypatch.setattr(real_model, "encode", lambda folder, words: [[1, 2]])
    monkeypatch.setattr(real_model.engines, "run", lambda job: None)
    a = SimpleNamespace(model=tmp_path, data=tmp_path / "test.jsonl", limit=None, backends=["CUSTOM"])
    assert real_model.logprobs(a) is False
    assert "| CUSTOM | failed |" in capsys.readouterr().out
