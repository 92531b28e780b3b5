"""The answer: which kernel and tiles serve a batch, and who says so. Pure functions of sizes, chip and tables."""

import functools
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from uniattn.launch import triton_version
from uniattn.launch.target import Target
from uniattn.schedule import hopper
from uniattn.schedule.tiles import Tiles
from uniattn.tuning import heuristic
from uniattn.tuning.problem import Bucket, Problem, page_class
from uniattn.tuning.table import LEVELS, Entry, Usable, usable

SHIPPED = Path(__file__).parent / "tables"
VARIABLE = "UNIATTN_TUNING_DIR"


@dataclass(frozen=True)
class Choice:
    """Tiles, which name their kernel.

    Attributes:
        level: "exact", "bucket" or "heuristic": who answered.
        entry, table: what answered, None for the heuristic.
    """

    tiles: Tiles
    level: str
    entry: Entry | None = None
    table: Usable | None = None


def choose(problem: Problem, target: Target, tables: Sequence[Usable], kernels: Sequence[str]) -> Choice:
    """The answer for `problem` by the first of `tables` that has an exact one, else one for its bucket, else by the heuristic.

    `kernels` are those that can serve the batch, first the one that the chip rewards. A table may prefer another that it measured
    against that one; entries without that one say nothing here.
    """
    for level in LEVELS:
        key: Problem | Bucket = problem if level == "exact" else problem.bucket
        for table in tables:
            entry = _preferred(table.answers.get(level, {}).get(key, ()), kernels)
            if entry is not None:
                return Choice(entry.tiles, level, entry, table)
    return Choice(default(problem, target, kernels), "heuristic")


def _preferred(entries: Sequence[Entry], kernels: Sequence[str]) -> Entry | None:
    """The entry of one key that answers where `kernels` can serve."""
    able = [entry for entry in entries if entry.tiles.kernel in kernels]
    return able[0] if any(entry.tiles.kernel == kernels[0] for entry in able) else None


def default(problem: Problem, target: Target, kernels: Sequence[str]) -> Tiles:
    """What is chosen where no table answers."""
    p = problem
    if kernels[0] == "hopper":
        return hopper.choose(p.head_dim, p.v_head_dim)
    return heuristic.choose(p.rows, p.head_dim, p.v_head_dim, p.itemsize, target, p.page_size > 0)


def every(
    head_dim: int, v_head_dim: int, itemsize: int, page_size: int, windowed: bool, target: Target, kernels: Sequence[str]
) -> list[Tiles]:
    """All that `choose` can answer for a layer of these facts, whatever its batches and head counts; `page_size` 0: contiguous."""
    if kernels[0] == "hopper":
        found = [hopper.choose(head_dim, v_head_dim)]
    else:
        found = heuristic.every(head_dim, v_head_dim, itemsize, target, page_size > 0)
    for table in tables_of(target):
        for by_key in table.answers.values():
            for key, entries in by_key.items():
                pages = key.pages if isinstance(key, Bucket) else page_class(key.page_size)
                same = (key.head_dim, key.v_head_dim, key.itemsize, key.windowed) == (head_dim, v_head_dim, itemsize, windowed)
                entry = _preferred(entries, kernels) if same and pages == page_class(page_size) else None
                if entry is not None:
                    found.append(entry.tiles)
    return list(dict.fromkeys(found))


def tables_of(target: Target) -> tuple[Usable, ...]:
    """The user's table of a card and the shipped one, those that exist; read once a process for each card and folder."""
    return () if target.backend == "cpu" else _read(user_folder(), target)


@functools.cache
def _read(folder: Path, target: Target) -> tuple[Usable, ...]:
    paths = [place / f"{card_of(target.name)}.json" for place in (folder, SHIPPED)]
    tables = tuple(usable(path, target, triton_version.installed()) for path in paths if path.is_file())
    for table in tables:
        if table.broken:
            warnings.warn(f"uniattn does not use all of {table.path}: {'; '.join(table.passed_over)}", RuntimeWarning, stacklevel=2)
    return tables


def user_folder() -> Path:
    """Where `uniattn tune` writes: `UNIATTN_TUNING_DIR`, else `uniattn/tuning` in the user's cache folder."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "uniattn" / "tuning"


def card_of(name: str) -> str:
    """The name of a card's table: "NVIDIA H200" is h200, "AMD Instinct MI300X" mi300x."""
    words = re.findall(r"[a-z0-9]+(?:\.[a-z0-9]+)*", name.lower())
    return "-".join(word for word in words if word not in ("nvidia", "amd", "instinct", "geforce")) or "card"
