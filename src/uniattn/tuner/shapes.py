"""Which batches a card is tuned on, by the class of problems that they stand for, and which others judge the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from uniattn.bench.workloads import Workload, drawn
from uniattn.tuning.problem import Bucket, Problem, problem

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Group:
    """Batches of one bucket: those that its answer is found on, and others of other lengths that it must not lose on."""

    bucket: Bucket
    members: tuple[Workload, ...]
    held_out: tuple[Workload, ...]


def problem_of(w: Workload) -> Problem:
    """What the host knows of `w` when an engine calls."""
    return problem(
        w.num_tokens, len(w.lengths), w.max_q_len, w.num_q_heads, w.num_kv_heads, w.head_dim, w.head_dim, _ITEMSIZE[w.dtype],
        w.page_size, w.window is not None,
    )  # fmt: skip


def grid(**shape: object) -> list[Workload]:
    """The batches that a layer of `shape` (other fields of `Workload`) is tuned on: decode from 1 to 256 sequences, drafts, prefills,
    chunks and mixes, each class with a short and a long K/V where both occur."""
    decodes = [(n, kv) for n in (1, 8, 32, 64, 256) for kv in (1024, 8192 if n < 256 else 2048)]
    rows = [(f"decode {n} x {kv}", ((1, kv),) * n) for n, kv in decodes]
    rows += [(f"{n} x {q} queries at {kv}", ((q, kv),) * n) for n, q, kv in ((1, 8, 8192), (8, 8, 8192), (32, 5, 4096), (64, 5, 4096))]
    rows += [(f"prefill {n} x {q}", ((q, q),) * n) for n, q in ((1, 512), (16, 512), (1, 2048), (4, 2048), (1, 8192))]
    rows += [("chunk 2048 of 16384", ((2048, 16384),))]
    mixes = [(n, q, drawn(n, n, 256, 4096)) for n, q in ((15, 497), (63, 1985), (120, 8072))]
    rows += [(f"{n} decodes + prefill {q}", (*((1, kv) for kv in kv_lens), (q, q))) for n, q, kv_lens in mixes]
    return [Workload(name, "tune", lengths, **shape) for name, lengths in rows]  # type: ignore[arg-type]


def groups(workloads: Sequence[Workload]) -> list[Group]:
    """The batches by bucket, in the order of each bucket's first one, with the held-out batches of each."""
    by_bucket: dict[Bucket, list[Workload]] = {}
    for w in workloads:
        by_bucket.setdefault(problem_of(w).bucket, []).append(w)
    return [Group(bucket, tuple(members), tuple(held_out(members, bucket))) for bucket, members in by_bucket.items()]


def held_out(members: Sequence[Workload], bucket: Bucket) -> list[Workload]:
    """Batches of `bucket` with other lengths than its members: made from the first and the last of them."""
    made: list[Workload] = []
    for number, w in enumerate(dict.fromkeys((members[0], members[-1]))):
        fewer = _fewer(w)
        if problem_of(fewer).bucket != bucket:
            fewer = w
        made.append(replace(_other_lengths(fewer, seed=number), group="held out"))
    return made


def same_problem(w: Workload) -> Workload:
    """A held-out batch of the same problem as `w`: as many sequences and query tokens, other K/V."""
    return replace(_other_lengths(w, seed=2), group="held out")


def _fewer(w: Workload) -> Workload:
    """`w` with about three quarters of its sequences, or of its query tokens where it has one sequence."""
    if len(w.lengths) > 1:
        keep = max(1, round(0.75 * len(w.lengths)))
        # The last ones: a mix ends with its prefill.
        return replace(w, lengths=w.lengths[-keep:])
    (q_len, kv_len) = w.lengths[0]
    shorter = max(1, round(0.7 * q_len))
    return replace(w, lengths=((shorter, max(shorter, round(0.7 * kv_len))),))


def _other_lengths(w: Workload, seed: int) -> Workload:
    """`w` with each sequence's earlier KV tokens scaled by a factor of its own from 0.4 to 1.1; prefills of whole prompts see as
    much again as half of their length."""
    percents = drawn(100 + seed, len(w.lengths), 40, 110)
    lengths = tuple(
        (q_len, q_len + (q_len // 2 if kv_len == q_len > 1 else (kv_len - q_len) * percent // 100))
        for (q_len, kv_len), percent in zip(w.lengths, percents, strict=True)
    )
    return replace(w, name=f"{w.name}, held out {seed + 1}", lengths=lengths)
