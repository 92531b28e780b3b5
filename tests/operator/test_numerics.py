"""Values at the edge of what the dtypes hold: large and very negative scores, running maxima, fp32 without TF32."""

import pytest
import torch
from operator_backends import plan_for, tiny_tiles, two_tile_sizes

from uniattn.testing import assert_matches_oracle

# NumPy says so when the interpreter's exp2 reaches infinity, which tanh relies on.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")


def with_scores(backend, scores, left=None, dtype=torch.float32, **options):
    """One query whose raw scores are `scores` (one a key) over random values; `softmax_scale` 1."""
    how = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8, "page_size": 8, "softmax_scale": 1.0, "dtype": dtype}
    batch = backend.batch([(1, len(scores))], window=(left, -1), **how, **options)
    batch.q.zero_()
    batch.q[..., 0] = 1.0
    for position, score in enumerate(scores):
        page, slot = int(batch.page_table[0, position // 8]), position % 8
        batch.k_cache[page, slot, 0, 0] = score
    return batch


@pytest.mark.parametrize("plan", [plan_for, two_tile_sizes], ids=lambda f: f.__name__)
def test_running_max_clamped_in_storage(backend, plan):
    """Rows that see nothing in a tile's first blocks, then logits near -120: a running maximum stored as 0 gives 0 / 0."""
    batch = backend.batch([(40, 60)], num_q_heads=1, head_dim=16, window=(3, -1), softmax_scale=1.0)
    # q . k is about -120 for every pair: q is 11 along one axis, k is -11 there.
    batch.q.mul_(0.01)[..., 0] = 11.0
    seen = batch.k_cache[..., 0].isfinite()
    batch.k_cache[..., 0] = torch.where(seen, -11.0, torch.nan)
    out, lse = backend.check(batch, plan=plan(batch))
    assert out.isfinite().all()
    assert (lse < -100).all()


@pytest.mark.parametrize("offset", [-3e4, -120.0, 0.0, 120.0, 3e4])
def test_a_constant_added_to_all_scores(backend, offset):
    scores = [offset + 0.25 * (i % 7) for i in range(40)]
    batch = with_scores(backend, scores)
    out, lse = backend.check(batch, plan=tiny_tiles(batch))
    assert abs(lse.item() - offset) < 10
    assert out.isfinite().all()


@pytest.mark.parametrize("order", [1, -1])
def test_scores_that_rise_or_fall_by_thousands(backend, order):
    """The running maximum changes in every block, or never; all weight lies on one key."""
    scores = [250.0 * i for i in range(40)][::order]
    batch = with_scores(backend, scores)
    out, _ = backend.check(batch, plan=tiny_tiles(batch))
    key = len(scores) - 1 if order == 1 else 0
    torch.testing.assert_close(out[0, 0], batch.v_cache[batch.page_table[0, key // 8], key % 8, 0])


@pytest.mark.parametrize("score", [4500.0, -4500.0, 60000.0])
def test_softcap_50_of_scores_past_4400(backend, score):
    """exp(2 x) overflows there; tanh must saturate."""
    batch = with_scores(backend, [score, 0.0, score, 1.0] * 5, softcap=50.0)
    out, lse = backend.check(batch)
    assert out.isfinite().all()
    assert lse.item() < 60


@pytest.mark.parametrize("softcap", [0.01, 1.0, 50.0, 1e4, 1e6, 1e12])
def test_softcaps_of_all_sizes(backend, softcap):
    batch = backend.batch([(3, 40)], head_dim=16, softcap=softcap)
    backend.check(batch)


@pytest.mark.parametrize("plan", [tiny_tiles, two_tile_sizes], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peaked_softmax(backend, dtype, plan):
    batch = backend.batch([(9, 70), (1, 50)], head_dim=32, magnitude=20.0, dtype=dtype)
    backend.check(batch, plan=plan(batch))


def test_fp32_is_ieee_fp32(backend):
    """TF32 products, or bf16 weights, would be 100 times over the allowance."""
    batch = backend.batch([(5, 40)], head_dim=128)
    out, lse = backend.check(batch)
    rough = batch.replace(q=batch.q.bfloat16().float())
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_matches_oracle(rough, out, lse)


def test_large_values_in_fp16(backend):
    """The sum of weights times values passes 65504 before it is normalised, never after."""
    batch = backend.batch([(1, 60), (2, 30)], head_dim=16, dtype=torch.float16)
    batch.v_cache.mul_(8000.0)
    out, _ = backend.check(batch)
    assert out.isfinite().all()


def test_bf16_products_in_every_place(backend):
    """Both products, with parts of a head dim that is no power of two, bulk and edge blocks."""
    batch = backend.batch([(18, 70), (1, 40)], head_dim=48, v_head_dim=24, dtype=torch.bfloat16, softcap=3.0)
    backend.check(batch, plan=two_tile_sizes(batch))


def test_the_order_of_pages_changes_no_bit(backend):
    """The same sequence behind two page tables."""
    one = backend.batch([(3, 60)], head_dim=16, page_size=8)
    permutation = torch.randperm(one.k_cache.shape[0], generator=torch.Generator().manual_seed(1)).to(one.q.device)
    where = torch.argsort(permutation).int()
    table = one.page_table.clone()
    table[:, :8] = where[table[:, :8].long()]
    other = one.replace(k_cache=one.k_cache[permutation], v_cache=one.v_cache[permutation], page_table=table)
    want, got = backend.check(one), backend.check(other)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
