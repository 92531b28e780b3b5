"""Triton's NVIDIA driver over a libcuda that launches nothing, for a process without a GPU. Run as a program it prints what
launches through `uniattn.launch.cache` come to, as JSON; the tests read that.

    python fake_cuda.py FOLDER      # a folder to build the library in
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

BYTES = {"*": 8, "i32": 4, "i64": 8, "fp32": 4}


def build(folder: Path) -> ctypes.CDLL:
    """Compile fake_libcuda.c and load it, so that Triton finds it in the place of the real one."""
    import triton

    include = Path(triton.__file__).parent / "backends/nvidia/include"
    path = folder / "libcuda.so.1"
    compiler = shutil.which("gcc") or shutil.which("cc")
    source = Path(__file__).with_name("fake_libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", f"-I{include}", "-o", path, source], check=True)
    (folder / "libcuda.so").symlink_to(path)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def activate(arch: int = 90) -> None:
    """Make Triton use its NVIDIA driver with the fake library, as if the current device were of that architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):
        def __init__(self):
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 77
            self.get_device_capability = lambda device=0: divmod(arch, 10)

        def get_current_target(self):
            return GPUTarget("cuda", arch, 32)

    triton.runtime.driver.set_active(Driver())


def last_launch(library: ctypes.CDLL) -> dict:
    """What the last launch came to: its number, grid, threads, and parameters as the chip would see them."""
    grid, block, shared = (ctypes.c_uint * 3)(), ctypes.c_uint(), ctypes.c_uint()
    params = (ctypes.c_ulonglong * 128)()
    library.fake_last(grid, ctypes.byref(block), ctypes.byref(shared), params)
    return dict(count=library.fake_num_launches(), grid=list(grid), threads=block.value, params=list(params))


def main(folder: str) -> None:
    library = build(Path(folder))
    import torch

    activate()
    import triton

    from uniattn.launch import cache, merge, write_kv

    def expect(source):
        sizes = [BYTES[kind[0] if kind[0] == "*" else kind] for kind in source.flat_types()]
        library.fake_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    def show(name, kernels, tensors):
        source = kernels.source(list(kernels)[-1])
        result = last_launch(library)
        result["params"] = result["params"][: len(source.flat_types())]
        result["addresses"] = [x.data_ptr() for x in tensors]
        result["compilations"] = cache.num_compilations()
        results[name] = result

    results: dict = {"triton": triton.__version__}
    k, v = torch.zeros(3, 2, 64), torch.zeros(3, 2, 64)
    k_cache, v_cache = torch.zeros(2, 5, 4, 2, 64)
    slots = torch.arange(3)
    expect(write_kv.source((-1, torch.float32, torch.int64, True, 64, 64, 4, 128)))
    for name in ("miss", "hit"):
        write_kv.write_kv(k, v, k_cache, v_cache, slots)
        show(name, write_kv.KERNELS, (k, v, k_cache, v_cache, slots))

    outs, lses, out = torch.zeros(3, 5, 2, 64), torch.zeros(3, 2, 5), torch.zeros(5, 2, 64)
    expect(merge.source((-1, torch.float32, torch.float32, True, False, 64)))
    merge.merge(outs, lses, out, None)
    show("absent pointer", merge.KERNELS, (outs, lses, out))

    names: list = []

    def enter(metadata):
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(enter)
    merge.merge(outs, lses, out, None)
    triton.knobs.runtime.launch_enter_hook.remove(enter)
    show("hooked", merge.KERNELS, (outs, lses, out))
    results["names"] = names
    results["broken"] = cache._state.direct_is_broken
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
