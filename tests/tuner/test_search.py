"""Who wins and who does not, with times that a function gives: no GPU."""

from dataclasses import replace

import pytest
from tuner_tools import DECODES, H200, PREFILL, FakeMeter, decode_group

from uniattn.schedule import hopper
from uniattn.tuner import search
from uniattn.tuner.search import NOISE, tune
from uniattn.tuner.shapes import groups, problem_of
from uniattn.tuning.choose import default
from uniattn.tuning.problem import Bucket

DEFAULT = hopper.choose(128, 128)
PORTABLE = default(problem_of(DECODES[0]), H200, ("triton",))


def outcome(us, made=None, meter=None):
    """What is settled for the bucket of decodes, and for its problems, where `us` gives the times."""
    meter = meter or FakeMeter(us)
    ((whole, *others),) = tune([made or decode_group()], H200, meter, lambda name: None, lambda: True)
    return whole, others


def is_64(t):
    return t.kernel == "triton" and t.block_n == 64 and t.num_stages == 3 and not t.bulk


def test_nothing_faster_leaves_the_default():
    whole, others = outcome(lambda w, t: 100.0)
    assert (whole.entries, whole.us, whole.held_out) == ((), pytest.approx(100.0), None)
    assert not any(one.entries for one in others)
    whole, _ = outcome(lambda w, t: 100.0 if t == DEFAULT else 98.5)  # within what is too little to change for
    assert whole.entries == ()


def test_the_fastest_is_taken_with_the_programs_that_live():
    whole, others = outcome(lambda w, t: 80.0 if is_64(t) else 90.0 if t.kernel == "triton" else 100.0)
    assert [e.tiles.kernel for e in whole.entries] == ["triton", "hopper"]
    best, other = whole.entries
    assert is_64(best.tiles)
    assert best.tiles.programs_per_sm == 3
    assert other.tiles == DEFAULT
    assert (best.level, best.key) == ("bucket", decode_group().bucket)
    assert (best.us, best.default_us, other.us) == (80.0, 100.0, 100.0)
    assert best.measured_on == tuple(w.name for w in DECODES)
    assert best.held_out == tuple(w.name for w in decode_group().held_out)
    assert whole.held_out == pytest.approx(0.8)
    assert not any(one.entries for one in others)


def test_the_default_with_exact_slots_is_a_candidate():
    whole, _ = outcome(lambda w, t: 70.0 if t == replace(PORTABLE, programs_per_sm=3) else 100.0)
    assert whole.entries[0].tiles == replace(PORTABLE, programs_per_sm=3)


def test_a_kernel_stays_first_and_the_other_is_tuned_beside():
    """The Hopper kernel's default wins: the portable kernel's best is kept for calls that the other cannot serve."""
    whole, _ = outcome(lambda w, t: 50.0 if t.kernel == "hopper" else 80.0 if is_64(t) else 100.0)
    assert [e.tiles.kernel for e in whole.entries] == ["hopper", "triton"]
    assert whole.entries[0].tiles == DEFAULT
    assert is_64(whole.entries[1].tiles)
    assert whole.us == whole.default_us == pytest.approx(50.0)


def held(w):
    return w.group == "held out"


def test_what_loses_on_a_held_out_batch_is_not_taken():
    def us(w, t):
        return 100.0 * (1 + 2 * NOISE) if held(w) and t != DEFAULT and "held out 2" in w.name else 100.0 if t == DEFAULT else 80.0

    whole, _ = outcome(us)
    assert whole.entries == ()
    # Within the noise it is no loss.
    whole, _ = outcome(lambda w, t: us(w, t) - (1.5 if held(w) and t != DEFAULT else 0))
    assert whole.entries


def test_the_second_best_serves_where_the_best_loses():
    def us(w, t):
        if is_64(t):
            return 130.0 if held(w) else 70.0
        return 80.0 if t.kernel == "triton" and t.block_n == 128 and t.num_stages == 3 and not t.bulk else 100.0

    whole, _ = outcome(us)
    assert whole.entries[0].tiles.block_n == 128
    assert whole.us == pytest.approx(80.0)


def test_what_loses_on_one_of_its_own_batches_is_not_taken():
    whole, _ = outcome(lambda w, t: 120.0 if is_64(t) and w == DECODES[1] else 70.0 if is_64(t) else 100.0)
    assert not any(is_64(e.tiles) for e in whole.entries)


