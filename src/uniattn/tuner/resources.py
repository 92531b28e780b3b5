"""What a compiled kernel takes of the chip: registers, spills, shared memory, and whether it spills where it matters."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Instructions of the matrix units: mma, wgmma and tcgen05 in SASS, MFMA and WMMA in AMD's assembly.
_MATRIX = re.compile(r"\b(?:[HIQ]MMA|[HIQ]GMMA|UTC[HQI]MMA|v_mfma|v_wmma|v_smfmac)")
# fp32 products run on the plain cores: a loop with at least this many multiply-adds is such a product.
_MANY_FMAS = 64
_FMA = re.compile(r"\b(?:FFMA2?|v_(?:pk_)?(?:fma|fmac|mac)_f32)")
_SPILL = re.compile(r"\b(?:LDL|STL|scratch_load|scratch_store)")


@dataclass(frozen=True)
class Resources:
    """Attributes:
    registers: a thread's 32-bit registers; on AMD its vector and accumulation registers together.
    spills: bytes of spilled registers a thread (NVIDIA: its stack), or spilled vector registers (AMD).
    spills_in_loop: loads and stores of spilled registers within loops that multiply matrices.
    shared: bytes of shared memory of a program.
    """

    registers: int
    spills: int
    spills_in_loop: int
    shared: int


def of(kernel, backend: str) -> Resources:
    """Resources of Triton's compiled kernel for `backend` "cuda" or "hip"."""
    return _of_cubin(kernel) if backend == "cuda" else _of_amdgcn(kernel)


def _of_cubin(kernel) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(path))
        stack = _number(r"STACK:(\d+)", usage)
        listing = _tool("nvdisasm", "-c", str(path)) if stack else ""
    return Resources(_number(r"REG:(\d+)", usage), stack, spills_in_loops(listing), kernel.metadata.shared)


def _of_amdgcn(kernel) -> Resources:
    text = kernel.asm["amdgcn"]
    registers = _number(r"\.vgpr_count:\s*(\d+)", text)
    return Resources(registers, _number(r"\.vgpr_spill_count:\s*(\d+)", text), spills_in_loops(text), kernel.metadata.shared)


def spills_in_loops(listing: str) -> int:
    """Spill instructions within the innermost loops that multiply matrices; `listing` is assembly with labels.

    A loop is what lies between a label and a later branch back to it; the product's own loop is the innermost around it.
    """
    lines = listing.splitlines()
    labels = {}
    loops = []
    for i, line in enumerate(lines):
        if label := re.match(r"\s*(\.L[\w$.]+):", line):
            labels[label[1]] = i
        elif (branch := re.search(r"\b(?:BRA|s_c?branch\w*)\b.*?(\.L[\w$.]+)", line)) and branch[1] in labels:
            loops.append((labels[branch[1]], i))
    multiplying = [(a, b) for a, b in loops if _multiplies(lines[a:b])]
    innermost = [(a, b) for a, b in multiplying if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in multiplying)]
    return sum(bool(_SPILL.search(line)) for a, b in innermost for line in lines[a:b])


def _multiplies(lines: list[str]) -> bool:
    return any(_MATRIX.search(line) for line in lines) or sum(bool(_FMA.search(line)) for line in lines) >= _MANY_FMAS


def _tool(name: str, *args: str) -> str:
    """Run one of the NVIDIA tools that Triton brings along."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0
