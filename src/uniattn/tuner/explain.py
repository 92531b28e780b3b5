"""`uniattn explain`: which configuration a batch gets on a card, and why. Needs neither a GPU nor Triton."""

from __future__ import annotations

from argparse import Namespace

import torch

from uniattn.bench import grammar, workloads
from uniattn.bench.options import or_argument_error, shape, words
from uniattn.bench.workloads import Workload
from uniattn.errors import ArgumentError, UnsupportedError
from uniattn.launch.target import Target, target_of
from uniattn.problem.layout import window_bounds
from uniattn.schedule import hopper
from uniattn.schedule.build import build
from uniattn.schedule.tiles import Tiles, shared_bytes
from uniattn.tuner.candidates import kernels_for
from uniattn.tuner.compiling import spec_of
from uniattn.tuner.shapes import problem_of
from uniattn.tuning.cards import CARDS
from uniattn.tuning.choose import SHIPPED, Choice, card_of, choose, tables_of, user_folder
from uniattn.tuning.problem import Bucket, Problem


def run(options: Namespace) -> bool:
    """Explain each batch that the options name. Raises `ArgumentError` for a wrong option."""
    card = _card(options.card)
    asked: list[Workload] = []
    if options.only or not options.batch:
        asked += or_argument_error("--only", workloads.select, words(options.only))
    for text in options.batch:
        asked += or_argument_error("--batch", grammar.workloads, text, **shape(options))
    print("\n\n".join([heading(card), *(explanation(w, card) for w in asked)]))
    return True


def _card(name: str | None) -> Target:
    if name is not None:
        if name.lower() not in CARDS:
            raise ArgumentError("--card", name, f"the known cards are {', '.join(CARDS)}", "leave it out on a machine with the card")
        return CARDS[name.lower()]
    if not torch.cuda.is_available():
        fix = f"name one: --card {', --card '.join(CARDS)}"
        raise UnsupportedError("--card", "none, and torch sees no GPU", "a configuration is a card's", fix)
    return target_of(torch.device("cuda"))


def heading(card: Target) -> str:
    """The card's facts, and what becomes of its tables."""
    memory = "bandwidth unknown" if card.memory_bytes_per_s is None else f"{card.memory_bytes_per_s / 1e12:.2f} TB/s"
    lines = [
        f"{card.name}: {card.num_sms} SMs, {card.matrix_unit}, {card.max_shared_bytes / 1024:.0f} KB shared memory a program, {memory}"
    ]
    tables = tables_of(card)
    for table in tables:
        count = sum(len(entries) for by_key in table.answers.values() for entries in by_key.values())
        lines.append(f"table {table.path}: {count} answers" + "".join(f"; {note}" for note in table.notes))
        lines += [f"  not used: {reason}" for reason in table.passed_over]
    if not tables:
        lines.append(f"no table {card_of(card.name)}.json in {user_folder()} or {SHIPPED}")
    return "\n".join(lines)


def explanation(w: Workload, card: Target) -> str:
    """What `w` gets on `card`, and why."""
    kernels = kernels_for(w, card)
    choice = choose(problem_of(w), card, tables_of(card), kernels)
    t = choice.tiles
    lines = [
        f"{w.name}",
        f"  batch   {_count(len(w.lengths), 'sequence')}, {_count(w.num_tokens, 'query token')} (longest {w.max_q_len}), "
        f"{sum(kv_len for _, kv_len in w.lengths)} KV tokens; {w.shape()}",
        f"  kernel  {_kernel(t, kernels)}",
        f"  tiles   {_tiles(t)}",
        f"  why     {why(choice, problem_of(w), card)}",
        f"  SM      {_count(t.programs_per_sm, 'program')} at once, about {_shared(t, w, card) / 1024:.0f} KB of "
        f"{card.shared_bytes_per_sm / 1024:.0f} KB shared memory each; {card.num_sms * t.programs_per_sm} on the chip",
        f"  plan    {_plan(w, t, card)}",
    ]
    return "\n".join(lines)


def why(choice: Choice, problem: Problem, card: Target) -> str:
    """Who answered, and on what grounds."""
    if choice.entry is None or choice.table is None:
        asked = f"no table answers {named(problem)} or {named(problem.bucket)}" if tables_of(card) else "there is no table for this card"
        return f"heuristic: {asked}"
    e = choice.entry
    gain = f"{e.us:.1f} us where the default takes {e.default_us:.1f}"
    return f"{choice.level} ({named(e.key)}) of {choice.table.path}: {gain}, on {', '.join(e.measured_on) or 'batches not named'}"


def named(key: Problem | Bucket) -> str:
    """A key in words."""
    if isinstance(key, Bucket):
        marks = ", ".join(word for word, is_so in (("mixed", key.mixed), ("window", key.windowed)) if is_so)
        pages = "" if key.pages == "paged" else f", {key.pages}"
        size = "" if key.itemsize == 2 else ", fp32"
        dims = f"{key.head_dim}" if key.head_dim == key.v_head_dim else f"{key.head_dim}/{key.v_head_dim}"
        return f"dim {dims}{size}{pages}, rows {key.rows}, pairs {key.pairs}" + (f", {marks}" if marks else "")
    heads = f"{key.num_q_heads}/{key.num_kv_heads}"
    return f"exactly {_count(key.num_tokens, 'token')} in {key.num_seqs}, heads {heads}, dim {key.head_dim}, page {key.page_size}"


def _count(n: int, word: str) -> str:
    return f"{n} {word}{'s' * (n != 1)}"


def _kernel(t: Tiles, kernels: tuple[str, ...]) -> str:
    others = [kernel for kernel in kernels if kernel != t.kernel]
    return t.kernel + (f" (could also be {', '.join(others)})" if others else "")


def _tiles(t: Tiles) -> str:
    small = f"; sequences of at most {t.small_m} rows: {t.small_m} x {t.small_n}, {t.small_stages} stages" if t.small_m else ""
    return f"{t.block_m} rows x {t.block_n} KV tokens, {t.num_stages} stages, {t.num_warps} warps{small}"


def _shared(t: Tiles, w: Workload, card: Target) -> int:
    if t.kernel == "hopper":
        return hopper.shared_bytes(t, w.head_dim, w.head_dim)
    return shared_bytes(t, w.head_dim, w.head_dim, 4 if w.dtype == "float32" else 2, card.matrix_unit, True)


def _plan(w: Workload, t: Tiles, card: Target) -> str:
    """The plan that the device would build, as its twin in Python does."""
    spec = spec_of(w, t, card)
    items = build(
        list(w.lengths), group=w.num_q_heads // w.num_kv_heads, num_kv_heads=w.num_kv_heads, num_slots=spec.num_slots,
        item_overhead=spec.item_overhead, block_m=spec.block_m, block_n=spec.block_n, small_m=spec.small_m, small_n=spec.small_n,
        may_cut=spec.num_partials > 0, window=window_bounds(w.window), persistent=bool(spec.is_hopper),
    )  # fmt: skip
    pieces = [item for item in items if item.num_splits > 1]
    tiles = {(item.seq, item.first_row) for item in pieces}
    small = sum(item.small for item in items)
    words = f"{_count(len(items), 'item')} for each of {w.num_kv_heads} KV heads"
    words += f", {small} of them small" if small else ""
    words += f", {len(pieces)} of them pieces of {_count(len(tiles), 'cut tile')}" if pieces else ", none cut"
    return f"{words}; the longest visits {max(item.cost for item in items)} KV tokens"
