"""Batches that Hypothesis makes up, the same ones on every run, with all features mixed."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_backends import plan_for, tiny_tiles, two_tile_sizes

from uniattn.testing import poison_page_table

EXAMPLES = {"reference-cpu": 80, "triton-interpreter": 20, "triton-gpu": 40}

LENGTHS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 70)), min_size=1, max_size=4)
BOUND = st.one_of(st.none(), st.just(-1), st.integers(0, 40))


@st.composite
def cases(draw, max_heads):
    """`(arguments of make_batch, plan function, num_splits, page-table filler)`."""
    num_seqs_lengths = draw(LENGTHS)
    num_kv_heads = draw(st.integers(1, 2))
    group = draw(st.sampled_from([g for g in (1, 2, 3, 5, 7, 16) if g * num_kv_heads <= max_heads]))
    page_size = draw(st.one_of(st.none(), st.integers(1, 40)))
    # Few head dims: each is a kernel of its own to compile on a GPU.
    head_dim, v_head_dim = draw(st.sampled_from([(8, 8), (24, 24), (40, 16), (64, 64)]))
    layouts = ["split", "packed", "gapped"]
    if page_size is not None:
        layouts += ["hnd", "packed_hnd", "mixed"] + (["interleaved"] if head_dim == v_head_dim else ["mla"])
    num_seqs = len(num_seqs_lengths)
    how = {
        "lengths": num_seqs_lengths,
        "num_q_heads": group * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "page_size": page_size,
        "layout": draw(st.sampled_from(layouts)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        "seed": draw(st.integers(0, 1000)),
        "sinks": draw(st.booleans()),
        "alibi": draw(st.booleans()),
        "causal": draw(st.one_of(st.booleans(), st.lists(st.booleans(), min_size=num_seqs, max_size=num_seqs))),
        "lengths_as": draw(st.sampled_from(["seqlens_k", "cu_seqlens_k"] + ["both"] * (page_size is None))),
        "num_padding_rows": draw(st.integers(0, 3)),
        "window": draw(st.one_of(st.none(), st.tuples(BOUND, BOUND))),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        "softmax_scale": draw(st.sampled_from([None, 0.05, 1.0])),
        "magnitude": draw(st.sampled_from([1.0, 1.0, 8.0])),
    }
    plan = draw(st.sampled_from([None, plan_for, tiny_tiles, two_tile_sizes]))
    return how, plan, draw(st.sampled_from([1, 1, 2, 5])), draw(st.sampled_from([-1, 2**31 - 1]))


def test_generated_batches(backend):
    @settings(
        max_examples=EXAMPLES[backend.name],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        print_blob=False,
    )
    @given(cases(max_heads=7 if backend.name == "triton-interpreter" else 32))
    def matches_the_oracle(case):
        how, plan, num_splits, filler = case
        batch = backend.batch(**how)
        if batch.page_table is not None:
            batch = poison_page_table(batch, filler)
        backend.check(batch, plan=plan and plan(batch, num_splits))

    matches_the_oracle()
