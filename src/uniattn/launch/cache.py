"""Compiled kernels by a key that holds all that a binary depends on, and what a launch of one needs.

A launch through Triton's `kernel[grid](...)` looks at every argument anew: 20 to 25 us of host time for the attention kernel. It
also compiles anew for an integer that is 1 or that 16 divides. Here the caller gives a key of a few values, and a kernel's source
is a function of that key alone, so a key that forgets something cannot get a wrong binary: the source could not use it.

    ATTEND = Kernels(attend_kernel, source)         # source(key) -> Source
    ATTEND[key]((grid, 1, 1), pointers, numbers)    # compiles where the key is new

Triton's version and whether its interpreter runs do not change within a process, so the process stands for them: Triton's own
cache on disk is keyed by its version.
"""

import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from uniattn.errors import UnsupportedError
from uniattn.launch import direct
from uniattn.launch.target import interpreted, on_index

# A launch: the grid's three sizes, then tensors or None in the order of `Source.pointers`, then plain numbers in the order of
# `Source.numbers`, those of a tuple one after another.
Launch = Callable[[tuple[int, int, int], Sequence[Tensor | None], Sequence[int | float]], None]

# What a descriptor of four dims becomes at run time: the map, its sizes, its strides.
MAP_TYPES = ("nvTmaDesc", *("i32",) * 4, *("i64",) * 4)

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Source:
    """What Triton compiles. The kernel takes its pointers first, then its numbers, then its constants.

    Attributes:
        pointers: dtype by name; None where the kernel gets None in the pointer's place.
        numbers: Triton's type by name ("i32", "i64", "fp32"), or a tuple of types for a tuple. Their values are free: unlike
            `kernel[grid](...)`, nothing is compiled for a 1 or for a multiple of 16.
        constants: the constexprs by name.
        divisors: what divides the addresses (in bytes) or the numbers so named; tuples whole. The caller promises it.
        options: Triton's compile options, `num_warps` and so on.
        device: index of the CUDA or HIP device, -1 for the interpreter.
        descriptors: TMA descriptors by name, as Triton's type; the kernel takes them after its pointers. `launch.tensor_map`
            makes the values, which come first among the numbers. The kernel is a Gluon one.
    """

    pointers: dict[str, torch.dtype | None]
    numbers: dict[str, str | tuple[str, ...]]
    constants: dict[str, Any]
    divisors: dict[str, int]
    options: dict[str, Any]
    device: int = -1
    descriptors: dict[str, str] = field(default_factory=dict)

    def signature(self) -> dict[str, str | tuple[str, ...]]:
        """Triton's type of each parameter. A None is a constant to it."""
        pointers = {name: "constexpr" if dtype is None else _POINTERS[dtype] for name, dtype in self.pointers.items()}
        return {**pointers, **self.descriptors, **self.numbers, **dict.fromkeys(self.constants, "constexpr")}

    def constexprs(self) -> dict[str, Any]:
        """Value of each parameter that is compiled in."""
        return {**{name: None for name, dtype in self.pointers.items() if dtype is None}, **self.constants}

    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """The promised divisors, by the parameter's place."""
        places: dict[tuple[int, ...], list[list[Any]]] = {}
        for i, (name, kind) in enumerate(self.signature().items()):
            if name in self.divisors and kind != "constexpr":
                paths = [(i, j) for j in range(len(kind))] if isinstance(kind, tuple) else [(i,)]
                places.update({path: [["tt.divisibility", self.divisors[name]]] for path in paths})
        return places

    def flat_types(self) -> list[str]:
        """Types of the arguments that remain at run time: the pointers that are not None, then the numbers."""
        types: list[str] = [_POINTERS[dtype] for dtype in self.pointers.values() if dtype is not None]
        types.extend(MAP_TYPES * len(self.descriptors))
        for kind in self.numbers.values():
            types.extend(kind if isinstance(kind, tuple) else (kind,))
        return types


