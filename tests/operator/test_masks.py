"""Which keys a query sees and what becomes of a score: causal, windows, softcap, ALiBi, sinks, scale, alone and together."""

import pytest
import torch
from operator_backends import tiny_tiles, two_tile_sizes

# Several tiles long, with ends off tile and page boundaries, and a sequence with more queries than keys.
LENGTHS = [(9, 55), (1, 35), (5, 3)]
MIXED = [False, True, False]

OPTIONS = {
    "causal": {},
    "non-causal": {"causal": False},
    "causal-per-sequence": {"causal": MIXED},
    "window-left": {"window": (9, -1)},
    "window-left-0": {"window": (0, 0)},
    "window-left-and-right": {"window": (9, 4), "causal": False},
    "window-right": {"window": (-1, 4), "causal": False},
    "window-right-0-is-causal": {"window": (None, 0), "causal": False},
    "window-per-sequence-causal": {"window": (9, 4), "causal": MIXED},
    "window-wider-than-all": {"window": (1000, 1000), "causal": False},
    "window-of-one-key-ahead": {"window": (0, 1), "causal": False},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "alibi-non-causal": {"alibi": True, "causal": False},
    "sinks": {"sinks": True},
    "sinks-window": {"sinks": True, "window": (9, 0)},
    "sinks-softcap": {"sinks": True, "softcap": 1.5},
    "scale": {"softmax_scale": 0.31},
    "scale-1-softcap": {"softmax_scale": 1.0, "softcap": 30.0},
    "everything": {"softmax_scale": 0.2, "softcap": 2.0, "alibi": True, "sinks": True, "window": (13, 6), "causal": MIXED},
}


def batch_for(backend, options, **how):
    settings = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 16, "page_size": 8, "num_padding_rows": 2}
    return backend.batch(LENGTHS, **settings, **how, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(backend, options):
    batch = batch_for(backend, options)
    backend.check(batch, plan=tiny_tiles(batch))


@pytest.mark.parametrize("name", ["causal", "non-causal", "window-per-sequence-causal", "everything"])
def test_options_with_two_tile_sizes_in_one_launch(backend, name):
    batch = batch_for(backend, OPTIONS[name])
    backend.check(batch, plan=two_tile_sizes(batch))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "window-left", "everything"])
def test_options_in_16_bits_with_the_planned_tiles(backend, name, dtype):
    backend.check(batch_for(backend, OPTIONS[name], dtype=dtype))


def test_all_causal_flags_are_causal_and_none_is_not(backend):
    batch = backend.batch(LENGTHS, head_dim=16)
    flags = torch.ones(len(LENGTHS), dtype=torch.bool, device=batch.q.device)
    assert torch.equal(backend.run(batch, causal=flags)[0], backend.run(batch, causal=True)[0])
    batch = backend.batch(LENGTHS, head_dim=16, causal=False)
    assert torch.equal(backend.run(batch, causal=~flags)[0], backend.run(batch, causal=False)[0])


def test_a_causal_sequence_ignores_the_right_side_of_the_window(backend):
    batch = backend.batch(LENGTHS, head_dim=16, window=(9, 0))
    want = backend.check(batch)
    for right in (4, -1):
        got = backend.run(batch, window=(9, right))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_none_and_minus_one_are_no_window(backend):
    batch = backend.batch(LENGTHS, head_dim=16)
    want, _ = backend.check(batch)
    for window in ((None, None), (-1, -1), (-1, None)):
        assert torch.equal(backend.run(batch, window=window)[0], want)


def test_a_sink_of_minus_infinity_is_no_sink(backend):
    batch = backend.batch(LENGTHS, head_dim=16)
    want = backend.check(batch)
    got = backend.check(batch, sinks=torch.full((2,), -torch.inf, device=batch.q.device))
    torch.testing.assert_close(got, want)


def test_a_large_sink_takes_everything(backend):
    batch = backend.batch(LENGTHS, head_dim=16)
    out, lse = backend.check(batch, sinks=torch.full((2,), 300.0, device=batch.q.device))
    assert (out == 0).all()
    assert (lse == 300).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_may_have_the_dtype_of_the_model(backend, dtype):
    batch = backend.batch(LENGTHS, head_dim=16, sinks=True, dtype=dtype)
    backend.check(batch, sinks=batch.options["sinks"].to(dtype))


def test_attention_is_over_its_own_sequence_only(backend):
    """Each sequence alone gives what it gives in the batch."""
    batch = backend.batch(LENGTHS, head_dim=16, alibi=True, window=(30, -1))
    out, lse = backend.check(batch)
    starts = batch.cu_seqlens_q.tolist()
    for seq in range(len(LENGTHS)):
        rows = slice(starts[seq], starts[seq + 1])
        alone = batch.replace(
            lengths=batch.lengths[seq : seq + 1],
            q=batch.q[rows],
            cu_seqlens_q=batch.cu_seqlens_q[seq : seq + 2] - starts[seq],
            seqlens_k=batch.seqlens_k[seq : seq + 1],
            page_table=batch.page_table[seq : seq + 1],
        )
        got_out, got_lse = backend.check(alone)
        torch.testing.assert_close(got_out, out[rows])
        torch.testing.assert_close(got_lse, lse[:, rows])
