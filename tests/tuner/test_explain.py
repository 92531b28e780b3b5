"""What a batch gets and why, told without a GPU."""

import pytest
import torch
from tuner_tools import DECODES, H200

from uniattn import cli
from uniattn.schedule.tiles import Tiles
from uniattn.tuner import explain
from uniattn.tuner.shapes import problem_of
from uniattn.tuning import choose as tuning
from uniattn.tuning.kernels import KERNELS, source_hash
from uniattn.tuning.table import Entry, Table, facts, save

TILES = Tiles(16, 64, 3, 4, bulk=False, programs_per_sm=5, item_overhead=128)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("UNIATTN_BACKEND", raising=False)
    monkeypatch.setenv("UNIATTN_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(explain, "SHIPPED", tmp_path / "shipped")
    tuning._read.cache_clear()
    yield tmp_path
    tuning._read.cache_clear()


def told(capsys, *line):
    assert cli.main(["explain", *line]) == 0
    return capsys.readouterr().out


def test_the_heuristic(folder, capsys):
    out = told(capsys, "--card", "mi300x", "--batch", "q1s8k")
    assert f"no table mi300x.json in {folder} or {folder / 'shipped'}" in out
    for line in (
        "AMD Instinct MI300X: 304 SMs, mfma, 64 KB shared memory a program, 5.30 TB/s",
        "  batch   1 sequence, 1 query token (longest 1), 8192 KV tokens; heads 32/8, dim 128, page 16, bfloat16",
        "  kernel  triton",
        "  tiles   16 rows x 32 KV tokens, 2 stages, 4 warps",
        "  why     heuristic: there is no table for this card",
        "  SM      4 programs at once, about 16 KB of 64 KB shared memory each; 1216 on the chip",
        "  plan    64 items for each of 8 KV heads, 64 of them pieces of 1 cut tile; the longest visits 128 KV tokens",
    ):
        assert line in out.splitlines()


def test_a_tables_answer_with_its_grounds(folder, capsys):
    table = Table(facts(H200), "3.6.0", {name: source_hash(name) for name in KERNELS})
    p = problem_of(DECODES[0])
    for key in (p, p.bucket):
        level = "exact" if key is p else "bucket"
        hopper = tuning.default(p, H200, ("hopper",))
        table.entries += [Entry(level, key, t, 81.25, 90.0, ("decode 32 x 1024",)) for t in (TILES, hopper)]
    table.entries.append(Entry("bucket", p.bucket._replace(rows=64), Tiles(64, 64, 30, 4), 1.0, 2.0))
    save(table, folder / "h200.json")
    with pytest.warns(RuntimeWarning, match="does not use all"):
        out = told(capsys, "--card", "H200", "--batch", "32q1s1k,24q1s4k,q2k")
    exact, bucket, other = out.split("\n\n")[1:]
    assert "  kernel  triton (could also be hopper)" in exact
    assert "  tiles   16 rows x 64 KV tokens, 3 stages, 4 warps" in exact
    assert f"  why     exact (exactly 32 tokens in 32, heads 32/8, dim 128, page 16) of {folder}/h200.json: 81.2 us" in exact
    assert f"  why     bucket (dim 128, rows 16, pairs 256) of {folder}/h200.json: 81.2 us where the default takes 90.0, on " in bucket
    assert "  kernel  hopper (could also be triton)" in other
    assert "  why     heuristic: no table answers exactly 2048 tokens in 1, " in other
    heading = out.split("\n\n")[0]
    assert f"table {folder}/h200.json: 4 answers" in heading
    assert "  not used: entry 5 (bucket): it may take" in heading


def test_small_tiles_windows_and_named_batches(folder, capsys):
    out = told(capsys, "--card", "a100", "--only", "15 decodes,windowed decode")
    mixed, windowed = out.split("\n\n")[1:]
    assert "; sequences of at most 16 rows: 16 x 64, 5 stages" in mixed
    assert " of them small" in mixed
    assert "window 1024" in windowed
    assert "the longest visits 1024 KV tokens" in windowed or "pieces of" in windowed


def test_every_named_batch_on_every_card(folder, capsys):
    for card in ("h200", "l40s"):
        out = told(capsys, "--card", card, "--only", "table", "--only", "shapes")
        assert out.count("  plan    ") == out.count("  why     ") > 50


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--card", "tpu"], "--card: got tpu; the known cards are a100, h100, h200"),
        (["--card", "h200", "--batch", "32x"], "--batch: got 32x; "),
        (["--card", "h200", "--only", "nothing"], "--only: got nothing; "),
        (["--card", "h200", "--batch", "q1", "--heads", "3/2"], "--heads: got 3/2; "),
    ],
)
def test_a_wrong_option_is_named(folder, capsys, line, message):
    assert cli.main(["explain", *line]) == cli.CANNOT_RUN
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_card_must_be_named(capsys):
    assert cli.main(["explain"]) == cli.CANNOT_RUN
    assert "--card: got none, and torch sees no GPU; a configuration is a card's; name one: --card a100" in capsys.readouterr().err


def test_keys_in_words():
    p = problem_of(DECODES[0])
    bucket = p.bucket._replace(v_head_dim=64, itemsize=4, pages="short", mixed=True, windowed=True)
    assert explain.named(bucket) == "dim 128/64, fp32, short, rows 16, pairs 256, mixed, window"
