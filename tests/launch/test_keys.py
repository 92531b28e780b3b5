"""What gets another binary and what does not. Keys are host data, so no GPU is needed."""

import inspect
import random
from dataclasses import replace

import pytest
import torch
from launch_tools import H200, KERNELS, call, random_batch, record

import uniattn
from uniattn.launch import attend, backend, cache, choice, hopper, merge, plan, write_kv
from uniattn.problem.layout import UNBOUNDED
from uniattn.schedule import hopper as hopper_tiles
from uniattn.schedule.plan import make_spec
from uniattn.schedule.tiles import Tiles
from uniattn.testing import make_batch
from uniattn.tuning.problem import problem
from uniattn.tuning.table import Entry, Usable

LENGTHS = [(1, 40), (3, 17), (20, 33)]


def batch(lengths=LENGTHS, **how):
    return make_batch(lengths, **{"num_q_heads": 4, "num_kv_heads": 2, "dtype": torch.bfloat16, **how})


@pytest.fixture
def recorded(monkeypatch):
    return record(monkeypatch)


@pytest.fixture
def key_of(recorded):
    """The attention kernel's key for a batch and changes to its arguments."""

    def key(b, **changes):
        # Whether the plan may cut depends on the sizes alone, and is a class of its own.
        call(b, **changes)
        return attend.Key(*recorded.attend.keys_seen[-1])._replace(has_partials=True)

    return key


NUMBERS = {
    "scale": dict(softmax_scale=0.3),
    "bound of the longest query": dict(max_seqlen_q=21),
}


@pytest.mark.parametrize("changes", NUMBERS.values(), ids=NUMBERS.keys())
def test_numbers_share_a_binary(key_of, changes):
    assert key_of(batch(), **changes) == key_of(batch())


def test_a_windows_size_and_a_softcaps_share_a_binary(key_of):
    assert key_of(batch(), window=(5, 0)) == key_of(batch(), window=(16, 3)) == key_of(batch(), window=(1, None))
    assert key_of(batch(), softcap=30.0) == key_of(batch(), softcap=1.0)


@pytest.mark.parametrize("num_seqs", [1, 2, 15, 16, 17, 32])
def test_counts_and_lengths_share_a_binary(key_of, num_seqs):
    decodes = [(1, 40), (1, 7), (1, 300)]
    assert key_of(batch([(1, 16 * i + 1) for i in range(num_seqs)])) == key_of(batch(decodes))


def test_strides_of_one_class_share_a_binary(key_of):
    keys = {key_of(batch(layout=layout)) for layout in ("split", "interleaved", "packed", "hnd", "flat")}
    assert len(keys) == 1


FEATURES = {
    "a window": dict(window=(5, 0)),
    "a softcap": dict(softcap=30.0),
    "no causality": dict(causal=False),
    "causality a sequence": dict(causal=torch.tensor([True, False, True])),
    "sinks": dict(sinks=torch.zeros(4)),
    "bf16 sinks": dict(sinks=torch.zeros(4, dtype=torch.bfloat16)),
    "alibi": dict(alibi_slopes=torch.zeros(4)),
    "an LSE": dict(return_lse=True),
}


def test_each_feature_gets_its_own_binary(key_of):
    keys = [key_of(batch()), *(key_of(batch(), **changes) for changes in FEATURES.values())]
    assert len(set(keys)) == len(keys)


SHAPES = {
    "dtype": dict(dtype=torch.float16),
    "fp32": dict(dtype=torch.float32),
    "head dim": dict(head_dim=96),
    "V's head dim": dict(v_head_dim=32),
    "group": dict(num_kv_heads=1),
    "page size": dict(page_size=32),
    "no pages": dict(page_size=None),
    "odd strides": dict(head_dim=60),
}


def test_each_shape_gets_its_own_binary(key_of):
    keys = [key_of(batch()), *(key_of(batch(**how)) for how in SHAPES.values())]
    assert len(set(keys)) == len(keys)


