"""Which batches the bench runs: names, the grammar, traces, the sweep; and what they cost at least."""

import json

import pytest
from bench_tools import PEAKS

from uniattn.bench import grammar, sweep, traces, workloads
from uniattn.bench.roofline import cost, known_peaks, visible_keys, visible_pairs
from uniattn.bench.traces import Request
from uniattn.bench.workloads import Workload

# Floors on an H200 in microseconds, as recorded beside the peers' times.
FLOORS = {
    "decode 1 x 512": 0.5,
    "decode 1 x 131072": 124.9,
    "decode 64, lengths 128-16384": 492.3,
    "decode 64 x 4096, heads 8/1": 31.3,
    "decode 16 x 4096, heads 32/32": 249.8,
    "prefill 4 x 2048": 174.1,
    "prefill 1 x 32768": 11135,
    "chunk 512 of 131072": 1389,
    "63 decodes (256-4096) + prefill 1985": 141.9,
    "120 decodes (256-8192) + 8072 of 16264": 2059,
    "15 decodes (256-2048) + prefill 497": 16.6,
    "64 x 5 queries at 4096": 250.9,
    "8 x 8 queries at 8192": 62.7,
}


@pytest.mark.parametrize("name", FLOORS)
def test_floors_of_named_rows(name):
    (w,) = [w for w in workloads.table() if w.name == name]
    floor = cost(w).floor_us(PEAKS)
    assert floor == pytest.approx(FLOORS[name], abs=0.05 if FLOORS[name] < 1000 else 0.6)


def test_names_are_unique_and_groups_known():
    rows = workloads.table()
    assert len({w.name for w in rows}) == len(rows)
    assert {w.group for w in rows} == set(workloads.GROUPS)


def test_mixes_have_the_lengths_that_their_names_tell():
    rows = {w.name: w for w in workloads.table()}
    mix = rows["63 decodes (256-4096) + prefill 1985"].lengths
    assert [q for q, _ in mix] == [1] * 63 + [1985]
    assert all(256 <= kv <= 4096 for _, kv in mix[:63])
    assert mix[63] == (1985, 1985)
    skewed = [kv for _, kv in rows["decode 131072 among 63 x 64-512"].lengths]
    assert len(skewed) == 64
    assert sorted(skewed)[-1] == 131072
    assert all(64 <= kv <= 512 for kv in sorted(skewed)[:-1])


def test_select():
    assert {w.group for w in workloads.select()} == set(workloads.TABLE_GROUPS)
    assert {w.group for w in workloads.select(["spec", "mixed"])} == {"spec", "mixed"}
    assert {w.group for w in workloads.select(["shapes"])} == {"shapes"}
    assert [w.name for w in workloads.select(["CHUNK 512"])] == ["chunk 512 of 131072"]
    with pytest.raises(ValueError, match="'decoed' is no group"):
        workloads.select(["decoed"])


@pytest.mark.parametrize(
    ("lengths", "heads", "message"),
    [([], 8, "at least one sequence"), ([(2, 1)], 8, "1 <= q_len <= kv_len"), ([(1, 1)], 7, "no multiple of 8 KV heads")],
)
def test_workload_refuses(lengths, heads, message):
    with pytest.raises(ValueError, match=message):
        Workload("w", "g", tuple(lengths), num_q_heads=heads)


def test_runs_count_equal_neighbours():
    assert Workload("w", "g", ((1, 5), (1, 5), (3, 3), (1, 5))).runs() == [(2, 1, 5), (1, 3, 3), (1, 1, 5)]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("q512", [(512, 512)]),
        ("q2k", [(2048, 2048)]),
        ("2q1k_3q1s1k", [(1024, 1024)] * 2 + [(1, 1024)] * 3),
        ("8q4s2k", [(4, 2048)] * 8),
        ("q1ks2k", [(1024, 2048)]),
        ("2q10s1000_q7", [(10, 1000)] * 2 + [(7, 7)]),
    ],
)
def test_grammar(text, lengths):
    assert grammar.parse(text) == tuple(lengths)


def test_grammar_lists_and_shape():
    first, second = grammar.workloads("q512, 32q1s1k", head_dim=64)
    assert (first.name, second.name) == ("q512", "32q1s1k")
    assert first.head_dim == second.head_dim == 64


@pytest.mark.parametrize("text", ["", "512", "q", "2q1kk", "q1s2s3", "q2k_", "0q1s8", "q8s4", "q0", "x2q1"])
def test_grammar_refuses(text):
    with pytest.raises(ValueError, match="in '"):
        grammar.parse(text)


def brute_pairs(q_len, kv_len, window):
    seen = [(i, j) for i in range(kv_len - q_len, kv_len) for j in range(i + 1) if window is None or j >= i - window[0]]
    return len(seen), len({j for _, j in seen})


@pytest.mark.parametrize("window", [None, (0, 0), (3, 0), (9, 0), (100, 0)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 12), (5, 5), (5, 12), (12, 12), (20, 33)])
def test_visible_pairs_and_keys_against_a_count(q_len, kv_len, window):
    pairs, keys = brute_pairs(q_len, kv_len, window)
    assert visible_pairs(q_len, kv_len, window) == pairs
    assert visible_keys(q_len, kv_len, window) == keys


