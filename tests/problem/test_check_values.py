"""Values on the device: each wrong one beside its right sibling."""
# ruff: noqa: E501 -- tables, one case a line

import inspect
import os
import subprocess
import sys

import pytest
import torch

import uniattn
from uniattn import ArgumentError
from uniattn.problem import check_values as values

PAGES, PAGE_SIZE, HKV, D = 6, 4, 2, 16


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


def batch(**changes):
    """A prefill of 4, a sequence of nothing, a chunk of 2 over 6, a decode over 7, one row of padding."""
    call = {
        "q": torch.randn(8, 4, D),
        "k_cache": torch.randn(PAGES, PAGE_SIZE, HKV, D),
        "v_cache": torch.randn(PAGES, PAGE_SIZE, HKV, D),
        "cu_seqlens_q": ints(0, 4, 4, 6, 7),
        "seqlens_k": ints(4, 0, 6, 7),
        "page_table": ints([0, -1], [-1, -1], [1, 2], [3, 5]),
        "max_seqlen_q": 4,
        "max_seqlen_k": 7,
    }
    if "page_table" in changes and changes["page_table"] is None:
        call |= {"k_cache": torch.randn(17, HKV, D), "v_cache": torch.randn(17, HKV, D)}
    return {**call, **changes}


CASES = [
    ("start", {"cu_seqlens_q": ints(1, 4, 4, 6, 7)}, {}, r"cu_seqlens_q\[0\]: got 1; offsets start at 0"),
    ("falls", {"cu_seqlens_q": ints(0, 4, 3, 6, 7)}, {}, r"cu_seqlens_q\[2\]: got 3 after 4; offsets never fall"),
    ("too-many", {"cu_seqlens_q": ints(0, 4, 4, 6, 9)}, {"cu_seqlens_q": ints(0, 4, 4, 6, 8)}, r"cu_seqlens_q\[-1\]: got 9; .*num_tokens = 8"),
    ("negative", {"seqlens_k": ints(4, -1, 6, 7)}, {}, r"seqlens_k\[1\]: got -1; a length is at least 0"),
    ("max-q", {"max_seqlen_q": 3}, {"max_seqlen_q": 100}, r"max_seqlen_q: got 3; sequence 0 has 4 query tokens"),
    ("max-k", {"max_seqlen_k": 6}, {"max_seqlen_k": None}, r"max_seqlen_k: got 6; sequence 3 has 7 KV tokens"),
    ("table-narrow", {"seqlens_k": ints(4, 0, 6, 9), "max_seqlen_k": None}, {"seqlens_k": ints(4, 0, 6, 8), "max_seqlen_k": 8},
     r"page_table: got 2 pages of 4 tokens a sequence; sequence 3 has 9 KV tokens; widen the table to at least 3 pages"),
    ("page-high", {"page_table": ints([0, -1], [-1, -1], [1, 6], [3, 5])}, {"page_table": ints([0, 99], [99, 99], [1, 2], [3, 5])},
     r"page_table\[2, 1\]: got 6; .*\[0, 6\)"),
    ("page-negative", {"page_table": ints([0, -1], [-1, -1], [1, 2], [-1, 5])}, {}, r"page_table\[3, 0\]: got -1; the page is visible"),
    # The decode at position 6 sees tokens 4 to 6 with a window of 2 to its left: page 0 of its sequence is out of sight.
    ("window", {"page_table": ints([0, -1], [-1, -1], [1, 2], [-1, 5]), "window": (3, 0)},
     {"page_table": ints([0, -1], [-1, -1], [1, 2], [-1, 5]), "window": (2, 0)}, r"page_table\[3, 0\]: got -1"),
    ("paged-offsets", {"seqlens_k": None, "cu_seqlens_k": ints(0, 4, 3, 9, 16)}, {"seqlens_k": None, "cu_seqlens_k": ints(0, 4, 4, 10, 17)},
     r"cu_seqlens_k\[2\]: got 3 after 4"),
    ("segments-long", {"page_table": None, "seqlens_k": None, "cu_seqlens_k": ints(0, 4, 4, 11, 18)},
     {"page_table": None, "seqlens_k": None, "cu_seqlens_k": ints(0, 4, 4, 10, 17)}, r"cu_seqlens_k\[-1\]: got 18; .*num_kv_tokens = 17"),
    ("segment-short", {"page_table": None, "cu_seqlens_k": ints(0, 4, 4, 9, 17)}, {"page_table": None, "cu_seqlens_k": ints(0, 4, 4, 10, 17)},
     r"seqlens_k\[2\]: got 6; cu_seqlens_k gives sequence 2 a segment of 5 tokens"),
    ("dense-long", {"page_table": None, "seqlens_k": ints(4, 1, 6, 7)}, {"page_table": None},
     r"seqlens_k: got lengths that add up to 18; k_cache holds num_kv_tokens = 17"),
    ("shapes-too", {"seqlens_k": ints(4, 0, 6)}, {}, r"seqlens_k: got int32 tensor \[3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "right", "message"), [pytest.param(*c[1:], id=c[0]) for c in CASES])
def test_check_values(wrong, right, message):
    uniattn.check_values(**batch(**right))
    with pytest.raises(ArgumentError, match=message):
        uniattn.check_values(**batch(**wrong))


def test_environment_checks_attention(monkeypatch):
    call = batch(page_table=ints([0, -1], [-1, -1], [1, 6], [3, 5]), out=torch.full((8, 4, D), 7.0))
    monkeypatch.setattr(values, "ENABLED", True)
    with pytest.raises(ArgumentError, match=r"page_table\[2, 1\]: got 6"):
        uniattn.attention(**call)
    assert (call["out"] == 7.0).all()
    uniattn.attention(**batch())


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ([0, 24, -1], [0, 23, -1], r"slot_mapping\[1\]: got 24; .*num_pages \* page_size = 24, or -1"),
        ([0, 1, -2], [0, 1, -1], r"slot_mapping\[2\]: got -2"),
        ([5, 3, 5], [-1, 3, -1], r"slot_mapping: got slot 5 for rows 0 and 2; .*race"),
    ],
)
def test_environment_checks_write_kv(monkeypatch, wrong, right, message):
    k, cache = torch.randn(3, HKV, D), torch.full((PAGES, PAGE_SIZE, HKV, D), 7.0)
    monkeypatch.setattr(values, "ENABLED", True)
    with pytest.raises(ArgumentError, match=message):
        uniattn.write_kv(k, k, cache, cache.clone(), torch.tensor(wrong))
    assert (cache == 7.0).all()
    uniattn.write_kv(k, k, cache, cache.clone(), torch.tensor(right))


@pytest.mark.parametrize(("value", "enabled"), [("1", True), ("0", False)])
def test_environment_variable(value, enabled):
    env = {**os.environ, "UNIATTN_CHECK_VALUES": value}
    code = "from uniattn.problem import check_values; print(check_values.ENABLED)"
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(enabled)


def test_compiled_calls_are_not_checked(monkeypatch):
    monkeypatch.setattr(values, "ENABLED", True)
    call = batch()
    compiled = torch.compile(uniattn.attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**call), uniattn.attention(**call))


def test_it_takes_what_attention_takes():
    ours, attention = (inspect.signature(f).parameters for f in (uniattn.check_values, uniattn.attention))
    assert list(ours.items()) == list(attention.items())


@pytest.mark.parametrize("name", ["mask", "q_scale", "k_scale", "v_scale", "kv_format", "out_scale"])
def test_reserved_arguments_are_refused(name):
    uniattn.check_values(**batch(**{name: None}))
    with pytest.raises(uniattn.UnsupportedError, match=f"{name}: got int 1; it is not supported in this version"):
        uniattn.check_values(**batch(**{name: 1}))
