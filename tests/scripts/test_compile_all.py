"""Ahead-of-time compilation for five chips without one: a slice of it, and how it reads assembly."""

import subprocess
import sys
from pathlib import Path

import pytest

from uniattn.tuner import resources

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


@pytest.mark.timeout(600)
def test_a_slice_compiles_for_every_chip():
    done = subprocess.run([sys.executable, SCRIPTS / "compile_all.py", "--slice"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 with a fault" in done.stdout