def test_cost_by_hand():
    # 3 query tokens at the end of 5: they see 3, 4 and 5 keys. 4 query heads over 2 KV heads, dim 8, 2 bytes an element.
    c = cost(Workload("w", "g", ((3, 5),), num_q_heads=4, num_kv_heads=2, head_dim=8))
    assert c.flops == 4 * 12 * 4 * 8
    assert c.bytes == 2 * (2 * 5 * 2 * 8 + 2 * 3 * 4 * 8)
    assert c.intensity == c.flops / c.bytes


def test_peaks():
    assert known_peaks("NVIDIA H200").bytes == 4.3e12
    assert known_peaks("NVIDIA H100 PCIe").flops < known_peaks("NVIDIA H100 80GB HBM3").flops
    assert known_peaks("A card of tomorrow") is None


def test_sweep_covers_its_axes():
    rows = sweep.workloads()
    assert len({w.name for w in rows}) == len(rows)
    assert {sweep.axis_of(w.group) for w in rows} == set(sweep.AXES)
    for axis, values in zip(sweep.AXES, (sweep.BATCHES, sweep.QUERIES, sweep.CONTEXTS), strict=True):
        for curve in {w.group for w in rows if sweep.axis_of(w.group) == axis}:
            assert [w.x for w in rows if w.group == curve] == list(values)
    assert (min(sweep.CONTEXTS), max(sweep.CONTEXTS)) == (512, 128 * 1024)


def test_cliff():
    assert sweep.is_cliff(10, 13.1, 5, 5)
    assert not sweep.is_cliff(10, 12.9, 5, 5)
    # Twice the work may take 2.6 times as long; less work still may take 1.3 times.
    assert not sweep.is_cliff(10, 25, 5, 10)
    assert sweep.is_cliff(10, 27, 5, 10)
    assert not sweep.is_cliff(10, 12, 5, 4)


FORMATS = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n2023-11-16 18:17:04,5,0\n"
    "2023-11-16 18:17:05,110,27\n",
    "sarathi.csv": "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n4808,10,4818,0.1\n110,27,137,0.2\n",
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 4808, "output_length": 10, "hash_ids": [0]}\n\n'
    '{"timestamp": 3, "input_length": 110, "output_length": 27, "hash_ids": []}\n',
}


@pytest.mark.parametrize("name", FORMATS)
def test_traces_are_read_by_their_columns(tmp_path, name):
    (tmp_path / name).write_text(FORMATS[name])
    assert traces.read(tmp_path / name) == [Request(4808, 10), Request(110, 27)]
    assert traces.read(tmp_path / name, limit=1) == [Request(4808, 10)]


def test_trace_with_unknown_columns(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="needs a column of input_length"):
        traces.read(tmp_path / "t.csv")


def drawn_requests(seed, count=60):
    prompts, outputs = workloads.drawn(seed, count, 1, 700), workloads.drawn(seed + 1, count, 1, 40)
    return [Request(p, o) for p, o in zip(prompts, outputs, strict=True)]


@pytest.mark.parametrize(("budget", "max_seqs", "capacity"), [(64, 8, 4000), (256, 256, 1 << 20), (2048, 16, 1500)])
def test_replay_computes_every_token_once(budget, max_seqs, capacity):
    requests = drawn_requests(3)
    steps = traces.replay(requests, token_budget=budget, max_seqs=max_seqs, kv_capacity=capacity)
    assert all(steps)
    assert sum(q for step in steps for q, _ in step) == sum(r.prompt + r.output - 1 for r in requests)
    for step in steps:
        assert sum(q for q, _ in step) <= budget
        assert len(step) <= max_seqs
        assert sum(kv for _, kv in step) <= capacity
    # Each sequence's positions: a (q_len, kv_len) computes the positions [kv_len - q_len, kv_len).
    computed = sorted(position for step in steps for q, kv in step for position in range(kv - q, kv))
    assert computed == sorted(position for r in requests for position in range(r.prompt + r.output - 1))


def test_replay_by_hand():
    # Budget 4: the first prompt of 6 takes two steps, the second starts in what is left; decodes go first.
    steps = traces.replay([Request(6, 3), Request(3, 1)], token_budget=4, max_seqs=2)
    assert steps == [((4, 4),), ((2, 6), (2, 2)), ((1, 7), (1, 3)), ((1, 8),)]


def test_replay_leaves_out_what_never_fits():
    assert traces.replay([Request(100, 5), Request(3, 2)], token_budget=256, kv_capacity=50) == [((3, 3),), ((1, 4),)]
    with pytest.raises(ValueError, match="must be at least"):
        traces.replay([], token_budget=8, max_seqs=9)


def test_representative_steps(tmp_path):
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"input_length": r.prompt, "output_length": r.output}) + "\n" for r in drawn_requests(5))
    )
    options = dict(count=5, num_requests=50, token_budget=128)
    steps = traces.workloads(tmp_path / "t.jsonl", PEAKS, **options)
    assert steps == traces.workloads(tmp_path / "t.jsonl", PEAKS, **options)
    assert len({w.name for w in steps}) == 5
    floors = [cost(w).floor_us(PEAKS) for w in steps]
    assert floors == sorted(floors)
    batches = traces.replay(traces.read(tmp_path / "t.jsonl", 50), token_budget=128, max_seqs=128)
    every = [cost(Workload("s", "g", lengths)).floor_us(PEAKS) for lengths in batches]
    # Steps of equal weight by time: their harmonic mean is the mean step.
    assert 5 / sum(1 / f for f in floors) == pytest.approx(sum(every) / len(every), rel=0.1)
