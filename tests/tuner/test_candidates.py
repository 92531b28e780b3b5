"""What is tried: the default first, then only what the chip can run."""

from dataclasses import replace

import pytest
from tuner_tools import DECODES, H200, PREFILL

from uniattn.bench import workloads
from uniattn.tuner.candidates import candidates, kernels_for, refined
from uniattn.tuner.shapes import problem_of
from uniattn.tuning import limits
from uniattn.tuning.cards import CARDS
from uniattn.tuning.choose import default


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS.keys())
@pytest.mark.parametrize("words", ["table", "shapes"])
def test_the_default_first_then_what_the_chip_can_run(card, words):
    for w in workloads.select([words]):
        p, kernels = problem_of(w), kernels_for(w, card)
        for kernel, tiles in candidates(p, card, kernels).items():
            assert tiles[0] == default(p, card, (kernel,))
            assert len(set(tiles)) == len(tiles) <= 30
            for t in tiles[1:]:
                assert t.kernel == kernel
                assert limits.fault(t, p.head_dim, p.v_head_dim, p.itemsize, True, card) is None


def test_there_is_something_to_try():
    for w, least in ((DECODES[0], 12), (PREFILL, 12)):
        tried = candidates(problem_of(w), H200, ("hopper", "triton"))
        assert len(tried["triton"]) >= least
        assert len(tried["hopper"]) >= 3


@pytest.mark.parametrize(
    ("w", "card", "kernels"),
    [
        (DECODES[0], "h200", ("hopper", "triton")), (DECODES[0], "a100", ("triton",)), (DECODES[0], "mi300x", ("triton",)),
        (replace(DECODES[0], page_size=8), "h200", ("triton",)), (replace(DECODES[0], head_dim=512), "h200", ("triton",)),
        (replace(DECODES[0], dtype="float32"), "h200", ("triton",)), (replace(DECODES[0], dtype="float16"), "h100", ("hopper", "triton")),
    ],
)  # fmt: skip
def test_the_kernels_that_can_serve(w, card, kernels, monkeypatch):
    monkeypatch.delenv("UNIATTN_BACKEND", raising=False)
    assert kernels_for(w, CARDS[card]) == kernels
    monkeypatch.setenv("UNIATTN_BACKEND", "triton")
    assert kernels_for(w, CARDS[card]) == ("triton",)


def test_neighbours_need_no_other_binary():
    (t, *_) = candidates(problem_of(DECODES[0]), H200, ("triton",))["triton"]
    assert {n.compiled_in for n in refined(t)} == {t.compiled_in}
    assert t not in refined(t)
