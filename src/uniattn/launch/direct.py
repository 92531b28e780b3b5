"""Compiling and launching past Triton's front: the one place that knows what differs between Triton's versions.

It stands on what `kernel[grid](...)` itself ends in, the same in Triton 3.6 to 3.9 on NVIDIA and AMD: `triton.compile(ASTSource)`
gives a kernel whose `run(grid_x, grid_y, grid_z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook,
*args)` launches. Three things make it cheap, measured on one CPU with 24 pointers and numbers and 21 constants (an attention
launch; `kernel[grid](...)`: 37 us):

- constants and absent pointers are not passed at all: 3.6 us becomes 3.1;
- addresses are passed as integers, so that the driver is not asked about each: 2.4;
- on NVIDIA, `run` is stepped over to the C function that it calls, as its Python only allocates scratch, of which our kernels
  use none: 1.3.
"""

import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from uniattn.launch.cache import Launch, Source

# What a changed interface would raise. A kernel that does not compile or fit raises other errors, which are the caller's to see.
UNEXPECTED = (AttributeError, ImportError, TypeError)

Grid = tuple[int, int, int]


def compiled(fn: Any, source: "Source", target: Any = None) -> Any:
    """Triton's compiled kernel for `source`, not loaded yet; `target` None means the current device's."""
    import triton
    from triton.compiler import ASTSource

    if source.descriptors:
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    ast = ASTSource(fn=fn, signature=source.signature(), constexprs=source.constexprs(), attrs=source.attributes())
    # Asked for by name, as Triton 3.10 leaves it off otherwise and 3.9 warns of that.
    options = {"enable_fp_fusion": True, **source.options}
    # What a user asks of every compilation through Triton's knobs: assertions on the device, instrumentation by a profiler.
    if triton.knobs.runtime.debug:
        options["debug"] = True
    if mode := getattr(triton.knobs.compilation, "instrumentation_mode", ""):
        options["instrumentation_mode"] = mode
    if target is None:
        target = triton.runtime.driver.active.get_current_target()
    return triton.compile(ast, target=target, options=options)


def launch(fn: Any, source: "Source") -> "Launch":
    """Compile `source`, load it on the current device and return its launch."""
    import triton

    kernel = compiled(fn, source)
    # The launcher is made from the kernel's source at the first use of `run`: shown the run-time arguments alone, it takes those.
    kernel.src = SimpleNamespace(signature=dict(enumerate(source.flat_types())), constants={}, fn=fn)
    # Descriptors come as what the launcher would make of them.
    if source.descriptors:
        kernel.metadata = kernel.metadata._replace(tensordesc_meta=None)
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
    present = itemgetter(*[i for i, dtype in enumerate(source.pointers.values()) if dtype is not None])
    address, stream_of, device = Tensor.data_ptr, triton.runtime.driver.active.get_current_stream, source.device
    knobs = triton.knobs.runtime

    def hooked(grid: Grid, args: Sequence[Any]) -> None:
        """As `kernel[grid](...)` launches, with the hooks of profilers."""
        stream = stream_of(device)
        metadata = kernel.launch_metadata(grid, stream, *args)
        run(*grid, stream, function, packed, metadata, knobs.launch_enter_hook, knobs.launch_exit_hook, *args)

    def has_hooks() -> Any:
        try:
            return knobs.launch_enter_hook.calls or knobs.launch_exit_hook.calls
        except AttributeError:  # someone put a function or None in the chain's place
            return True

    raw = _c_function(run, triton.__version__)
    if raw is None:

        def launch(grid: Grid, pointers: Sequence[Tensor | None], numbers: Sequence[int | float]) -> None:
            args = (*map(address, present(pointers)), *numbers)
            if has_hooks():
                hooked(grid, args)
            else:
                run(*grid, stream_of(device), function, packed, None, None, None, *args)

    else:

        def launch(grid: Grid, pointers: Sequence[Tensor | None], numbers: Sequence[int | float]) -> None:
            args = (*map(address, present(pointers)), *numbers)
            if has_hooks():
                hooked(grid, args)
            else:
                raw(grid, stream_of(device), function, packed, args)

    return launch


def _c_function(run: Any, version: str) -> Callable[..., None] | None:
    """What `run` of a known Triton calls in C on NVIDIA, or None: then `run` itself must do."""
    match = re.match(r"3\.(\d+)\.", version)
    minor = int(match[1]) if match else 0
    scratch = ("global_scratch_size", "profile_scratch_size")
    if not 6 <= minor <= 9 or type(run).__name__ != "CudaLauncher" or any(getattr(run, name) for name in scratch):
        return None
    c, cooperative, pdl = run.launch, run.launch_cooperative_grid, run.launch_pdl
    if minor == 6:
        return lambda grid, stream, function, packed, args: c(
            *grid, stream, function, cooperative, pdl, None, None, packed, None, None, None, *args
        )
    if getattr(run, "gsan_enabled", False):
        return None
    kinds, types = run.arg_annotations, run.kernel_signature
    return lambda grid, stream, function, packed, args: c(
        *grid, stream, function, cooperative, pdl, packed, None, None, None, None, None, kinds, types, args
    )
