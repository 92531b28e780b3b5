"""The oracle against formulations that share nothing with it: plain Python arithmetic, torch's SDPA, results known by hand."""

import math

import pytest
import torch

from uniattn import reference
from uniattn.testing import Batch, make_batch, poison_unread


def attention_by_scalars(batch: Batch) -> tuple[list[list[list[float]]], list[list[float]]]:
    """`out[token][head][dim]` and `lse[head][token]` with Python floats and loops over tokens, heads and keys only."""
    options = batch.options
    q, k_cache, v_cache = (t.double().tolist() for t in (batch.q, batch.k_cache, batch.v_cache))
    num_tokens, num_heads, head_dim = batch.q.shape
    group, v_dim = num_heads // batch.k_cache.shape[2], batch.v_cache.shape[3]
    page_size = batch.k_cache.shape[1]
    out = [[[0.0] * v_dim for _ in range(num_heads)] for _ in range(num_tokens)]
    lse = [[-math.inf] * num_tokens for _ in range(num_heads)]
    token = 0
    for seq, (q_len, kv_len) in enumerate(batch.lengths):
        causal = options["causal"] if isinstance(options["causal"], bool) else bool(options["causal"][seq])
        left, right = options.get("window") or (None, None)
        left, right = (math.inf if w in (None, -1) else w for w in (left, right))
        for i in range(q_len):
            position = kv_len - (q_len - i)
            for head in range(num_heads):
                scores, values = [], []
                for j in range(kv_len):
                    if (j > position if causal else j - position > right) or position - j > left:
                        continue
                    page = int(batch.page_table[seq, j // page_size])
                    k, v = (cache[page][j % page_size][head // group] for cache in (k_cache, v_cache))
                    score = sum(a * b for a, b in zip(q[token][head], k, strict=True))
                    score *= options.get("softmax_scale", 1 / math.sqrt(head_dim))
                    if options.get("softcap"):
                        score = options["softcap"] * math.tanh(score / options["softcap"])
                    if "alibi_slopes" in options:
                        score -= float(options["alibi_slopes"][head]) * abs(position - j)
                    scores.append(score)
                    values.append(v)
                if "sinks" in options:
                    scores.append(float(options["sinks"][head]))
                    values.append([0.0] * v_dim)
                if scores:
                    total = math.fsum(math.exp(s) for s in scores)
                    lse[head][token] = math.log(total)
                    for d in range(v_dim):
                        out[token][head][d] = math.fsum(math.exp(s) * v[d] for s, v in zip(scores, values, strict=True)) / total
            token += 1
    return out, lse


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"causal": False},
        {"causal": [True, False, False, True, False, True]},
        {"window": (3, 0)},
        {"window": (0, 0)},
        {"window": (4, 2), "causal": False},
        {"window": (-1, 1), "causal": False},
        {"window": (None, 1), "causal": [False, True, False, True, False, True]},
        {"window": (2, -1), "causal": False},
        {"softcap": 1.5},
        {"alibi": True},
        {"alibi": True, "causal": False},
        {"sinks": True},
        {"softmax_scale": 0.7, "softcap": 2.0, "alibi": True, "sinks": True, "window": (5, 1), "causal": False},
        {"v_head_dim": 3},
        {"num_q_heads": 6, "num_kv_heads": 3, "page_size": 3, "layout": "hnd"},
    ],
    ids=str,
)
def test_agrees_with_scalar_arithmetic(how):
    settings = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 4, "page_size": 4, "num_padding_rows": 2, **how}
    batch = poison_unread(make_batch([(3, 9), (1, 5), (4, 2), (2, 0), (0, 4), (5, 5)], **settings))
    want_out, want_lse = attention_by_scalars(batch)
    out, lse = reference.attention(**batch.kwargs())
    assert out.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(out, torch.tensor(want_out, dtype=torch.float64), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, torch.tensor(want_lse, dtype=torch.float64), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_agrees_with_sdpa(causal, num_q_heads, num_kv_heads):
    lengths = [(7, 7), (16, 16), (1, 1)]
    batch = make_batch(lengths, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=32, page_size=None, causal=causal)
    out, _ = reference.attention(**batch.kwargs())
    begin = 0
    for q_len, _ in lengths:
        q, k, v = (t[begin : begin + q_len].double().transpose(0, 1)[None] for t in (batch.q, batch.k_cache, batch.v_cache))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(out[begin : begin + q_len], want[0].transpose(0, 1), rtol=1e-12, atol=1e-13)
        begin += q_len


def by_hand(q_len: int, kv_values: list[float], **options):
    """Attention with all scores 0 over one-dimensional values, so that a row's output is the mean of the values it sees."""
    kv = torch.tensor(kv_values)[:, None, None]
    out, lse = reference.attention(
        torch.zeros(q_len, 1, 1),
        torch.zeros_like(kv),
        kv,
        cu_seqlens_q=torch.tensor([0, q_len]),
        cu_seqlens_k=torch.tensor([0, len(kv_values)]),
        **options,
    )
    return out.flatten().tolist(), lse.exp().flatten().tolist()


def test_causal_is_aligned_bottom_right():
    assert by_hand(2, [1, 3, 8]) == (pytest.approx([2, 4]), pytest.approx([2, 3]))


def test_more_queries_than_keys_leave_the_first_rows_empty():
    assert by_hand(4, [2, 4]) == (pytest.approx([0, 0, 2, 3]), pytest.approx([0, 0, 1, 2]))


def test_window_counts_both_ends():
    assert by_hand(1, [1, 2, 4, 8], window=(1, 0))[0] == pytest.approx([12 / 2])
    assert by_hand(4, [1, 2, 4, 8], window=(1, 1), causal=False)[0] == pytest.approx([3 / 2, 7 / 3, 14 / 3, 12 / 2])


def test_causal_ignores_the_right_side_of_a_window():
    assert by_hand(3, [1, 2, 4], window=(1, 2)) == by_hand(3, [1, 2, 4], window=(1, 0))


def test_sink_takes_its_share_and_is_in_the_lse():
    sink = torch.tensor([math.log(2.0)])
    assert by_hand(1, [3, 5], sinks=sink) == (pytest.approx([8 / 4]), pytest.approx([4]))
    assert by_hand(2, [6], sinks=sink) == (pytest.approx([0, 6 / 3]), pytest.approx([2, 3]))


def test_alibi_lowers_a_score_by_slope_times_distance():
    # Distances 2, 1, 0 and slope ln 2: weights 1/4, 1/2, 1.
    assert by_hand(1, [4, 2, 1], alibi_slopes=torch.tensor([math.log(2.0)])) == (pytest.approx([3 / 1.75]), pytest.approx([1.75]))


def test_softcap_comes_before_alibi():
    batch = make_batch([(1, 6)], head_dim=4, softcap=0.5, alibi=True)
    batch.options["alibi_slopes"] = torch.tensor([100.0, 100.0])
    # Capped after ALiBi, all keys but the last would tie at -0.5; before it, they vanish.
    out, _ = reference.attention(**batch.kwargs())
    last = batch.v_cache[batch.page_table[0, 0], 5, 0].double()
    torch.testing.assert_close(out[0, 0], last)


def test_padding_rows_are_empty_even_with_sinks():
    batch = make_batch([(1, 3), (2, 2)], num_padding_rows=3, sinks=True)
    out, lse = reference.attention(**batch.kwargs())
    assert (out[3:] == 0).all()
    assert (lse[:, 3:] == -math.inf).all()


@pytest.mark.parametrize(
    ("page_size", "lengths_as"),
    [(4, "seqlens_k"), (4, "cu_seqlens_k"), (None, "seqlens_k"), (None, "cu_seqlens_k"), (None, "both")],
)
def test_lengths_may_be_given_either_way(lengths_as, page_size):
    def result(**how):
        return reference.attention(**make_batch([(2, 5), (1, 0), (3, 7)], sinks=True, seed=3, **how).kwargs())

    got, want = result(page_size=page_size, lengths_as=lengths_as), result(page_size=16, layout="hnd")
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_keys_without_a_place_in_the_table_do_not_exist():
    batch = make_batch([(1, 12)], page_size=4, causal=False)
    cut = batch.kwargs(page_table=batch.page_table[:, :2].contiguous())
    out, _ = reference.attention(**cut)
    want, _ = reference.attention(**cut | {"seqlens_k": torch.tensor([8])})
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def test_merging_parts_gives_the_whole():
    batch = make_batch([(3, 10)], page_size=None, causal=False)
    whole = reference.attention(**batch.kwargs())
    parts = []
    for begin, end in [(0, 4), (4, 4), (4, 10)]:
        k, v = batch.k_cache[begin:end], batch.v_cache[begin:end]
        starts = torch.tensor([0, end - begin])
        parts.append(reference.attention(**batch.kwargs(k_cache=k, v_cache=v, cu_seqlens_k=starts, seqlens_k=None)))
    parts[1][0].fill_(math.nan)  # an empty part may hold anything
    got = reference.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    for a, b in zip(got, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_merging_only_empty_parts_is_empty():
    out, lse = reference.merge_states([torch.full((2, 1, 4), math.nan)] * 2, [torch.full((1, 2), -math.inf)] * 2)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_write_kv_fills_slots_and_skips_negative_ones():
    k, v = torch.ones(3, 1, 2), torch.full((3, 1, 1), 2.0)
    k_cache, v_cache = torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 1)
    got_k, got_v = reference.write_kv(k, v, k_cache, v_cache, torch.tensor([3, -1, 0]))
    assert got_k.flatten(0, 2).sum(-1).tolist() == [2, 0, 0, 2]
    assert got_v.flatten().tolist() == [2, 0, 0, 2]
    assert k_cache.sum() == v_cache.sum() == 0


def test_unknown_features_are_refused():
    batch = make_batch([(1, 1)])
    with pytest.raises(NotImplementedError, match="mask"):
        reference.attention(**batch.kwargs(mask="tree"))