@dataclass
class _State:
    num_compilations: int = 0
    direct_is_broken: bool = False
    compiles_for: Any = None
    lock: Any = field(default_factory=threading.RLock)


_state = _State()


def num_compilations() -> int:
    """Kernels compiled in this process so far, or taken from Triton's cache on disk; after `uniattn.warmup` it stands still."""
    return _state.num_compilations


class Compiled(Exception):
    """Raised in place of a launch by a process that only compiles."""

    def __init__(self, kernel: Any):
        super().__init__()
        self.kernel = kernel


def compile_only(target: Any) -> None:
    """From now on this process compiles for Triton's `target`, into Triton's cache on disk, and launches nothing.

    A call of a launch raises `Compiled` at its first kernel. The device is not asked, so that tensors without memory (on "meta") and
    a machine without a GPU will do. Meant for a process of its own, beside one that launches.
    """
    _state.compiles_for = target


class Kernels(dict[Hashable, Launch]):
    """The launches of one kernel by key. A subscript is one lookup in C where the key is known, and compiles where it is not.

    Args:
        fn: the `@triton.jit` function.
        source: from a key to what must be compiled for it. It must use nothing but the key, apart from what a process cannot
            change.
    """

    def __init__(self, fn: Any, source: Callable[[Any], Source]):
        super().__init__()
        self.fn = fn
        self.source = source

    def __missing__(self, key: Hashable) -> Launch:
        with _state.lock:
            launch = self.get(key)
            if launch is None:
                launch = self[key] = self._compile(key, self.source(key))
                _state.num_compilations += 1
            return launch

    def _compile(self, key: Hashable, source: Source) -> Launch:
        if _state.compiles_for is not None:
            raise Compiled(direct.compiled(self.fn, source, _state.compiles_for))
        if source.device < 0 and interpreted():
            _require_interpreter(self.fn)
        plain = _plain(self.fn, source)
        if interpreted() or _state.direct_is_broken:
            return plain
        with on_index(source.device):
            try:
                launch = direct.launch(self.fn, source)
            except direct.UNEXPECTED as error:
                _give_up(error)
                return plain

        def first(grid: tuple[int, int, int], pointers: Sequence[Tensor | None], numbers: Sequence[int | float]) -> None:
            """The first launch finds out whether Triton's launcher still takes its arguments as it did."""
            try:
                launch(grid, pointers, numbers)
            except direct.UNEXPECTED as error:
                _give_up(error)
                self[key] = plain
                plain(grid, pointers, numbers)
            else:
                self[key] = launch

        return first


def _require_interpreter(fn: Any) -> None:
    """Raise where `fn` was made for a GPU: Triton decides that when a kernel is defined, whatever the environment says later."""
    from triton.runtime.jit import JITFunction

    if isinstance(fn, JITFunction):
        raise UnsupportedError(
            "TRITON_INTERPRET",
            "set after the kernels were made for a GPU",
            "Triton chooses its interpreter when the kernels are imported",
            "set TRITON_INTERPRET=1 before Python starts",
        )


def _give_up(error: Exception) -> None:
    """Launch through `kernel[grid](...)` from now on: slower for the host, and it works as long as Triton itself does."""
    if not _state.direct_is_broken:
        _state.direct_is_broken = True
        warnings.warn(
            f"uniattn's direct launch does not work with this Triton ({type(error).__name__}: {error}); calls go through "
            "Triton's own launch, which takes about 20 us more of host time each and may compile for new strides",
            RuntimeWarning,
            stacklevel=2,
        )


def _plain(fn: Any, source: Source) -> Launch:
    """The launch that Triton offers to everyone, which the interpreter needs too."""

    def launch(grid: tuple[int, int, int], pointers: Sequence[Tensor | None], numbers: Sequence[int | float]) -> None:
        values = iter(numbers)
        args = [tuple(next(values) for _ in kind) if isinstance(kind, tuple) else next(values) for kind in source.numbers.values()]
        fn[grid](*pointers, *args, **source.constants, **source.options)

    return launch