def test_the_plans_builder_has_a_key_of_its_own(recorded):
    changes = [
        {}, dict(causal=False), dict(causal=torch.tensor([True, False, True])),
        dict(seqlens_k=None, cu_seqlens_k=torch.tensor([0, 40, 57, 90], dtype=torch.int32)),
    ]  # fmt: skip
    for change in changes:
        call(batch(), **change)
    assert len(set(recorded.plan.keys_seen)) == len(changes)
    call(batch([(1, 3), (2, 300), (7, 8), (1, 1)]), window=(4, 0), softcap=3.0, return_lse=True)
    assert recorded.plan.keys_seen[-1] == recorded.plan.keys_seen[0]


def test_batches_that_may_be_cut_get_another_binary(recorded):
    few, many = batch([(1, 1)]), batch([(1, 1)] * 1100)
    call(few)
    call(many)
    a, b = (attend.Key(*key) for key in recorded.attend.keys_seen)
    assert a.has_partials
    assert not b.has_partials
    assert a == b._replace(has_partials=True)


def test_addresses_off_16_bytes_get_another_binary(key_of):
    b = batch()
    q = torch.empty(b.q.numel() + 4, dtype=b.dtype)[4:].view(b.q.shape)
    assert key_of(b).aligned
    assert not key_of(b, q=q).aligned
    assert key_of(b, q=q)._replace(aligned=True) == key_of(b)


def test_small_tensors_may_lie_anywhere(key_of):
    b = batch()
    shifted = torch.empty(5, dtype=torch.int32)[1:].copy_(b.cu_seqlens_q)
    assert key_of(b, cu_seqlens_q=shifted) == key_of(b)


def test_a_lone_tokens_or_heads_stride_does_not_count(key_of):
    b = batch([(1, 40)], num_kv_heads=1)
    q = torch.empty(4 * 64 + 4, dtype=b.dtype).as_strided((1, 4, 64), (1, 64, 1))
    k = b.k_cache.as_strided(b.k_cache.shape, (*b.k_cache.stride()[:2], 3, 1))
    assert key_of(b, q=q, k_cache=k, v_cache=k) == key_of(b)


@pytest.mark.parametrize("stride", [2**31, 2**40 + 1])
def test_a_stride_beyond_32_bits_gets_64(stride):
    strides = [16] * 10
    assert attend.classify(tuple(strides), 0, 2) == (True, False)
    strides[4] = stride
    aligned, wide = attend.classify(tuple(strides), 0, 2)
    assert wide
    assert aligned == (stride % 8 == 0)


def test_alignment_is_counted_in_bytes():
    strides = (8,) * 10
    assert attend.classify(strides, 0, 2)[0]
    assert attend.classify(strides, 32, 4)[0]
    assert not attend.classify(strides, 8, 2)[0]
    assert not attend.classify((4,) * 10, 0, 2)[0]
    assert attend.classify((4,) * 10, 0, 4)[0]


OTHER = {
    torch.bfloat16: torch.float16, torch.float32: torch.float16, torch.int32: torch.int64, torch.bool: torch.int32,
    torch.int64: torch.int32, True: False, False: True, None: torch.float32,
}  # fmt: skip


def another(value):
    if isinstance(value, tuple):
        return (value[0] * 2, *value[1:])
    return OTHER[value] if not isinstance(value, int) or isinstance(value, bool) else value + 16


SOURCES = {
    "attend": (
        attend.source,
        attend.Key(
            0, torch.bfloat16, torch.int32, None, None, None, None, False, True, True, False, True, True, False, False, 128, 128, 4,
            16, (16, 32, 5, 4, 0, 0, 0, False),
        ),
    ),
    "hopper": (
        hopper.source,
        hopper.Key(0, torch.bfloat16, torch.int32, None, None, False, True, True, False, False, 128, 128, 4, 16, 128, 2),
    ),
    "plan": (plan.source, plan.Key(0, torch.int32, torch.int32, None, None, True, 4, True, 16, 32, 0, 0, True, False, 0, True, 256)),
    "pieces": (merge.pieces_source, merge.PiecesKey(0, torch.bfloat16, torch.int32, True, True, 4, 128, 64, 8)),
    "merge": (merge.source, merge.Key(0, torch.float32, torch.bfloat16, True, True, 128)),
    "write_kv": (write_kv.source, write_kv.Key(0, torch.bfloat16, torch.int64, True, 128, 128, 16, 1024)),
}  # fmt: skip


