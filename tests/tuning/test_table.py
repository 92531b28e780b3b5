"""A table on disk: what comes back, and what of an edited, stale or foreign one is used."""

import json
from dataclasses import asdict, replace

import pytest
from tuning_tools import DECODE, H200, entry, table

from uniattn.schedule import hopper
from uniattn.schedule.tiles import Tiles
from uniattn.tuning import kernels
from uniattn.tuning.table import load, save, usable

TILES = Tiles(16, 64, 3, 4, bulk=True, programs_per_sm=5, item_overhead=128)
HOPPER = hopper.choose(128, 128)


def test_what_is_saved_comes_back(tmp_path):
    made = table(entry(DECODE, TILES), entry(DECODE.bucket, HOPPER), entry(DECODE.bucket, TILES))
    save(made, tmp_path / "folder" / "h200.json")
    assert load(tmp_path / "folder" / "h200.json") == (made, [])
    save(table(), tmp_path / "empty.json")
    assert load(tmp_path / "empty.json") == (table(), [])
    # One answer a line, for diffs.
    assert sum('"level"' in line for line in (tmp_path / "folder" / "h200.json").read_text().splitlines()) == 3
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["h200.json"]


def test_answers_by_level_and_key(tmp_path):
    save(table(entry(DECODE, TILES), entry(DECODE.bucket, HOPPER), entry(DECODE.bucket, TILES)), tmp_path / "t.json")
    found = usable(tmp_path / "t.json", H200, "3.6.0")
    assert (found.passed_over, found.notes, found.broken) == ((), (), False)
    assert [e.tiles for e in found.answers["exact"][DECODE]] == [TILES]
    assert [e.tiles for e in found.answers["bucket"][DECODE.bucket]] == [HOPPER, TILES]


def edited(tmp_path, change):
    """A table of two entries, the second with `change` made to its JSON by hand."""
    path = tmp_path / "t.json"
    save(table(entry(DECODE, TILES), entry(DECODE.bucket, TILES)), path)
    data = json.loads(path.read_text())
    change(data["entries"][1])
    path.write_text(json.dumps(data))
    return usable(path, H200, "3.6.0")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda e: e["tiles"].update(block_n=48), "entry 2 (bucket): block_n is 48; it must be a power of two, at least 16"),
        (lambda e: e["tiles"].update(num_stages=30), "a program may have 232448"),
        (lambda e: e["tiles"].update(num_warps="4"), "num_warps is '4'; it must be a power of two"),
        (lambda e: e["tiles"].update(colour="red"), "entry 2: TypeError"),
        (lambda e: e["tiles"].update(kernel="cuda"), "entry 2: ValueError: kernel is 'cuda'; this version has triton, hopper"),
        (lambda e: e["key"].update(rows="16"), "entry 2: TypeError: key: rows is '16'; it must be a int"),
        (lambda e: e["key"].update(itemsize=True), "entry 2: TypeError: key: itemsize is True"),
        (lambda e: e["key"].pop("pairs"), "entry 2: TypeError"),
        (lambda e: e.update(level="guess"), "entry 2: ValueError: level is 'guess'; it must be one of exact, bucket"),
        (lambda e: e.update(us="quick"), "entry 2: ValueError"),
        (lambda e: e.pop("tiles"), "entry 2: KeyError: 'tiles'"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_left_out_with_the_reason(tmp_path, change, told):
    assert edited(tmp_path, lambda e: None).answers["bucket"]
    found = edited(tmp_path, change)
    assert found.broken
    assert len(found.passed_over) == 1
    assert told in found.passed_over[0]
    assert not found.answers["bucket"]
    assert found.answers["exact"]


@pytest.mark.parametrize("text", ["", "{", "[]", '"table"', '{"format": 2}', '{"format": 1, "card": {}}', "\xff\xfe"])
def test_what_is_no_table_answers_nothing(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("latin-1"))
    found = usable(path, H200, "3.6.0")
    assert found.broken
    assert not found.answers
    assert found.passed_over


def test_another_card_is_passed_over(tmp_path):
    save(table(entry(DECODE, TILES)), tmp_path / "t.json")
    found = usable(tmp_path / "t.json", replace(H200, num_sms=114), "3.6.0")
    assert found.passed_over == ("it was measured on another card: num_sms 132, here 114",)
    assert not found.broken
    assert not found.answers
    # A driver that names the card otherwise does not make it another one.
    assert usable(tmp_path / "t.json", replace(H200, name="H200"), "3.6.0").answers["exact"]


def test_another_source_is_passed_over_by_kernel(tmp_path):
    sources = {"triton": "0" * 12, "hopper": kernels.source_hash("hopper")}
    save(table(entry(DECODE, TILES), entry(DECODE.bucket, HOPPER), entry(DECODE.bucket, TILES), sources=sources), tmp_path / "t.json")
    found = usable(tmp_path / "t.json", H200, "3.6.0")
    assert found.passed_over == ("2 entries for the kernel triton, whose source has changed since: run uniattn tune",)
    assert not found.broken
    assert [e.tiles for e in found.answers["bucket"][DECODE.bucket]] == [HOPPER]


def test_another_triton_is_told(tmp_path):
    save(table(entry(DECODE, TILES)), tmp_path / "t.json")
    assert usable(tmp_path / "t.json", H200, "3.7.1").notes == ("measured with Triton 3.6.0; this is 3.7.1",)
    assert usable(tmp_path / "t.json", H200, "3.7.1").answers == usable(tmp_path / "t.json", H200, "3.6.0").answers
    assert usable(tmp_path / "t.json", H200, None).notes == ()


SOURCE = '''"""A kernel."""

import triton


def kernel(a, b):
    """Adds."""
    # Twice.
    return a + b + f"""{a}"""
'''


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("# Twice.", "# Once, or so."), True), (('"""Adds."""', '"""Adds two."""'), True), (('"""A kernel."""\n', ""), True),
        (("    ", "  "), True), (("import triton\n", "import triton\n\n\n"), True), (("(a, b)", "(\n    a, b\n)"), True),
        (("a + b", "a - b"), False), (('"""{a}"""', '"""{b}"""'), False), (("(a, b)", "(a, b=1)"), False),
    ],
)  # fmt: skip
def test_what_changes_a_kernels_hash(change, same):
    assert change[0] in SOURCE
    assert (kernels.code(SOURCE.replace(*change)) == kernels.code(SOURCE)) == same


def test_each_kernel_has_a_hash_of_its_own():
    hashes = {kernels.source_hash(name) for name in kernels.KERNELS}
    assert len(hashes) == len(kernels.KERNELS)
    assert all(len(one) == 12 for one in hashes)


def test_tiles_are_plain_json():
    assert Tiles(**json.loads(json.dumps(asdict(HOPPER)))) == HOPPER
