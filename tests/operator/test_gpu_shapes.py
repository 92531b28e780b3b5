"""Real shapes on a GPU: models' heads and dims, long K/V, prefill chunks, every dtype."""

from dataclasses import fields

import pytest
import torch
from operator_backends import TRITON_GPU, plan_for

from uniattn.launch.cache import num_compilations
from uniattn.schedule.tiles import Tiles

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
MIXED = [(1, 3000), (1, 17), (300, 1500), (0, 8), (4, 900), (129, 129)]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setenv("UNIATTN_BACKEND", "triton")
    return TRITON_GPU


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"),
    [(32, 8, 128), (8, 1, 64), (14, 2, 64), (28, 4, 128), (16, 16, 80), (12, 2, 256), (48, 1, 128), (40, 8, 96), (24, 8, 160)],
)
def test_models_on_a_mixed_batch(gpu, num_q_heads, num_kv_heads, head_dim, dtype):
    how = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    gpu.check(gpu.batch(MIXED, dtype=dtype, **how))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "v_head_dim", "layout"), [(192, 128, "split"), (512, 512, "split"), (576, 512, "mla")])
def test_wide_heads(gpu, head_dim, v_head_dim, layout, dtype):
    how = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": head_dim, "v_head_dim": v_head_dim}
    gpu.check(gpu.batch(MIXED, layout=layout, page_size=64, dtype=dtype, **how))


@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_contiguous_wide_heads(gpu, head_dim):
    """Contiguous loops keep more K/V in shared memory than paged ones: 512 dims must take fewer stages there."""
    gpu.check(gpu.batch(MIXED, num_q_heads=16, num_kv_heads=2, head_dim=head_dim, page_size=None, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"window": (127, 0), "sinks": True},
        {"window": (1023, 0), "softcap": 50.0},
        {"causal": False},
        {"window": (200, 100), "causal": [True, False] * 3},
        {"alibi": True},
    ],
    ids=str,
)
def test_options(gpu, options, dtype):
    gpu.check(gpu.batch(MIXED, num_q_heads=8, num_kv_heads=2, head_dim=128, dtype=dtype, **options))


@pytest.mark.parametrize("page_size", [1, 16, 64, 272, 544, 1056])
@pytest.mark.parametrize("layout", ["packed", "interleaved", "hnd"])
def test_pages_and_layouts(gpu, page_size, layout):
    batch = gpu.batch(
        MIXED, num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=page_size, layout=layout, dtype=torch.bfloat16
    )
    gpu.check(batch)


@pytest.mark.parametrize("lengths", [[(1, 8192)] * 16, [(1, 100_000), (1, 5)], [(8, 200_000)], [(4, 7400)] * 3], ids=str)
def test_long_decodes(gpu, lengths):
    how = {"num_q_heads": 12, "num_kv_heads": 2, "head_dim": 256, "page_size": 16}
    batch = gpu.batch(lengths, dtype=torch.bfloat16, **how)
    gpu.check(batch)
    gpu.check(batch, plan=plan_for(batch, 7))


def test_long_prefill(gpu):
    gpu.check(gpu.batch([(4096, 6000)], num_q_heads=4, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16))


def test_zero_lengths_at_head_dim_256(gpu):
    """cu_seqlens_q [0, 0, 1208, 2048, 2048]."""
    lengths = [(0, 900), (1208, 1208), (840, 2000), (0, 0)]
    batch = gpu.batch(lengths, num_q_heads=4, num_kv_heads=2, head_dim=256, dtype=torch.float16)
    assert batch.cu_seqlens_q.tolist() == [0, 0, 1208, 2048, 2048]
    gpu.check(batch)


# One part or two of K's dims, whole or padded; V's padded dim less than, equal to and more than K's first part.
LARGE_TILE_DIMS = [
    (8, 8), (16, 16), (24, 16), (32, 16), (40, 16), (40, 40), (40, 64), (48, 48), (64, 16), (64, 24), (64, 64), (72, 72), (80, 48),
    (96, 96), (104, 104), (128, 64), (128, 128), (160, 160), (192, 128), (256, 64), (256, 256),
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "v_head_dim"), LARGE_TILE_DIMS)
def test_head_dims_on_large_tiles(gpu, head_dim, v_head_dim):
    """Tiles of 64 and of 128 rows: their products are another instruction than those of 16 rows."""
    how = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": head_dim, "v_head_dim": v_head_dim, "page_size": 15}
    for lengths, block_m, dtype in (([(8, 64), (7, 200)], 64, torch.bfloat16), ([(60, 300), (50, 50)], 128, torch.float16)):
        batch = gpu.batch(lengths, dtype=dtype, window=(150, 0), **how)
        assert plan_for(batch).spec.block_m == block_m
        gpu.check(batch)
        gpu.check(gpu.batch(lengths, dtype=dtype, **how))


def test_contiguous_keys_and_values(gpu):
    gpu.check(
        gpu.batch(MIXED, num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=None, lengths_as="both", dtype=torch.float16)
    )


def test_serving_compiles_nothing_new(gpu):
    """Batch sizes, lengths, windows, table widths and their alignments change from step to step; binaries do not."""
    how = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    first = gpu.batch([(1, 40), (1, 20)], window=(30, 0), **how)
    plan = plan_for(first, 1)
    tiles = {field.name: getattr(plan.spec, field.name) for field in fields(Tiles) if hasattr(plan.spec, field.name)}
    gpu.check(first, plan=plan)
    before = num_compilations()
    for num_seqs in (1, 2, 3, 16, 17):
        for kv_len, window, columns in ((1, 1, 0), (16, 15, 1), (200, 16, 3), (256, 17, 16)):
            batch = gpu.batch([(1, kv_len)] * num_seqs, window=(window, 0), num_spare_columns=columns, **how)
            for num_splits in (1, 2, 16):
                gpu.check(batch, plan=plan_for(batch, num_splits, **tiles))
    # Splits write fp32 partials: one binary more.
    assert num_compilations() <= before + 1
