"""Which batches are answered alike."""

import pytest

from uniattn.tuning.problem import page_class, problem


def of(num_tokens, num_seqs, max_seqlen_q=None, heads=(32, 8), page_size=16, windowed=False):
    return problem(num_tokens, num_seqs, num_tokens if max_seqlen_q is None else max_seqlen_q, *heads, 128, 128, 2, page_size, windowed)


@pytest.mark.parametrize(
    ("p", "rows", "pairs"),
    [
        (of(1, 1), 16, 16), (of(32, 32), 16, 256), (of(64, 64), 16, 1024), (of(256, 256), 16, 4096), (of(5000, 5000), 16, 16384),
        (of(128, 32), 16, 256), (of(160, 32), 64, 256), (of(512, 32), 64, 256), (of(513, 32), 256, 256),
        (of(2048, 1), 16384, 16), (of(100_000, 1), 65536, 16), (of(16 * 512, 16), 4096, 256),
    ],
)  # fmt: skip
def test_classes(p, rows, pairs):
    assert (p.bucket.rows, p.bucket.pairs) == (rows, pairs)


def test_any_ratio_of_heads_falls_into_the_same_classes():
    """What a kernel sees of 32 decodes is 256 pairs of at most 16 rows, whatever the group."""
    buckets = {of(32, 32, heads=(8 * group, 8)).bucket for group in (1, 4, 7, 8, 16)}
    assert buckets == {of(256, 256, heads=(16, 1)).bucket}
    assert of(32, 32, heads=(8 * 17, 8)).bucket not in buckets


def test_pages_and_windows_are_classes():
    assert [page_class(size) for size in (0, 1, 15, 16, 544)] == ["contiguous", "short", "short", "paged", "paged"]
    assert of(32, 32, page_size=16).bucket == of(32, 32, page_size=544).bucket != of(32, 32, page_size=0).bucket
    assert of(32, 32).bucket != of(32, 32, windowed=True).bucket


def test_a_mix_is_told_by_its_bound():
    mixed = of(2048, 64, max_seqlen_q=1985)
    assert (mixed.rows, mixed.longest) == (128, 1985)
    assert mixed.bucket.mixed
    assert not of(2048, 64, max_seqlen_q=128).bucket.mixed
    # Sixty-four sequences of at least a token each leave 1985 of 2048 to the longest: no bound says more.
    assert of(2048, 64, max_seqlen_q=10**6) == mixed
    assert not of(64, 64, max_seqlen_q=10**6).bucket.mixed


@pytest.mark.parametrize(("num_tokens", "num_seqs", "bound"), [(0, 4, 0), (0, 0, 8), (7, 0, 8), (3, 40, 3), (5, 2, 0)])
def test_odd_batches_have_a_class_too(num_tokens, num_seqs, bound):
    """Fewer tokens than sequences, none of either, or a bound of 0: rows as they were before there were tables."""
    p = of(num_tokens, num_seqs, bound)
    assert p.rows == min(bound, -(-num_tokens // max(1, num_seqs))) * 4
    assert p.bucket.rows >= 16
