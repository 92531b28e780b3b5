"""The overlap rule against a search of every element's address."""

import random

import pytest
import torch

from uniattn import ArgumentError
from uniattn.problem.memory import _share_bytes, check_written, overlaps_itself


def addresses(x):
    return (x.storage_offset() + sum(i * s for i, s in zip(torch.meshgrid(*map(torch.arange, x.shape), indexing="ij"), x.stride(),
            strict=True))).flatten().tolist()  # fmt: skip


def random_view(buffer, rng):
    """A view of `buffer` as batches have them: a slice of a contiguous table, dims permuted, or plain random strides."""
    shape = [rng.randint(1, 4) for _ in range(3)]
    if rng.random() < 0.5:
        table = buffer[rng.randint(0, 30) :]
        full = [n + rng.randint(0, 3) for n in shape]
        view = table[: full[0] * full[1] * full[2]].view(full)
        for dim, n in enumerate(shape):
            begin = rng.randint(0, full[dim] - n)
            view = view.narrow(dim, begin, n)
        return view.transpose(0, 1) if rng.random() < 0.3 else view
    return buffer.as_strided(shape, [rng.randint(0, 12), rng.randint(0, 6), 1], rng.randint(0, 40))


def test_certain_where_it_says_apart():
    rng = random.Random(0)
    buffer = torch.zeros(512)
    found = {True: 0, False: 0}
    refused_apart = 0
    for _ in range(4000):
        a, b = random_view(buffer, rng), random_view(buffer, rng)
        truth = bool(set(addresses(a)) & set(addresses(b)))
        found[truth] += 1
        if truth:
            assert _share_bytes(a, b)
        else:
            refused_apart += _share_bytes(a, b)
    assert min(found.values()) > 500
    assert refused_apart < 0.5 * found[False]


def test_overlaps_itself():
    rng = random.Random(1)
    buffer = torch.zeros(512)
    for _ in range(2000):
        x = random_view(buffer, rng)
        places = addresses(x)
        if len(set(places)) < len(places):
            assert overlaps_itself(x)
    assert not overlaps_itself(torch.empty(4, 2, 3, 5).permute(2, 0, 1, 3))
    assert not overlaps_itself(torch.empty(4, 2, 3)[:, :1].expand(4, 1, 3))


def test_columns_of_one_table_are_apart():
    table = torch.zeros(5, 3, 8)
    q, k, out = table.unbind(1)
    check_written("out", out, (("q", q), ("k", k)))
    with pytest.raises(ArgumentError, match="out: got memory that k also uses"):
        check_written(
            "out", table[:, 1:].flatten(1)[:, 4:12].contiguous().set_(table.untyped_storage(), 12, (5, 8), (24, 1)), (("k", k),)
        )
    check_written("out", table[:2], (("later rows", table[2:]),))
    with pytest.raises(ArgumentError, match="later rows"):
        check_written("out", table[:3], (("later rows", table[2:]),))


def test_no_memory_nothing_to_compare():
    fake = torch.empty(4, 4, device="meta")
    check_written("out", fake, (("q", fake),))
    empty = torch.empty(0, 4)
    check_written("out", empty, (("q", empty),))
