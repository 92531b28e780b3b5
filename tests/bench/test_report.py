"""What a run's records are turned into: numbers, text, JSON, the page."""

import re
from html.parser import HTMLParser

import pytest
from bench_tools import recorded_run, timed

from uniattn.bench import html, records, report, svg


def test_best_peer_is_measured_or_estimated_from_fa3():
    run = recorded_run()
    small, large, prefill, *_ = run.rows
    # FlashInfer was recorded at 12.8 where FA3 took 14.8.
    best = report.best_peer(run, small)
    assert (best.label, best.estimated) == ("FlashInfer", True)
    assert best.us == pytest.approx(12.8)
    assert report.best_peer(run, large) == report.Best(500.0, "FlashAttention-3", False)
    assert report.ratio(run, large) == pytest.approx(0.8)
    run.facts["card"] = "NVIDIA A100"
    assert report.best_peer(run, small).label == "FlashAttention-3"
    run.labels["flashinfer"], small.results["flashinfer"] = "FlashInfer", timed(13.0)
    assert report.best_peer(run, small) == report.Best(13.0, "FlashInfer", False)
    del prefill.results["fa3"]
    assert report.best_peer(run, prefill) is None


def test_a_wrong_result_has_no_time():
    prefill = recorded_run().rows[2]
    prefill.results["uniattn"] = records.Result("wrong: off", [1.0, 1.0])
    assert prefill.us("uniattn") is None
    assert report.share_of_floor(prefill) is None
    assert report.cell(prefill, "uniattn") == "WRONG"


def test_geomean():
    assert report.geomean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert report.geomean([None]) is None


def test_cliffs_are_found_and_told():
    run = recorded_run()
    (cliff,) = report.cliffs(run)
    assert (cliff.before.x, cliff.after.x) == (3, 4)
    assert cliff.growth == pytest.approx(2.0)
    assert cliff.allowed == pytest.approx(1.3 * 4 / 3)
    assert "batch 3 -> 4: 2.00 times, 1.73 allowed" in report.table(run)
    run.rows[-1].results["uniattn"] = timed(11.0)
    assert report.cliffs(run) == []
    assert "Cliffs of uniattn in the sweep: none" in report.table(run)


def test_moves_need_more_than_the_spread():
    old = recorded_run(400.0)
    assert report.moves(old, recorded_run(403.0)) == []
    assert "nothing moved" in report.moves_text([], old)
    (move,) = report.moves(old, recorded_run(460.0))
    assert (move.row, move.label, move.before_us, move.after_us) == ("decode 64 x 8192", "uniattn", 400.0, 460.0)
    assert re.search(r"decode 64 x 8192 +uniattn: 400.0 -> 460.0 us, \+15.0%", report.moves_text([move], old))
    # Noisy rounds hide the same difference.
    noisy = recorded_run(460.0)
    noisy.rows[1].results["uniattn"].rounds_us = [400.0, 460.0, 470.0]
    assert report.moves(old, noisy) == []


def test_moves_tell_lost_times_and_skip_other_lengths():
    old, new = recorded_run(), recorded_run()
    new.rows[0].results["uniattn"].status = "failed: x"
    new.rows[1].runs = [(63, 1, 8192)]
    new.rows[1].results["uniattn"] = timed(1.0)
    (move,) = report.moves(old, new)
    assert (move.row, move.change) == ("decode 1 x 512", None)
    assert "no time any more" in report.moves_text([move], old)


def test_table():
    run = recorded_run()
    text = report.table(run)
    lines = text.splitlines()
    assert len({len(line) for line in lines if re.match(r"  (decode|prefill) ", line)}) == 1, "columns are aligned"
    # 499.7 of floor; 400 against 500.
    assert re.search(r"decode 64 x 8192 +499\.7 +400\.0 +500\.0 +5,000 +2\.0% +0\.80 +125% +1\.5e-03", text)
    assert re.search(r"decode 1 x 512 .* n/a .* 0\.78\*", text)
    assert re.search(r"prefill 1 x 2048 .*WRONG", text)
    assert "Not run: FlashInfer (No module named 'flashinfer')" in text
    assert "torch SDPA on prefill 1 x 2048: wrong: 3 elements" in text
    assert "uniattn's plan, on the device: at most 3.0 us" in text
    assert "Host time of an eager call, uniattn: 9.0 us, 18.0 with its plan made in the call, 6.0 the plan alone." in text
    assert "card NVIDIA H200" in text
    assert "790 TFLOP/s, 4.30 TB/s" in text


def test_equal_failures_are_told_once():
    run = recorded_run()
    for row in run.rows[:3]:
        row.results["torch-sdpa"].status = "failed: no"
    assert report.failure_texts(run) == [("torch SDPA", "3 rows, the first decode 1 x 512", "failed: no")]


def test_saved_and_loaded(tmp_path):
    run = recorded_run()
    records.save(run, tmp_path / "run.json")
    assert records.load(tmp_path / "run.json") == run


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "rows": [], "host": {}}'])
def test_load_refuses_other_files(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json is"):
        records.load(tmp_path / "x.json")


class Balanced(HTMLParser):
    """Fails on a tag that closes another than the last opened one; collects the text of titles and labels."""

    VOID = frozenset({"meta", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.seen.append(data)


def parsed(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_page():
    run = recorded_run()
    page = html.page(run, report.moves(recorded_run(480.0), run))
    parser = parsed(page)
    words = " ".join(parser.seen)
    assert not parser.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"(src|href)=|@import|url\(", page), "self-contained"
    assert "prefers-color-scheme: dark" in page
    for expected in (
        "NVIDIA H200", "decode 64 x 8192", "400.0", "Roofline", "Sweep", "1 cliff of uniattn's", "FlashInfer (recorded, scaled)",
        "≈ 12.8", "3 elements are NaN or infinite", "-16.7%", "No module named 'flashinfer'", "5,000 (10.0x)",
    ):  # fmt: skip
        assert expected in words, expected
    for key in run.labels:
        assert f"--p-{key}:" in page, "every provider has a colour"


def test_page_of_little():
    run = recorded_run()
    run.rows, run.host = [], {}
    assert "Roofline" not in " ".join(parsed(html.page(run)).seen)
    run = recorded_run()
    run.labels, run.host = {"uniattn": "uniattn"}, {}
    for row in run.rows:
        row.results = {"uniattn": row.results["uniattn"]}
    assert "Time over the floor" in " ".join(parsed(html.page(run, [])).seen)


def test_page_escapes():
    run = recorded_run()
    run.missing["<x>"] = "<script>alert(1)</script>"
    run.rows[0].name = "a <b> & c"
    run.rows[2].results["torch-sdpa"].status = "failed: <i>"
    assert not parsed(html.page(run)).tags & {"script", "x"}


def test_svg_scale_and_ticks():
    scale = svg.Log(1, 1000, 0, 300)
    assert scale(10) == pytest.approx(100)
    assert scale.ticks() == [1, 10, 100, 1000]
    assert svg.Log(20, 90, 0, 1).ticks() == [20, 30, 40, 50, 70]
    assert [svg.short(v) for v in (1, 512, 2048, 131072, 1 << 20, 1000, 0.5)] == ["1", "512", "2k", "128k", "1M", "1,000", "0.5"]
    made = svg.element("a", class_="x", stroke_width=1.0, title="<&>", gone=None)
    assert made == '<a class="x" stroke-width="1" title="&lt;&amp;&gt;"></a>'
