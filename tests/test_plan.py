"""The plan: the device's list of items against its twin in plain Python, and what an item list must hold."""

import random
from dataclasses import replace

import pytest
import torch

import uniattn
from uniattn import planning
from uniattn.launch.target import target_of
from uniattn.problem.layout import UNBOUNDED
from uniattn.schedule.build import build, places
from uniattn.schedule.hopper import L2_BYTES
from uniattn.schedule.plan import RECORD_INTS, PlanSpec, make_spec
from uniattn.schedule.tiles import Tiles

GROUP, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16


def planned(lens, device, *, padding=0, causal=True, window=None, num_splits=None, tiles=None, hopper=False):
    """`(items, plan)` of a batch of `(q_len, kv_len)`, the items as the device lists them, without costs."""
    ints = {"dtype": torch.int32, "device": device}
    cu_seqlens_q = torch.tensor([0, *torch.tensor([q for q, _ in lens]).cumsum(0).tolist()], **ints)
    num_tokens = int(cu_seqlens_q[-1]) + padding
    q = torch.zeros(num_tokens, GROUP * NUM_KV_HEADS, HEAD_DIM, device=device)
    cache = torch.zeros(1, 16, NUM_KV_HEADS, HEAD_DIM, device=device)
    seqlens_k = torch.tensor([kv for _, kv in lens], **ints)
    page_table = torch.zeros(len(lens), max(1, -(-max(kv for _, kv in lens) // 16)), **ints)
    plan = uniattn.plan(
        q, cache, cache, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k, page_table=page_table, num_splits=num_splits, tiles=tiles,
        causal=torch.tensor(causal, device=device) if isinstance(causal, list) else causal, window=window,
    )  # fmt: skip
    if hopper:
        sizes = (num_tokens, len(lens), GROUP * NUM_KV_HEADS, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, 4)
        spec = make_spec(*sizes, 1, UNBOUNDED, UNBOUNDED, num_tokens, 16, target_of(torch.device("cpu")), ("hopper",))
        plan = uniattn.Plan(spec, torch.empty(spec.buffer_ints, **ints))
        planning.build(plan, cache, cu_seqlens_q, seqlens_k, page_table, None, True)
    assert not plan.buffer[plan.spec.first_counter :].any()
    records = plan.records()
    num_large = int(plan.buffer[0])
    q_begins = [*cu_seqlens_q.tolist(), num_tokens]
    sequences = [*lens, (padding, 0)]
    for r in records:
        assert (r[2], r[3], r[4]) == (q_begins[r[0]], *sequences[r[0]])
    cut = [r for r in records if r[5] >> 16 > 1 and r[7] == 0]
    slots = sorted(r[6] + (r[5] & 0xFFFF) for r in cut)
    assert slots == list(range(len(cut)))
    assert len(cut) <= plan.spec.num_partials
    assert sum(not is_small(r, plan.spec) for r in records) == num_large * NUM_KV_HEADS
    return [(r[0], r[1], r[5] & 0xFFFF, r[5] >> 16, is_small(r, plan.spec), r[7]) for r in records], plan


def is_small(record, spec):
    return record[3] * GROUP <= spec.small_m


def twin(lens, spec: PlanSpec, *, padding=0, causal=True, window=None):
    left, right = (UNBOUNDED if w is None else w for w in window or (None, None))
    items = build(
        lens, group=GROUP, num_kv_heads=NUM_KV_HEADS, num_slots=spec.num_slots, item_overhead=spec.item_overhead,
        block_m=spec.block_m, block_n=spec.block_n, small_m=spec.small_m, small_n=spec.small_n, may_cut=spec.num_partials > 0,
        num_splits=spec.num_splits, causal=causal, window=(left, right), padding_tokens=padding,
        persistent=bool(spec.is_hopper),
    )  # fmt: skip
    order = places(
        items, NUM_KV_HEADS, heads_first=bool(spec.heads_first), interleave=bool(spec.is_hopper), l2_tokens=L2_BYTES // (2 * 4 * HEAD_DIM)
    )
    return [(i.seq, i.first_row, i.split, i.num_splits, i.small, head) for i, head in order]


@pytest.fixture(
    params=[
        pytest.param("cpu", id="triton-interpreter", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs it")),
        pytest.param("cuda", id="triton-gpu", marks=pytest.mark.gpu),
    ]
)
def device(request, monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "triton")
    return request.param


TWO_SIZES = Tiles(32, 32, 1, 4, small_m=16, small_n=16, small_stages=1, programs_per_sm=2, item_overhead=32)
BATCHES = {
    "decode": ([(1, n) for n in (1, 700, 64, 5000, 33)], {}),
    "mixed": ([(1, 900), (70, 70), (3, 40), (0, 12), (1, 0), (9, 4)], {"padding": 3}),
    "two tile sizes": ([(1, 900), (70, 70), (3, 40), (33, 4000), (1, 0), (9, 4)], {"padding": 40, "tiles": TWO_SIZES}),
    "window": ([(40, 400), (1, 900), (5, 5)], {"window": (20, None), "tiles": TWO_SIZES}),
    "per sequence": ([(40, 400), (1, 900), (5, 5)], {"causal": [True, False, False], "window": (50, 3)}),
    "forced": ([(1, 900), (40, 70), (3, 40), (1, 1)], {"num_splits": 3}),
    "one long": ([(1, 100)] * 7 + [(1, 60000)], {}),
    "interleaved": ([(1, 900 + 77 * i) for i in range(20)] + [(300, 900), (40, 40), (0, 3)], {"hopper": True, "padding": 9}),
    "interleaved, few heads at a time": ([(200, 300_000), (1, 7), (150, 150)], {"hopper": True}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_device_lists_what_its_twin_lists(name, device):
    lens, options = BATCHES[name]
    items, plan = planned(lens, device, **options)
    assert items == twin(lens, plan.spec, **{k: v for k, v in options.items() if k not in ("num_splits", "tiles", "hopper")})


@pytest.mark.parametrize("name", BATCHES)
def test_the_reference_path_fills_the_same_buffer(name, device, monkeypatch):
    lens, options = BATCHES[name]
    _, plan = planned(lens, device, **options)
    monkeypatch.setenv("UNIATTN_BACKEND", "reference")
    _, filled = planned(lens, device, **options)
    assert filled.records() == plan.records()
    tiles = [p.buffer[p.spec.first_tile : p.spec.first_counter].view(-1, 4).tolist() for p in (filled, plan)]
    assert [tile for tile in tiles[0] if tile[2]] == [tile for tile in tiles[1] if tile[2]]
    assert [tile[2] for tile in tiles[0]] == [tile[2] for tile in tiles[1]]


def test_random_batches_match_the_twin(device):
    rng = random.Random(0)
    for _ in range(12 if device == "cpu" else 100):
        lens = [(rng.choice((0, 1, 1, 2, 5, rng.randrange(80))), rng.randrange(3000)) for _ in range(rng.randrange(1, 40))]
        if not sum(q for q, _ in lens):
            continue
        padding = rng.choice((0, 7))
        tiles = rng.choice((None, TWO_SIZES))
        items, plan = planned(lens, device, padding=padding, tiles=tiles)
        assert items == twin(lens, plan.spec, padding=padding)


def test_more_tiles_than_are_held_at_once(device):
    lens = [(1, 5 + i % 7) for i in range(1100)]
    tiles = Tiles(16, 16, 1, 4, item_overhead=32)
    items, plan = planned(lens, device, tiles=tiles)
    assert plan.spec.num_partials == 0
    assert items == twin(lens, plan.spec)


def test_every_row_is_planned_once_and_pieces_are_complete():
    rng = random.Random(1)
    for _ in range(50):
        lens = [(rng.randrange(60), rng.randrange(5000)) for _ in range(rng.randrange(1, 20))]
        items = build(lens, group=3, num_kv_heads=2, num_slots=rng.choice((4, 132)), block_m=64, block_n=64, small_m=16, small_n=32)
        for seq, (q_len, _) in enumerate(lens):
            mine = [i for i in items if i.seq == seq]
            assert sorted({i.first_row for i in mine}) == list(range(0, q_len * 3, 64))
            for first_row in {i.first_row for i in mine}:
                tile = [i for i in mine if i.first_row == first_row]
                assert sorted(i.split for i in tile) == list(range(tile[0].num_splits))


def test_one_long_sequence_among_short_ones_is_cut_and_short_ones_are_not():
    items = build([(1, 200)] * 63 + [(1, 131072)], group=4, num_kv_heads=8, num_slots=528, block_m=16, block_n=32)
    pieces = {i.seq: i.num_splits for i in items}
    assert pieces[63] > 30
    assert {pieces[s] for s in range(63)} == {1}
    assert items[0].seq == 63


def test_items_stay_within_the_bounds_of_the_spec():
    rng = random.Random(2)
    for _ in range(200):
        num_seqs = rng.randrange(1, 80)
        lens = [(1, rng.choice((10, 500, rng.randrange(1, 200000)))) for _ in range(num_seqs)]
        heads = rng.choice((1, 2, 8))
        spec = make_spec(num_seqs, num_seqs, 4 * heads, heads, 128, 128, 2, 1, UNBOUNDED, UNBOUNDED, 1, 16, target_of(torch.device("cpu")))
        items = build(
            lens, group=4, num_kv_heads=heads, num_slots=spec.num_slots, item_overhead=spec.item_overhead, block_m=spec.block_m,
            block_n=spec.block_n, may_cut=spec.num_partials > 0,
        )  # fmt: skip
        assert len(items) <= spec.num_items
        assert sum(i.num_splits > 1 for i in items) <= spec.num_partials


def test_a_plan_is_rebuilt_in_place(device):
    _, plan = planned([(1, 40), (1, 900)], device)
    before = plan.buffer.clone()
    ints = {"dtype": torch.int32, "device": device}
    q = torch.zeros(2, GROUP * NUM_KV_HEADS, HEAD_DIM, device=device)
    cache = torch.zeros(1, 16, NUM_KV_HEADS, HEAD_DIM, device=device)
    batch = {"cu_seqlens_q": torch.tensor([0, 1, 2], **ints), "page_table": torch.zeros(2, 57, **ints)}
    again = uniattn.plan(q, cache, cache, **batch, seqlens_k=torch.tensor([900, 40], **ints), out=plan)
    assert again is plan
    assert not torch.equal(before, plan.buffer)
    fresh = uniattn.plan(q, cache, cache, **batch, seqlens_k=torch.tensor([900, 40], **ints))
    used = (1 + int(plan.buffer[0]) * NUM_KV_HEADS) * RECORD_INTS
    assert torch.equal(fresh.buffer[:2], plan.buffer[:2])
    assert torch.equal(fresh.buffer[RECORD_INTS:used], plan.buffer[RECORD_INTS:used])
    with pytest.raises(uniattn.ArgumentError, match="out: got a plan for window_left="):
        uniattn.plan(q, cache, cache, **batch, seqlens_k=torch.tensor([900, 40], **ints), window=(3, 0), out=plan)


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_a_stale_plan_is_found_where_values_are_checked(path, device, monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", path)
    monkeypatch.setattr("uniattn.problem.check_values.ENABLED", True)
    ints = {"dtype": torch.int32, "device": device}
    q = torch.zeros(2, 4, 16, device=device)
    cache = torch.zeros(4, 16, 2, 16, device=device)
    sizes = {"cu_seqlens_q": torch.tensor([0, 1, 2], **ints), "page_table": torch.tensor([[0, 1], [2, 3]], **ints)}
    plan = uniattn.plan(q, cache, cache, **sizes, seqlens_k=torch.tensor([9, 30], **ints))
    uniattn.attention(q, cache, cache, **sizes, seqlens_k=torch.tensor([9, 30], **ints), plan=plan)
    with pytest.raises(uniattn.ArgumentError, match=r"plan: got a plan of 4 records .* rebuild it each step"):
        uniattn.attention(q, cache, cache, **sizes, seqlens_k=torch.tensor([10, 30], **ints), plan=plan)
    monkeypatch.setattr("uniattn.problem.check_values.ENABLED", False)
    uniattn.check_values(q, cache, cache, **sizes, seqlens_k=torch.tensor([9, 30], **ints), plan=plan)
    with pytest.raises(uniattn.ArgumentError, match=r"plan: got a plan of 4 records .* rebuild it each step"):
        uniattn.check_values(q, cache, cache, **sizes, seqlens_k=torch.tensor([10, 30], **ints), plan=plan)
    with pytest.raises(uniattn.ArgumentError, match=r"plan: got a plan for window_left="):
        uniattn.check_values(q, cache, cache, **sizes, seqlens_k=torch.tensor([9, 30], **ints), window=(3, 0), plan=plan)


def test_a_plan_for_other_facts_is_refused(device):
    ints = {"dtype": torch.int32, "device": device}
    q = torch.zeros(2, 4, 16, device=device)
    cache = torch.zeros(4, 16, 2, 16, device=device)
    batch = {
        "cu_seqlens_q": torch.tensor([0, 1, 2], **ints),
        "seqlens_k": torch.tensor([9, 30], **ints),
        "page_table": torch.tensor([[0, 1], [2, 3]], **ints),
    }
    plan = uniattn.plan(q, cache, cache, **batch)
    uniattn.attention(q, cache, cache, **batch, plan=plan)
    for change, word in (({"causal": False}, "causal"), ({"window": (4, 0)}, "window_left")):
        with pytest.raises(uniattn.ArgumentError, match=f"plan: got a plan for {word}="):
            uniattn.attention(q, cache, cache, **batch, **change, plan=plan)


def test_a_table_wider_than_int32_lengths_is_planned(device):
    ints = {"dtype": torch.int32, "device": device}
    q, cache = torch.zeros(2, 4, 16, device=device), torch.zeros(4, 4, 2, 16, device=device)
    batch = {"cu_seqlens_q": torch.tensor([0, 2], **ints), "seqlens_k": torch.tensor([900], **ints)}
    # Only the table's shape counts, and memory that nothing touches costs nothing on a CPU.
    wide = torch.empty(1, 1 << 29, **ints)
    plans = [uniattn.plan(q, cache, cache, **batch, page_table=table) for table in (wide, wide[:, :300])]
    assert plans[0].records() == plans[1].records() != []


def small_batch(device):
    ints = {"dtype": torch.int32, "device": device}
    q, cache = torch.zeros(4, 4, 16, device=device), torch.zeros(4, 16, 2, 16, device=device)
    sizes = {"cu_seqlens_q": torch.tensor([0, 1, 4], **ints), "page_table": torch.tensor([[0, 1], [2, 3]], **ints)}
    return {"q": q, "k_cache": cache, "v_cache": cache, **sizes, "seqlens_k": torch.tensor([9, 30], **ints)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.to("meta"), "plan: got a plan on meta; .* make one with uniattn.plan"),
        (lambda b: b.long(), "plan: got a plan with a buffer of int64 tensor .* contiguous int32 tensor of at least"),
        (lambda b: b[:-1], "plan: got a plan with a buffer of int32 tensor .* at least"),
        (lambda b: b.repeat_interleave(2)[::2], "plan: got a plan with a buffer of int32 tensor .* contiguous"),
    ],
)
def test_a_plan_with_a_foreign_buffer_is_refused(change, message, device):
    batch = small_batch(device)
    plan = uniattn.plan(**batch)
    broken = uniattn.Plan(plan.spec, change(plan.buffer))
    with pytest.raises(uniattn.ArgumentError, match=message):
        uniattn.attention(**batch, plan=broken)
    with pytest.raises(uniattn.ArgumentError, match=message.split(";")[0].split(" .*")[0].replace("plan:", "out:")):
        uniattn.plan(**batch, out=broken)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_seqlen_q": 1}, "max_rows"), ({"num_splits": 2}, "num_splits"), ({"tiles": TWO_SIZES}, "block_m"),
        ({"causal": False}, "causal"), ({"window": (3, 0)}, "window_left"),
    ],
)  # fmt: skip
def test_what_keeps_a_plan_from_being_rebuilt_is_named(change, field, device):
    batch = small_batch(device)
    with pytest.raises(uniattn.ArgumentError, match=f"out: got a plan for {field}=.* bounds, num_splits and tiles"):
        uniattn.plan(**batch, **change, out=uniattn.plan(**batch))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("block_m", 24), ("block_m", 8), ("block_m", 16.0), ("block_n", 8), ("block_n", 48), ("num_stages", 0), ("num_warps", 3),
        ("num_warps", 64), ("small_m", 8), ("small_m", 32), ("small_m", 24), ("small_n", 8), ("small_n", 0), ("small_stages", 0),
        ("programs_per_sm", 0), ("item_overhead", -1),
    ],
)  # fmt: skip
def test_tiles_that_do_not_compile_are_refused(field, wrong, device):
    batch = small_batch(device)
    uniattn.plan(**batch, tiles=TWO_SIZES)
    with pytest.raises(uniattn.ArgumentError, match=f"tiles: got {field}={wrong}; {field} must be"):
        uniattn.plan(**batch, tiles=replace(TWO_SIZES, **{field: wrong}))


def test_what_is_no_tiles_is_refused(device):
    with pytest.raises(uniattn.ArgumentError, match=r"tiles: got tuple .*must be a uniattn\.schedule\.tiles\.Tiles"):
        uniattn.plan(**small_batch(device), tiles=(16, 16))


@pytest.mark.parametrize("wrong", [0, -1, 129, True, 2.0])
def test_num_splits_out_of_range_are_refused(wrong, device):
    uniattn.plan(**small_batch(device), num_splits=128)
    with pytest.raises(uniattn.ArgumentError, match=r"num_splits: got .*at least 1 and at most 128"):
        uniattn.plan(**small_batch(device), num_splits=wrong)


def test_forced_splits_of_more_tiles_than_are_cut_are_refused(device):
    lens, tiles = [(1, 40)] * 1100, Tiles(16, 16, 1, 4)
    assert planned(lens, device, num_splits=1, tiles=tiles)[1].spec.num_partials == 0
    with pytest.raises(uniattn.UnsupportedError, match=r"num_splits: got 2 with .*more than 1024 query tiles"):
        planned(lens, device, num_splits=2, tiles=tiles)
