"""The comparison passes what is right and fails what is not, with a message that says where."""

import pytest
import torch

import uniattn
from uniattn.testing import assert_matches_oracle, assert_within, make_batch, oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def batch_of(dtype=torch.float32, **how):
    return make_batch([(3, 19), (1, 200), (4, 2)], num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, **how)


def result(batch, **changes):
    return uniattn.attention(**batch.kwargs(return_lse=True, **changes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_right_results_pass(dtype):
    batch = batch_of(dtype, softcap=5.0, alibi=True, sinks=True, window=(64, 0))
    assert_matches_oracle(batch, *result(batch))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "wrong", [{"softmax_scale": 0.17}, {"window": (198, 0)}, {"softcap": 20.0}, {"sinks": torch.full((4,), -3.0)}], ids=str
)
def test_slightly_wrong_options_fail(dtype, wrong):
    batch = batch_of(dtype)
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_matches_oracle(batch, *result(batch, **wrong))


def test_one_key_too_many_or_too_few_fails():
    batch = batch_of(torch.bfloat16)
    for kv_lens in ([19, 199, 2], [19, 200, 1]):
        with pytest.raises(AssertionError):
            assert_matches_oracle(batch, *result(batch, seqlens_k=torch.tensor(kv_lens, dtype=torch.int32)))


def test_the_message_names_sequence_token_head_and_numbers():
    batch = batch_of()
    out, lse = result(batch)
    out[3, 2, 7] += 0.5
    with pytest.raises(
        AssertionError, match=r"1 of .*out of sequence 1 \(q_len 1, kv_len 200\), its query token 0, head 2, dim 7: got"
    ):
        assert_matches_oracle(batch, out, lse)
    lse[1, 2] += 1.0
    with pytest.raises(AssertionError, match=r"LSE of sequence 0 .* token 2, head 1: got"):
        assert_matches_oracle(batch, result(batch)[0], lse)


def test_nan_fails_and_is_counted():
    batch = batch_of()
    out, lse = result(batch)
    out[0, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match=r"\(1 NaN\).*got nan"):
        assert_matches_oracle(batch, out, lse)


def test_minus_infinity_must_be_minus_infinity():
    batch = batch_of()
    out, lse = result(batch)
    lse[:, 4] = -1e30  # query 0 of the sequence with more queries than keys
    with pytest.raises(AssertionError, match="want -inf"):
        assert_matches_oracle(batch, out, lse)


def test_dtype_and_shape_are_checked():
    batch = batch_of(torch.bfloat16)
    out, lse = result(batch)
    with pytest.raises(AssertionError, match=r"out is torch\.float32"):
        assert_matches_oracle(batch, out.float(), lse)
    with pytest.raises(AssertionError, match="shape"):
        assert_matches_oracle(batch, out, lse.T)


def test_tf32_products_are_not_fp32():
    batch = batch_of()

    def to_tf32(x):
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    rounded = result(batch.replace(q=to_tf32(batch.q), k_cache=to_tf32(batch.k_cache), v_cache=to_tf32(batch.v_cache)))
    with pytest.raises(AssertionError, match="elements are wrong"):
        assert_matches_oracle(batch, *rounded)


def test_allowances_are_small():
    for dtype, limit in zip(DTYPES, (2e-5, 5e-3, 4e-2), strict=True):
        right = oracle(batch_of(dtype))
        assert right.out_allowed.max() < limit
        assert right.lse_allowed.max() < 2e-5


def test_within_takes_a_number_and_plain_tensors():
    want = torch.tensor([1.0, -torch.inf])
    assert_within(torch.tensor([1.01, -torch.inf]), want, 0.02)
    with pytest.raises(AssertionError, match=r"worst, \[0\]"):
        assert_within(torch.tensor([1.03, -torch.inf]), want, 0.02)
