"""Batches that an engine forms at its edges: zero lengths, plateaus, graph padding, more queries than keys, loose bounds."""

import pytest
import torch
from operator_backends import tiny_tiles


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(0, 0)],
        [(0, 9), (0, 0), (0, 1)],
        [(0, 5), (1, 7), (0, 6), (1, 17)],
        [(0, 0), (9, 20), (0, 4), (0, 4), (1, 3)],
        [(1, 0), (2, 0), (3, 5)],
        [(4, 2), (7, 1), (1, 0), (20, 3)],
        [(1, 18), (1, 2), (1, 33), (17, 17)],
    ],
    ids=str,
)
def test_lengths(backend, lengths):
    batch = backend.batch(lengths, num_q_heads=3, head_dim=16, num_padding_rows=1)
    backend.check(batch)
    backend.check(batch, plan=tiny_tiles(batch))


@pytest.mark.parametrize("causal", [True, False])
def test_no_tokens_at_all(backend, causal):
    batch = backend.batch([(0, 3), (0, 0)], causal=causal)
    out, lse = backend.check(batch)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (2, 0)


@pytest.mark.parametrize("page_size", [16, None])
def test_no_keys_at_all(backend, page_size):
    batch = backend.batch([(2, 0), (1, 0)], page_size=page_size, num_spare_pages=1, causal=False)
    out, lse = backend.check(batch)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_past_the_last_sequence_are_empty(backend, causal, sinks):
    batch = backend.batch([(3, 9), (1, 4)], head_dim=16, num_padding_rows=37, causal=causal, sinks=sinks)
    out, lse = backend.check(batch)
    assert (out[4:] == 0).all()
    assert (lse[:, 4:] == -torch.inf).all()


def test_rows_that_see_no_key_hold_the_sink(backend):
    batch = backend.batch([(5, 2), (2, 0)], head_dim=16, sinks=True)
    out, lse = backend.check(batch)
    unseeing = [0, 1, 2, 5, 6]
    assert (out[unseeing] == 0).all()
    torch.testing.assert_close(lse[:, unseeing], batch.options["sinks"][:, None].expand(-1, 5))


def test_plateaus_of_graph_padding(backend):
    """Sequences of length 0 and 0 at the end of a batch, as a captured graph of a larger size leaves them."""
    batch = backend.batch([(1, 20), (1, 3)] + [(0, 0)] * 6, head_dim=16, num_padding_rows=6)
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 2]
    backend.check(batch)


def test_many_sequences(backend):
    """More sequences than a kernel may look at in one go, most of them decodes of one key."""
    lengths = [(i % 2, 1 + i % 3) for i in range(150)] + [(9, 40)]
    backend.check(backend.batch(lengths, num_q_heads=1, head_dim=16, page_size=4))


def test_bounds_may_be_loose_or_exact(backend):
    batch = backend.batch([(9, 40), (1, 20)], head_dim=16)
    for bounds in ({}, {"max_seqlen_q": 9, "max_seqlen_k": 40}, {"max_seqlen_q": 1000, "max_seqlen_k": 100_000}):
        backend.check(batch, **bounds)


def test_a_table_exactly_as_wide_as_the_lengths_need(backend):
    backend.check(backend.batch([(2, 32), (1, 16)], head_dim=16, num_spare_columns=0, num_spare_pages=0))


def test_seq_len_beyond_the_page_table(backend):
    """A captured graph run past its table: 257 pages asked of a table of 256. The keys that have no page do not exist."""
    batch = backend.batch([(1, 48), (3, 32), (1, 48)], head_dim=16, num_spare_columns=0, causal=False, sinks=True)
    # Rows of one larger table: reading past a row's end would find the next row's pages, or 2**31 - 1.
    wide = torch.full((3, 4), 2**31 - 1, dtype=torch.int32, device=batch.q.device)
    wide[:, :2] = batch.page_table[:, :2]
    out, lse = backend.run(batch.replace(page_table=wide[:, :2]))
    want, want_lse = backend.check(batch.replace(page_table=batch.page_table[:, :2].contiguous()))
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


@pytest.mark.parametrize("seq", [0, 1])
def test_contiguous_keys_past_the_sequence_belong_to_the_next(backend, seq):
    """`seqlens_k` shorter than `cu_seqlens_k`'s rows: what follows is another sequence's, or a gap."""
    batch = backend.batch([(2, 20), (2, 20)], head_dim=16, page_size=None, lengths_as="both", causal=False)
    batch.seqlens_k[seq] = 13
    lengths = list(batch.lengths)
    lengths[seq] = (2, 13)
    backend.check(batch.replace(lengths=tuple(lengths)))