@pytest.mark.parametrize(("source", "key"), SOURCES.values(), ids=SOURCES.keys())
def test_each_field_of_a_key_reaches_the_source(source, key):
    """No field is idle, so none compiles twice for nothing; and a source has nothing but its key to come from."""
    assert source(key) == source(tuple(key))
    for field, value in key._asdict().items():
        assert source(key._replace(**{field: another(value)})) != source(key), field


@pytest.mark.parametrize("name", KERNELS)
def test_a_source_names_the_kernels_parameters_in_their_order(name):
    source, key = SOURCES[name]
    module, attribute = KERNELS[name]
    kernel = getattr(module, attribute).fn
    assert list(source(key).signature()) == list(inspect.signature(kernel.fn).parameters)


@pytest.mark.parametrize("name", ["attend", "plan", "pieces"])
def test_a_launch_passes_what_its_source_names(recorded, name):
    call(batch(), return_lse=True)
    recorder = getattr(recorded, name)
    key, (_, pointers, numbers) = recorder.keys_seen[-1], recorder.launches[-1]
    source = SOURCES[name][0](key)
    assert [None if x is None else x.dtype for x in pointers] == list(source.pointers.values())
    assert len(numbers) == len(source.flat_types()) - sum(x is not None for x in pointers)


MODELS = {
    "GQA": (dict(num_q_heads=32, num_kv_heads=8, head_dim=128), {}),
    "window and sinks": (dict(num_q_heads=7, num_kv_heads=1, head_dim=64), dict(window=(100, 0), sinks=torch.zeros(7))),
    "softcap and LSE": (dict(num_q_heads=8, num_kv_heads=8, head_dim=80), dict(softcap=20.0, return_lse=True)),
    "MLA": (dict(num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512), {}),
    "contiguous, odd strides": (dict(num_q_heads=4, num_kv_heads=4, head_dim=100, page_size=None), dict(causal=False)),
    "fp16": (dict(num_q_heads=4, num_kv_heads=2, head_dim=192, v_head_dim=128, dtype=torch.float16), dict(causal=False)),
    "fp32": (dict(num_q_heads=4, num_kv_heads=2, head_dim=256, dtype=torch.float32), dict(window=(None, 7), causal=False)),
}


@pytest.fixture
def answers(monkeypatch):
    """The tables' answers by level and key: none but those that the test puts in."""
    made = {"exact": {}, "bucket": {}}
    monkeypatch.setattr("uniattn.tuning.choose._read", lambda folder, target: (Usable("a table", made),))
    make_spec.cache_clear()
    yield made
    make_spec.cache_clear()


@pytest.fixture
def h200(monkeypatch, answers):
    """Launches go to a chip like an H200, without tables; returns what says whether its Hopper kernel may run."""
    monkeypatch.setattr(backend, "choose", lambda x: "triton")
    monkeypatch.setattr("uniattn.launch.warmup.target_of", lambda device: H200)
    return lambda may_use_hopper: monkeypatch.setattr(choice, "may_use_hopper", lambda target: may_use_hopper)


@pytest.mark.parametrize("hopper_chip", [False, True], ids=["portable", "hopper"])
@pytest.mark.parametrize(("shape", "options"), MODELS.values(), ids=MODELS.keys())
def test_after_warm_up_no_batch_needs_another_binary(h200, recorded, shape, options, hopper_chip):
    h200(hopper_chip)
    warm_then_call_1000_batches(recorded, shape, options)
    served = hopper_chip and "page_size" not in shape and shape["head_dim"] <= 256 and shape.get("dtype") != torch.float32
    assert bool(recorded.hopper.launches) == served
    # That kernel merges what it cuts.
    assert bool(recorded.pieces.launches) != served, "no batch was cut"


