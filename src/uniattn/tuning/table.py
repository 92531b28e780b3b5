"""A card's table of measured answers, as JSON: what it holds, how it is read and written, and which of it may be used here.

    {"format": 1, "card": {"name": "NVIDIA H200", "arch": 90, ...}, "triton": "3.6.0", "sources": {"triton": "0123456789ab"},
     "written": "2026-01-02 03:04 UTC",
     "entries": [{"level": "bucket", "key": {"itemsize": 2, "head_dim": 128, ...},
                  "tiles": {"block_m": 16, "block_n": 32, ...}, "us": 81.2, "default_us": 87.1,
                  "measured_on": ["decode 32 x 2048"], "held_out": ["24q1s1229 ..."]}]}

Where several kernels have an entry for one key, the first one that can serve a call answers; the order is the table's preference.

A table is for a person to read and to edit: nothing in it is trusted. `usable` checks each configuration against the chip.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from uniattn.launch.target import Target
from uniattn.schedule.tiles import Tiles
from uniattn.tuning import limits
from uniattn.tuning.kernels import KERNELS, source_hash
from uniattn.tuning.problem import Bucket, Problem, page_class

FORMAT = 1
#: From an answer's level to the type of its key, the surest first.
LEVELS: dict[str, type[Problem] | type[Bucket]] = {"exact": Problem, "bucket": Bucket}


@dataclass(frozen=True)
class Entry:
    """One measured answer.

    Attributes:
        level: "exact" or "bucket".  key: the problem or the class of problems that it answers.
        tiles: the configuration of the kernel `tiles.kernel`.
        us, default_us: microseconds with `tiles` and with what would be chosen without a table, geometric means over `measured_on`.
        measured_on, held_out: the batches that it was found on, and others that it was no slower on.
    """

    level: str
    key: Problem | Bucket
    tiles: Tiles
    us: float
    default_us: float
    measured_on: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()


@dataclass
class Table:
    """Measured answers of one card.

    Attributes:
        card: the facts that a table's card must share with the one at hand: name, arch, num_sms, max_shared_bytes.
        triton: version that it was measured with.  sources: hash of each kernel's source then.  written: when.
    """

    card: dict[str, Any]
    triton: str
    sources: dict[str, str]
    written: str = ""
    entries: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class Usable:
    """What of a table may be used on the card at hand.

    Attributes:
        path: where it was read.
        answers: entries by level and key, in the table's order where several kernels have one.
        notes: what is told beside an answer of this table.  passed_over: what is not used, and why.
        broken: whether the file or an entry is wrong, not merely made for something else.
    """

    path: str
    answers: Mapping[str, Mapping[Problem | Bucket, list[Entry]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    broken: bool = False


def facts(target: Target) -> dict[str, Any]:
    """`Table.card` of a chip."""
    return {"name": target.name, "arch": target.arch, "num_sms": target.num_sms, "max_shared_bytes": target.max_shared_bytes}


def save(table: Table, path: Path) -> None:
    """Write `table`; whoever reads `path` sees the old file or the new one, never a part."""
    data = {"format": FORMAT, **{f.name: getattr(table, f.name) for f in fields(table)}}
    data["entries"] = [{**vars(entry), "key": entry.key._asdict(), "tiles": asdict(entry.tiles)} for entry in table.entries]
    # One entry a line: a line of a diff is then one answer.
    entries = ",\n".join("  " + json.dumps(entry) for entry in data.pop("entries"))
    head = json.dumps(data, indent=1)[:-2]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(f'{head},\n "entries": [\n{entries}\n ]\n}}\n' if entries else f'{head},\n "entries": []\n}}\n', encoding="utf-8")
    part.replace(path)


def load(path: Path) -> tuple[Table, list[str]]:
    """A table and what is wrong with those of its entries that were left out. Raises `ValueError` where the whole is no table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"it is of format {data['format']!r}; this version reads {FORMAT}")
        table = Table(dict(data["card"]), str(data["triton"]), dict(data["sources"]), str(data.get("written", "")))
        raw = list(data["entries"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"it is no tuning table ({type(error).__name__}: {error})") from error
    faults = []
    for number, one in enumerate(raw, 1):
        try:
            table.entries.append(_entry(one))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            faults.append(f"entry {number}: {type(error).__name__}: {error}")
    return table, faults


def _entry(data: dict[str, Any]) -> Entry:
    level, tiles = data["level"], Tiles(**data["tiles"])
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; it must be one of {', '.join(LEVELS)}")
    if tiles.kernel not in KERNELS:
        raise ValueError(f"kernel is {tiles.kernel!r}; this version has {', '.join(KERNELS)}")
    key = LEVELS[level](**data["key"])
    for name, kind in LEVELS[level].__annotations__.items():
        if type(getattr(key, name)) is not kind:
            raise TypeError(f"key: {name} is {getattr(key, name)!r}; it must be a {kind.__name__}")
    return Entry(
        level, key, tiles, float(data["us"]), float(data["default_us"]),
        tuple(map(str, data.get("measured_on", ()))), tuple(map(str, data.get("held_out", ()))),
    )  # fmt: skip


def usable(path: Path, target: Target, triton: str | None) -> Usable:
    """What of the table at `path` may be used on `target`; `triton` is the version that runs, None where there is none.

    A table of another card, or of a kernel whose source has changed since, is passed over: what it says was found for something
    else. Another Triton is told, but its table serves: the heuristic was not measured with this one either.
    """
    try:
        table, faults = load(path)
    except ValueError as error:
        return Usable(str(path), passed_over=(str(error),), broken=True)
    differing = [name for name, value in facts(target).items() if name != "name" and table.card.get(name) != value]
    if differing:
        words = ", ".join(f"{name} {table.card.get(name)!r}, here {facts(target)[name]!r}" for name in differing)
        return Usable(str(path), passed_over=(f"it was measured on another card: {words}",))
    passed_over = [*faults]
    broken = bool(faults)
    answers: dict[str, dict[Problem | Bucket, list[Entry]]] = {level: {} for level in LEVELS}
    stale = {name for name in KERNELS if table.sources.get(name) != source_hash(name)}
    for name in sorted(stale & {entry.tiles.kernel for entry in table.entries}):
        count = sum(entry.tiles.kernel == name for entry in table.entries)
        passed_over.append(f"{count} entries for the kernel {name}, whose source has changed since: run uniattn tune")
    for number, entry in enumerate(table.entries, 1):
        if entry.tiles.kernel in stale:
            continue
        fault = check(entry, target)
        if fault is None:
            answers[entry.level].setdefault(entry.key, []).append(entry)
        else:
            passed_over.append(f"entry {number} ({entry.level}): {fault}")
            broken = True
    notes = () if triton in (table.triton, None) else (f"measured with Triton {table.triton}; this is {triton}",)
    return Usable(str(path), answers, notes, tuple(passed_over), broken)


def check(entry: Entry, target: Target) -> str | None:
    """Why `target` cannot run an entry's configuration, None where it can."""
    key = entry.key
    pages = key.pages if isinstance(key, Bucket) else page_class(key.page_size)
    return limits.fault(entry.tiles, key.head_dim, key.v_head_dim, key.itemsize, pages != "contiguous", target)