@pytest.mark.parametrize("fault", ["wrong: 3 elements are NaN", "failed: RuntimeError: out of resource"])
@pytest.mark.parametrize("where", ["everywhere", "on one batch", "held out"])
def test_what_is_wrong_or_fails_is_never_taken(fault, where):
    def us(w, t):
        if not is_64(t):
            return 100.0
        faulty = {"everywhere": True, "on one batch": w == DECODES[1], "held out": held(w)}[where]
        return fault if faulty else 10.0

    whole, others = outcome(us)
    assert not any(is_64(e.tiles) for one in (whole, *others) for e in one.entries)
    assert fault in whole.note


def test_a_candidate_that_cannot_be_compiled_is_told_and_left_out():
    class Meter(FakeMeter):
        def counted(self, w, tiles):
            return ["the compiler crashed" if is_64(t) else t for t in tiles]

    meter = Meter(lambda w, t: 100.0)
    whole, _ = outcome(None, meter=meter)
    assert "triton 16x64, 3 stages, 4 warps: the compiler crashed" in whole.note
    assert not any(is_64(t) for _, tiles, _ in meter.asked for t in tiles)


def test_a_default_that_is_wrong_is_told():
    whole, others = outcome(lambda w, t: "wrong: all of it" if t == DEFAULT else 50.0)
    assert (whole.entries, whole.default_us) == ((), 0.0)
    assert whole.note == "the default has no time: wrong: all of it"
    assert not any(one.entries for one in others)


def test_a_problem_may_have_an_answer_of_its_own():
    """A configuration gains on all batches and loses on a held-out one of other sizes: its bucket does without, one problem need not."""
    own = problem_of(DECODES[0])
    assert own == problem_of(DECODES[2]) != problem_of(DECODES[1])
    assert own not in {problem_of(w) for w in decode_group().held_out}
    whole, others = outcome(lambda w, t: 100.0 if not is_64(t) else 80.0 if problem_of(w) == own or not held(w) else 120.0)
    assert whole.entries == ()
    assert {one.key: bool(one.entries) for one in others} == {own: True, problem_of(DECODES[1]): False}
    answer = next(one for one in others if one.entries)
    assert {e.level for e in answer.entries} == {"exact"}
    assert is_64(answer.entries[0].tiles)
    assert answer.entries[0].measured_on == (DECODES[0].name, DECODES[2].name)


def test_cuts_are_weighed_where_there_are_any():
    meter = FakeMeter(lambda w, t: 90.0 if t.item_overhead == 512 else 100.0)
    whole, _ = outcome(None, meter=meter)
    assert whole.entries[0].tiles.item_overhead == 512
    (prefill,) = groups([replace(PREFILL, lengths=((8192, 8192),) * 4)])
    meter = FakeMeter(lambda w, t: 100.0)
    outcome(None, prefill, meter)
    assert {t.item_overhead for _, tiles, _ in meter.asked for t in tiles if t.kernel == "triton"} == {256}


def test_nothing_is_begun_that_may_not_be_and_what_is_begun_is_settled():
    made = groups([replace(w, num_kv_heads=kv, num_q_heads=4 * kv) for kv in (1, 4, 16, 64) for w in (DECODES[0],)])
    assert len(made) == 4
    begun = []
    settled = list(tune(made, H200, FakeMeter(lambda w, t: 100.0), begun.append, lambda: sum("screening" in s for s in begun) < 2))
    assert [whole.key for whole, *_ in settled] == [group.bucket for group in made[:2]]


def test_kernels_are_compiled_ahead():
    meter = FakeMeter(lambda w, t: 100.0)
    made = groups([replace(DECODES[0], num_kv_heads=kv, num_q_heads=4 * kv) for kv in (1, 4, 16)])
    list(tune(made, H200, meter, lambda name: None, lambda: True))
    # All that is timed has been expected, and the classes to come before the first was timed.
    expected = {(w.num_kv_heads, t.compiled_in) for w, tiles in meter.expected for t in tiles}
    assert {(w.num_kv_heads, t.compiled_in) for w, tiles, _ in meter.asked for t in tiles} <= expected
    assert {w.num_kv_heads for w, _ in meter.expected[:3]} == {1, 4, 16}


def test_screening_takes_the_batch_of_middle_cost():
    assert search._typical(decode_group()) == DECODES[1]


def test_keys_are_told_apart():
    (whole, *others) = next(iter(tune([decode_group()], H200, FakeMeter(lambda w, t: 1.0), lambda name: None, lambda: True)))
    assert isinstance(whole.key, Bucket)
    assert [one.key for one in others] == [problem_of(DECODES[0]), problem_of(DECODES[1])]