@pytest.mark.parametrize("how", [{"page_size": 20}, {"page_size": 8}, {"layout": "gapped"}, {"page_size": None}, {"alibi": True}], ids=str)
def test_a_plan_for_hopper_serves_calls_that_its_kernel_does_not(recorded, how):
    """The portable kernel takes them, with tiles of the plan's rows."""
    served, other = (batch(head_dim=64, **h) for h in ({}, how))
    num_tokens, int32 = served.q.shape[0], torch.int32
    spec = make_spec(num_tokens, len(LENGTHS), 4, 2, 64, 64, 2, 1, UNBOUNDED, UNBOUNDED, num_tokens, 16, H200, ("hopper",))
    assert spec.is_hopper
    buffer = torch.zeros(spec.buffer_ints, dtype=int32)
    call(served, spec, buffer)
    assert recorded.hopper.launches
    assert not recorded.attend.launches
    call(other, spec, buffer)
    assert len(recorded.hopper.launches) == 1
    assert attend.Key(*recorded.attend.keys_seen[-1]).tiles[0] == spec.block_m


def test_warm_up_knows_what_tables_answer(h200, answers, recorded):
    """A table that answers decodes with tiles that nothing else gives, and prefers either kernel here and there."""
    shape = dict(num_q_heads=32, num_kv_heads=8, head_dim=128)
    portable = [Tiles(16, n, 3, 4, bulk=False) for n in (64, 128)]
    other = replace(hopper_tiles.choose(128, 128), num_stages=3, small_stages=3)
    decode = problem(1, 1, 1, 32, 8, 128, 128, 2, 16, False).bucket
    for i, pairs in enumerate((16, 64, 256, 1024, 4096)):
        key = decode._replace(pairs=pairs)
        both = [Entry("bucket", key, t, 1.0, 2.0) for t in (portable[i % 2], other)]
        answers["bucket"][key] = both if i % 3 else both[::-1]
    h200(True)
    warm_then_call_1000_batches(recorded, shape, {})
    assert {attend.Key(*key).tiles for key in recorded.attend.keys_seen} == {t.compiled_in for t in portable}
    assert {hopper.Key(*key).kv_stages for key in recorded.hopper.keys_seen} == {2, 3}
    assert recorded.attend.launches
    assert recorded.hopper.launches


def warm_then_call_1000_batches(recorded, shape, options):
    """Warm up, then launch random batches, and check that nothing else was compiled."""
    sinks = options["sinks"].dtype if "sinks" in options else None
    uniattn.warmup(device="cpu", seqlens_k="page_size" not in shape, **shape, **{**options, "sinks": sinks})
    warm = {name: set(getattr(recorded, name).keys_seen) for name in KERNELS}
    rng = random.Random(0)
    for _ in range(1000):
        b = random_batch(rng, **shape, **options)
        call(b)
        if b.page_table is not None:
            num_tokens = rng.choice([1, 2, 16, rng.randint(1, 5000)])
            k, v = (torch.empty(num_tokens, *x.shape[2:], dtype=x.dtype, device="meta") for x in (b.k_cache, b.v_cache))
            slots = torch.empty(num_tokens, dtype=rng.choice([torch.int32, torch.int64]), device="meta")
            write_kv.write_kv(k, v, b.k_cache, b.v_cache, slots)
    for name, keys in warm.items():
        assert set(getattr(recorded, name).keys_seen) <= keys, name


def test_warm_up_counts_and_needs_to_be_done_once(monkeypatch):
    monkeypatch.setattr(backend, "choose", lambda x: "triton")
    monkeypatch.setattr(cache, "interpreted", lambda: True)
    before = cache.num_compilations()
    first = uniattn.warmup(34, 17, 48, device="cpu")
    assert first == cache.num_compilations() - before > 0
    assert uniattn.warmup(34, 17, 48, device="cpu") == 0


def test_warm_up_refuses_heads_that_do_not_divide():
    with pytest.raises(uniattn.ArgumentError, match="num_q_heads"):
        uniattn.warmup(30, 8, 128)


def test_on_a_cpu_there_is_nothing_to_warm_up(monkeypatch):
    monkeypatch.delenv("UNIATTN_BACKEND", raising=False)
    assert uniattn.warmup(32, 8, 128, device="cpu") == 0
