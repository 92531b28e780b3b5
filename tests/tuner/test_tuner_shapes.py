"""Which batches are tuned on, and which others judge."""

import pytest
from tuner_tools import DECODES

from uniattn.bench import workloads
from uniattn.tuner import shapes
from uniattn.tuner.shapes import problem_of

ROWS = [*workloads.table(), *shapes.grid(), *shapes.grid(num_q_heads=8, num_kv_heads=1, head_dim=64, window=(1023, 0))]


def test_the_grid_covers_decode_drafts_prefill_and_mixes():
    buckets = {problem_of(w).bucket for w in shapes.grid()}
    assert {b.pairs for b in buckets if b.rows == 16} == {16, 64, 256, 1024, 4096}
    assert {b.pairs for b in buckets if b.rows == 64} == {16, 64, 256, 1024}
    assert {b.rows for b in buckets if not b.mixed and b.rows > 64} == {4096, 16384, 65536}
    assert sum(b.mixed for b in buckets) == 3
    assert len({w.name for w in shapes.grid()}) == len(shapes.grid())


@pytest.mark.parametrize("group", shapes.groups(ROWS), ids=lambda group: str(tuple(group.bucket)))
def test_held_out_batches_are_of_the_class_and_new(group):
    assert 1 <= len(group.held_out) <= 2
    for w in group.held_out:
        assert problem_of(w).bucket == group.bucket
        assert w.lengths not in [member.lengths for member in group.members]


@pytest.mark.parametrize("w", ROWS, ids=lambda w: w.name)
def test_a_problem_is_held_out_by_its_kv_alone(w):
    other = shapes.same_problem(w)
    assert problem_of(other) == problem_of(w)
    assert other.lengths != w.lengths


def test_groups_keep_every_batch():
    made = shapes.groups(ROWS)
    assert sorted(w.name for group in made for w in group.members) == sorted(w.name for w in ROWS)
    assert len(shapes.groups(DECODES)) == 1
