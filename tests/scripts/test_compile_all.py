"""Ahead-of-time compilation for five chips without one: a slice of it, and how it reads assembly."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from uniattn.schedule import hopper
from uniattn.schedule.tiles import Tiles
from uniattn.tuner import resources
from uniattn.tuning.cards import CARDS
from uniattn.tuning.problem import problem
from uniattn.tuning.table import Entry, Table, facts, save

SCRIPTS = Path(__file__).parents[2] / "scripts"

SASS = """
.L_x_1:
        LDL R1, [R2] ;
    @P0 BRA `(.L_x_1) ;
.L_x_2:
        STL [R1], R2 ;
.L_x_3:
        HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], !UPT ;
        LDL.LU R3, [R1+0x10] ;
        STL [R1+0x10], R3 ;
   @!P1 BRA `(.L_x_3) ;
        LDL R1, [R2] ;
   @!P2 BRA `(.L_x_2) ;
        STL [R1], R2 ;
"""
AMD = """
.LBB0_1:
	v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
	scratch_load_dword v1, off, off
	s_cbranch_scc1 .LBB0_1
	scratch_store_dword off, v1, off
"""


def test_spills_count_where_matrices_are_multiplied():
    assert resources.spills_in_loops(SASS) == 2
    assert resources.spills_in_loops(AMD) == 1
    assert resources.spills_in_loops("") == 0


def test_a_loop_of_many_multiply_adds_is_a_product():
    many, few = (".L_x_1:\n LDL R1, [R2] ;\n" + " FFMA R0, R1, R2, R3 ;\n" * n + " @P0 BRA `(.L_x_1) ;\n" for n in (64, 10))
    assert resources.spills_in_loops(many) == 1
    assert resources.spills_in_loops(few) == 0


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("compile_all", SCRIPTS / "compile_all.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_that_a_table_answers_is_compiled(script, tmp_path):
    """A table of an H200: a windowed answer, one for contiguous K/V, the same one twice. Another card's table is another chip's."""
    bucket = problem(32, 32, 1, 32, 8, 128, 128, 2, 16, False).bucket
    tiles = Tiles(16, 64, 3, 4, bulk=False), hopper.choose(128, 128)
    contiguous = bucket._replace(pages="contiguous", head_dim=64, v_head_dim=64)
    keys = [bucket._replace(windowed=True), bucket, bucket._replace(rows=64), contiguous]
    entries = [Entry("bucket", key, tiles[0], 1.0, 2.0) for key in keys] + [Entry("bucket", bucket, tiles[1], 1.0, 2.0)]
    save(Table(facts(CARDS["h200"]), "3.6.0", {}, entries=entries), tmp_path / "h200.json")
    found = [(name, *dims, t, features) for name, *dims, t, features in script.table_problems("sm_90", tmp_path)]
    assert [(dims, t, features[0]) for _, *dims, t, features in found] == [
        ([128, 128], tiles[0], {"has_window": True}),
        ([128, 128], tiles[0], {"has_window": False}),
        ([64, 64], tiles[0], {"has_window": False, **script.CONTIGUOUS}),
        ([128, 128], tiles[1], {"has_window": False}),
    ]
    assert not list(script.table_problems("sm_80", tmp_path))
    assert script.uncovered(tmp_path) == []
    save(Table(facts(replace(CARDS["l40s"], arch=89)), "3.6.0", {}), tmp_path / "l40s.json")
    assert [(r["problem"], r["fault"]) for r in script.uncovered(tmp_path)] == [("l40s.json", "no chip here is the table's")]
    fewer = [replace(e, tiles=replace(e.tiles, num_stages=3)) for e in entries]
    save(Table(facts(CARDS["h200"]), "3.6.0", {}, entries=fewer), tmp_path / "h200.json")
    listed = {"attend": [], "hopper": []}
    for kernel, *_, key, _ in script.configurations("sm_90", tables=tmp_path):
        listed.setdefault(kernel, []).append(key)
    assert tiles[0].compiled_in in [key.tiles for key in listed["attend"]]
    assert 3 in [key.kv_stages for key in listed["hopper"]]
    assert 3 not in [key.tiles[2] for key in listed["attend"] if key.tiles[0] == 128]


def test_a_table_with_a_wrong_entry_stops_it(script, tmp_path):
    save(Table(facts(CARDS["h200"]), "3.6.0", {}), tmp_path / "h200.json")
    (tmp_path / "h200.json").write_text((tmp_path / "h200.json").read_text().replace("[]", '[{"level": "guess"}]'))
    with pytest.raises(ValueError, match=r"h200\.json: entry 1"):
        script.table_problems("sm_90", tmp_path)


@pytest.mark.timeout(600)
def test_a_slice_compiles_for_every_chip():
    done = subprocess.run([sys.executable, SCRIPTS / "compile_all.py", "--slice"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 with a fault" in done.stdout
