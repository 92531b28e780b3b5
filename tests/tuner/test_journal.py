"""What was measured is kept, and nothing else is taken for it."""

from dataclasses import replace

import pytest
from tuner_tools import DECODES, FakeMeter

from uniattn.errors import UnsupportedError
from uniattn.schedule.tiles import Tiles
from uniattn.tuner.journal import Journal
from uniattn.tuner.measure import ContextLost, Remembered

STAMP = {"card": {"name": "NVIDIA H200"}, "triton": "3.6.0"}
TILES = [Tiles(16, n, 3, 4) for n in (16, 32)]


def test_an_answer_is_asked_for_once(tmp_path):
    journal = Journal(tmp_path / "j", STAMP)
    asked = []
    for _ in range(2):
        assert journal.recall(lambda: asked.append(1) or [1.5, "wrong"], "times", {"a": 1}) == [1.5, "wrong"]
    assert asked == [1]
    assert Journal(tmp_path / "j", STAMP).recall(lambda: 1 / 0, "times", {"a": 1}) == [1.5, "wrong"]
    assert Journal(tmp_path / "j", STAMP).knows("times", {"a": 1})
    assert not Journal(tmp_path / "j", STAMP).knows("times", {"a": 2})


def test_another_stamp_or_a_fresh_start_forgets(tmp_path):
    Journal(tmp_path / "j", STAMP).recall(lambda: 1, "q")
    assert len(Journal(tmp_path / "j", STAMP)) == 1
    assert len(Journal(tmp_path / "j", STAMP, fresh=True)) == 0
    assert len(Journal(tmp_path / "j", STAMP)) == 0
    Journal(tmp_path / "j", STAMP).recall(lambda: 1, "q")
    assert len(Journal(tmp_path / "j", {**STAMP, "triton": "3.7.1"})) == 0


def test_a_line_cut_off_by_a_kill_is_measured_again(tmp_path):
    journal = Journal(tmp_path / "j", STAMP)
    for question in "abc":
        journal.recall(lambda: 1, question)
    text = (tmp_path / "j").read_text()
    (tmp_path / "j").write_text(text[:-9])
    again = Journal(tmp_path / "j", STAMP)
    assert [again.knows(question) for question in "abc"] == [True, True, False]
    again.recall(lambda: 2, "c")
    assert Journal(tmp_path / "j", STAMP).recall(lambda: 3, "c") == 2


def test_the_first_line_alone_cut_off_begins_anew(tmp_path):
    Journal(tmp_path / "j", STAMP)
    (tmp_path / "j").write_text('{"stamp": {"ca')
    assert len(Journal(tmp_path / "j", STAMP)) == 0
    Journal(tmp_path / "j", STAMP).recall(lambda: 1, "q")
    assert Journal(tmp_path / "j", STAMP).knows("q")


def test_a_meter_is_asked_only_what_is_not_known(tmp_path):
    def meter():
        return FakeMeter(lambda w, t: "wrong: it" if t.block_n == 16 else 2.5)

    first, second = meter(), meter()
    for one in (first, second):
        remembered = Remembered(one, Journal(tmp_path / "j", STAMP))
        remembered.expect(DECODES[0], TILES)
        assert remembered.counted(DECODES[0], TILES) == first.counted(DECODES[0], TILES)
        assert remembered.times(DECODES[0], TILES, 3) == ["wrong: it", 2.5]
    assert len(first.asked) == len(first.expected) == 1
    assert second.asked == second.expected == []
    # Other rounds, tiles or batches are other questions.
    remembered.times(DECODES[0], TILES, 5)
    remembered.times(DECODES[0], TILES[:1], 3)
    remembered.times(DECODES[1], TILES, 3)
    assert len(second.asked) == 3


def test_what_loses_the_gpu_is_not_tried_again(tmp_path):
    class Loses(FakeMeter):
        def times(self, w, tiles, rounds):
            if TILES[1] in tiles:
                raise ContextLost(TILES[1], "RuntimeError: an illegal memory access was encountered")
            return super().times(w, tiles, rounds)

    meter = Loses(lambda w, t: 2.5)
    remembered = Remembered(meter, Journal(tmp_path / "j", STAMP))
    with pytest.raises(UnsupportedError, match=r"GPU: got RuntimeError: an illegal memory .* run it again: it goes on without"):
        remembered.times(DECODES[0], TILES, 3)
    again = Remembered(meter, Journal(tmp_path / "j", STAMP))
    # Neither on this batch nor on another of its shape; on another shape it is tried.
    for w in (DECODES[0], DECODES[1]):
        assert again.times(w, TILES, 3) == [2.5, "it made the process lose the GPU"]
    with pytest.raises(UnsupportedError):
        again.times(replace(DECODES[0], head_dim=64), TILES, 3)
