"""Exact, bucket, heuristic: who answers, from which table, for which kernel; and that plans and warm-up ask."""

import warnings
from dataclasses import replace

import pytest
import torch
from tuning_tools import DECODE, H200, entry, table

from uniattn.launch.target import target_of
from uniattn.problem.layout import UNBOUNDED
from uniattn.schedule import hopper
from uniattn.schedule.plan import make_spec
from uniattn.schedule.tiles import Tiles
from uniattn.tuning import choose as tuning
from uniattn.tuning import heuristic
from uniattn.tuning.cards import CARDS
from uniattn.tuning.table import save, usable

EXACT, BUCKET, OTHER = (Tiles(16, n, 3, 4, bulk=False, programs_per_sm=4) for n in (16, 64, 128))
HOPPER, HOPPER_64 = hopper.choose(128, 128), replace(hopper.choose(128, 128), block_n=64, small_n=64)
BOTH = ("hopper", "triton")


def read(tmp_path, *entries, name="h200.json", **changes):
    save(table(*entries, **changes), tmp_path / name)
    return usable(tmp_path / name, H200, "3.6.0")


def test_exact_then_bucket_then_heuristic(tmp_path):
    tables = [read(tmp_path, entry(DECODE, EXACT), entry(DECODE.bucket, BUCKET))]

    def answer(p):
        choice = tuning.choose(p, H200, tables, ("triton",))
        return choice.level, choice.tiles

    assert answer(DECODE) == ("exact", EXACT)
    assert answer(DECODE._replace(page_size=64)) == ("bucket", BUCKET)
    assert answer(DECODE._replace(num_tokens=30, num_seqs=30, num_q_heads=56)) == ("bucket", BUCKET)
    default = heuristic.choose(4, 128, 128, 2, H200)
    assert answer(DECODE._replace(windowed=True)) == ("heuristic", default)
    assert answer(DECODE._replace(num_tokens=1, num_seqs=1)) == ("heuristic", default)


def test_without_a_table_nothing_changes():
    for rows in (1, 40, 5000):
        p = DECODE._replace(num_tokens=32 * rows, longest=rows)
        choice = tuning.choose(p, H200, (), ("triton",))
        assert (choice.level, choice.tiles) == ("heuristic", heuristic.choose(4 * rows, 128, 128, 2, H200))
        assert tuning.choose(p, H200, (), BOTH).tiles == HOPPER


def test_a_table_read_first_wins_at_the_same_level(tmp_path):
    users = read(tmp_path, entry(DECODE.bucket, BUCKET), name="user.json")
    shipped = read(tmp_path, entry(DECODE, EXACT), entry(DECODE.bucket, OTHER), name="shipped.json")
    choice = tuning.choose(DECODE, H200, [users, shipped], ("triton",))
    assert (choice.tiles, choice.table.path) == (EXACT, shipped.path)
    choice = tuning.choose(DECODE._replace(num_tokens=31, num_seqs=31), H200, [users, shipped], ("triton",))
    assert (choice.tiles, choice.table.path) == (BUCKET, users.path)


def test_the_table_prefers_among_kernels_that_can_serve(tmp_path):
    prefers_portable = [read(tmp_path, entry(DECODE.bucket, BUCKET), entry(DECODE.bucket, HOPPER))]
    assert tuning.choose(DECODE, H200, prefers_portable, BOTH).tiles == BUCKET
    assert tuning.choose(DECODE, H200, prefers_portable, ("hopper",)).tiles == HOPPER
    prefers_hopper = [read(tmp_path, entry(DECODE.bucket, HOPPER_64), entry(DECODE.bucket, BUCKET))]
    assert tuning.choose(DECODE, H200, prefers_hopper, BOTH).tiles == HOPPER_64
    assert tuning.choose(DECODE, H200, prefers_hopper, ("triton",)).tiles == BUCKET


