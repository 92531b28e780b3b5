"""From options to a table: what is asked for, what is written, and that an interrupted run goes on."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from tuner_tools import DECODES, H200, FakeMeter

import uniattn
from uniattn import cli
from uniattn.tuner import command
from uniattn.tuner.journal import Journal
from uniattn.tuner.measure import Remembered
from uniattn.tuner.shapes import groups, problem_of
from uniattn.tuning.choose import choose
from uniattn.tuning.table import load, save, usable


def options(**changes):
    given = dict(only=[], batch=[], heads="32/8", head_dim="128", page_size=16, dtype="bfloat16", window=None, softcap=0.0)
    return Namespace(**{**given, **changes})


def names(**changes):
    return [w.name for w in command.chosen(options(**changes))]


def test_what_is_tuned_on():
    grid = command.chosen(options())
    assert len({problem_of(w).bucket for w in grid}) >= 12
    both = command.chosen(options(head_dim="64,128", heads="32/8,8/1", dtype="float16", page_size=64, window=100))
    assert len(both) == 4 * len(grid)
    assert {(w.num_q_heads, w.head_dim, w.page_size, w.dtype, w.window) for w in both} == {
        (heads, dim, 64, "float16", (99, 0)) for heads in (32, 8) for dim in (64, 128)
    }
    assert names(batch=["4q1s1k,q512"]) == ["4q1s1k", "q512"]
    assert len(names(only=["table", "head_dim ", "group "])) == 50


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(head_dim="64,x"), "--head-dim: got x; it must be a whole number"),
        (dict(heads="30/8"), "--heads: got 30/8; query heads must be a multiple"),
        (dict(only=["nothing"]), "--only: got nothing"),
        (dict(batch=["2q"]), "--batch: got 2q"),
    ],
)
def test_a_wrong_option_is_named(changes, told):
    with pytest.raises(uniattn.ArgumentError, match=told):
        command.chosen(options(**changes))


def quick(w, t):
    """A time for each configuration: blocks of 64 tokens win."""
    return 80.0 if t.kernel == "triton" and t.block_n == 64 and t.num_stages == 3 and not t.bulk else 100.0


ASKED = groups([replace(w, num_kv_heads=kv, num_q_heads=4 * kv, name=f"{w.name}, {kv}") for kv in (1, 8, 64) for w in DECODES])


def tuned(path, us, asked=ASKED, minutes=None):
    """`(outcomes, the meter)` of a run into the table at `path`."""
    meter = FakeMeter(us)
    table = command.starting_table(path, H200)
    stamp = {"triton": table.triton}
    journal = Journal(path.with_suffix(".measured.jsonl"), stamp)
    return command.measured(asked, H200, Remembered(meter, journal), table, path, minutes), meter


def test_the_table_answers_what_was_tuned(tmp_path, capsys):
    settled, _ = tuned(tmp_path / "h200.json", quick)
    assert "screening decode" in capsys.readouterr().err
    found = usable(tmp_path / "h200.json", H200, None)
    for group in ASKED:
        choice = choose(problem_of(group.held_out[0]), H200, [found], ("hopper", "triton"))
        assert (choice.level, choice.tiles.kernel, choice.tiles.block_n) == ("bucket", "triton", 64)
    account = command.account(settled, len(ASKED), tmp_path / "h200.json")
    assert "dim 128, rows 16, pairs 64 " in account
    assert account.count("triton 16x64, 3 stages, 4 warps, 3 an SM") == 3
    assert "left" not in account


def test_the_account_tells_a_default_that_stays(tmp_path):
    settled, _ = tuned(tmp_path / "h200.json", lambda w, t: 50.0 if t.kernel == "hopper" else quick(w, t), ASKED[:1])
    line = next(line for line in command.account(settled, 1, tmp_path).splitlines() if line.startswith("dim 128"))
    assert "  the default; where it cannot serve triton 16x64, 3 stages" in line


def test_an_interrupted_run_goes_on(tmp_path):
    path = tmp_path / "h200.json"

    def interrupted(w, t):
        if w.num_kv_heads == 64 and w.group == "held out":
            raise KeyboardInterrupt
        return quick(w, t)

    with pytest.raises(KeyboardInterrupt):
        tuned(path, interrupted)
    # What was settled by then is there, and is used.
    assert len({e.key for e in load(path)[0].entries}) == 2
    settled, meter = tuned(path, quick)
    assert {w.num_kv_heads for w, _, _ in meter.asked} == {64}
    assert all(w.group == "held out" for w, _, _ in meter.asked)
    assert len(settled) == 9
    assert len({e.key for e in load(path)[0].entries}) == 3
    # Nothing is left to measure.
    assert tuned(path, quick)[1].asked == []


def test_an_answer_that_no_longer_wins_goes(tmp_path):
    path = tmp_path / "h200.json"
    tuned(path, quick)
    assert len(load(path)[0].entries) == 6
    path.with_suffix(".measured.jsonl").unlink()
    tuned(path, lambda w, t: 100.0, ASKED[:1])
    assert {e.key for e in load(path)[0].entries} == {group.bucket for group in ASKED[1:]}


def test_no_time_left_begins_nothing(tmp_path):
    settled, meter = tuned(tmp_path / "h200.json", quick, minutes=0)
    assert (settled, meter.asked) == ([], [])
    assert "3 of 3 classes are left: run it again to go on" in command.account(settled, 3, tmp_path / "h200.json")


@pytest.mark.parametrize("stale", ["triton", "sources", "card", "edited"])
def test_a_stale_table_is_begun_anew(tmp_path, stale):
    path = tmp_path / "h200.json"
    tuned(path, quick)
    assert command.starting_table(path, H200).entries
    old, _ = load(path)
    if stale == "triton":
        save(replace(old, triton="3.5.0"), path)
    elif stale == "sources":
        save(replace(old, sources={"triton": "0"}), path)
    elif stale == "edited":
        path.write_text(path.read_text().replace('"block_n": 64', '"block_n": "many"').replace('"level": "bucket"', '"level": "guess"'))
    card = replace(H200, num_sms=100) if stale == "card" else H200
    assert command.starting_table(path, card).entries == []


def test_what_is_no_table_is_not_written_over(tmp_path):
    (tmp_path / "t.json").write_text('{"mine": 1}')
    with pytest.raises(uniattn.ArgumentError, match=r"--table: got .*t\.json; it is no tuning table"):
        command.starting_table(tmp_path / "t.json", H200)


def test_a_default_that_fails_is_told(tmp_path):
    settled, _ = tuned(tmp_path / "h200.json", lambda w, t: "wrong: 3 elements")
    assert "the default has no time: wrong: 3 elements" in command.account(settled, 3, tmp_path / "h200.json")
    settled, _ = tuned(tmp_path / "other.json", lambda w, t: "wrong: 3 elements" if t.block_n == 32 else 100.0)
    assert "configurations were wrong or failed, and are not taken, such as triton 16x32" in command.account(settled, 3, tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert cli.main(["tune", "--heads", "32/8", "--head-dim", "128", "--page", "16", "--dtype", "bf16"]) == cli.CANNOT_RUN
    assert "uniattn tune: GPU: got none that torch sees; " in capsys.readouterr().err
    assert cli.main(["tune", "--table", "/nowhere/t.json"]) == cli.CANNOT_RUN
    assert "--table: got /nowhere/t.json; its folder must exist" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_a_table_is_found_and_used(tmp_path, monkeypatch, capsys):
    from uniattn.launch.target import target_of
    from uniattn.schedule.plan import make_spec
    from uniattn.testing import assert_matches_oracle, make_batch
    from uniattn.tuning import choose as tuning

    monkeypatch.delenv("UNIATTN_BACKEND", raising=False)
    monkeypatch.setenv("UNIATTN_TUNING_DIR", str(tmp_path))
    line = ["tune", "--batch", "6q1s2k,9q1s700", "--heads", "4/2", "--head-dim", "64"]
    assert cli.main(line) == 0
    card = target_of(torch.device("cuda"))
    path = tmp_path / f"{tuning.card_of(card.name)}.json"
    out = capsys.readouterr().out
    assert str(path) in out
    tuning._read.cache_clear()
    make_spec.cache_clear()
    try:
        (table,) = [t for t in tuning.tables_of(card) if t.path == str(path)]
        assert (table.passed_over, table.notes) == ((), ())
        how = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
        batch = make_batch([(1, 900), (1, 70), (1, 2000)] * 2, **how)
        assert_matches_oracle(batch, uniattn.attention(**batch.kwargs()))
        assert cli.main(["explain", "--batch", "6q1s2k", "--heads", "4/2", "--head-dim", "64"]) == 0
    finally:
        tuning._read.cache_clear()
        make_spec.cache_clear()