def test_a_kernel_that_was_not_measured_is_not_passed_over(tmp_path):
    """Tuned with UNIATTN_BACKEND=triton, say: that says nothing against the Hopper kernel."""
    tables = [read(tmp_path, entry(DECODE.bucket, BUCKET))]
    assert tuning.choose(DECODE, H200, tables, BOTH).tiles == HOPPER
    assert tuning.choose(DECODE, H200, tables, ("triton",)).tiles == BUCKET


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder; what was read and chosen before is forgotten, and so is what the test makes read."""
    monkeypatch.setenv("UNIATTN_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    tuning._read.cache_clear()
    make_spec.cache_clear()
    yield tmp_path
    tuning._read.cache_clear()
    make_spec.cache_clear()


def spec(target=H200, kernels=("triton",)):
    return make_spec(32, 32, 32, 8, 128, 128, 2, 1, UNBOUNDED, UNBOUNDED, 1, 16, target, kernels)


def test_a_plan_takes_what_the_table_says(folder):
    before = spec()
    assert before.block_n == 32
    save(table(entry(DECODE.bucket, BUCKET), entry(DECODE.bucket, HOPPER)), folder / "h200.json")
    assert spec() is before  # a process reads its tables once
    tuning._read.cache_clear()
    make_spec.cache_clear()
    assert (spec().block_n, spec().num_slots, spec().is_hopper) == (64, 132 * 4, 0)
    assert spec(kernels=BOTH) == spec()
    assert spec(kernels=("hopper",)).is_hopper == 1
    assert spec(CARDS["h100"]).block_n == 32


def test_the_shipped_table_is_read_too(folder):
    save(table(entry(DECODE.bucket, BUCKET)), folder / "shipped" / "h200.json")
    assert spec().block_n == 64
    assert [t.path for t in tuning.tables_of(H200)] == [str(folder / "shipped" / "h200.json")]


def test_a_broken_table_is_told_once_and_harms_nothing(folder):
    before = spec()
    make_spec.cache_clear()
    tuning._read.cache_clear()
    (folder / "h200.json").write_text("{")
    with pytest.warns(RuntimeWarning, match=r"does not use all of .*h200\.json: it is no tuning table"):
        assert spec() == before
    make_spec.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spec() == before


def test_the_interpreter_has_no_table(folder):
    (folder / "cpu.json").write_text("{")
    assert tuning.tables_of(target_of(torch.device("cpu"))) == ()


def test_every_answer_of_a_layer_is_named_for_warm_up(folder):
    others = [entry(DECODE.bucket._replace(**change), OTHER) for change in (dict(head_dim=64), dict(windowed=True), dict(pages="short"))]
    answers = (entry(DECODE, EXACT), entry(DECODE.bucket, HOPPER_64), entry(DECODE.bucket, BUCKET))
    save(table(*answers, *others), folder / "h200.json")
    without, portable = heuristic.every(128, 128, 2, H200), ("triton",)
    assert tuning.every(128, 128, 2, 16, False, H200, portable) == [*without, EXACT, BUCKET]
    assert tuning.every(128, 128, 2, 0, False, H200, portable) == heuristic.every(128, 128, 2, H200, paged=False)
    assert tuning.every(128, 128, 2, 16, True, H200, portable) == [*without, OTHER]
    # The exact entry was not measured against the Hopper kernel.
    assert tuning.every(128, 128, 2, 16, False, H200, BOTH) == [HOPPER, HOPPER_64]
    assert tuning.every(128, 128, 2, 16, True, H200, BOTH) == [HOPPER]


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"), ("NVIDIA H200 MIG 1g.18gb", "h200-mig-1g.18gb"), ("../..", "card"),
    ],
)  # fmt: skip
def test_the_name_of_a_cards_table(name, card):
    assert tuning.card_of(name) == card


def test_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("UNIATTN_TUNING_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.user_folder() == tmp_path / "uniattn" / "tuning"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuning.user_folder() == tmp_path / "home" / ".cache" / "uniattn" / "tuning"
    monkeypatch.setenv("UNIATTN_TUNING_DIR", "~/tables")
    assert tuning.user_folder() == tmp_path / "home" / "tables"
