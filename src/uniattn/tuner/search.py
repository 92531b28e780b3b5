"""The search: which configurations a table shall answer with, from what a meter measures. No GPU in here.

A class of problems is settled in two steps. All candidates are timed on one batch of it; the fastest few, and the default, then on
all its batches, and what beats the default there on held-out batches of other lengths. What is slower than the default on any of them
is not taken. Several classes are on the way at once, so that compiling one's kernels hides behind measuring another's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from uniattn.bench.roofline import cost
from uniattn.bench.workloads import Workload
from uniattn.launch.target import Target
from uniattn.schedule.tiles import Tiles
from uniattn.tuner.candidates import candidates, kernels_for, refined
from uniattn.tuner.compiling import spec_of
from uniattn.tuner.measure import Meter
from uniattn.tuner.shapes import Group, problem_of, same_problem
from uniattn.tuning.problem import Bucket, Problem
from uniattn.tuning.table import Entry

# What replaces the default must be this much faster on the batches that it was found on.
MIN_GAIN = 0.02
# Medians of one configuration, captured twice, differ by up to this much.
NOISE = 0.01
SCREEN_ROUNDS, ROUNDS, HELD_OUT_ROUNDS = 2, 3, 5
# Configurations of each kernel, beside the default, that reach the second step, and binaries of them the held-out batches.
_FINALISTS, _JUDGED = 3, 2
# Classes whose kernels are compiled before they are screened, and that wait screened for theirs.
_AHEAD, _WAITING = 6, 4


@dataclass(frozen=True)
class Settled:
    """The outcome for one key.

    Attributes:
        key: a bucket, or a problem where one of the bucket's problems is better off with an answer of its own.
        entries: for the table, the preferred kernel's first; none where the default stays.
        us, default_us: geometric means over the batches that it was found on, 0 where nothing could be timed.
        held_out: largest ratio to the default on a held-out batch, None where nothing got that far.
        note: configurations that were wrong or failed, or why there is nothing to tell.
    """

    key: Problem | Bucket
    entries: tuple[Entry, ...] = ()
    us: float = 0.0
    default_us: float = 0.0
    held_out: float | None = None
    note: str = ""


@dataclass
class _Screened:
    group: Group
    kernels: tuple[str, ...]
    finalists: dict[str, list[Tiles]]
    faults: list[str] = field(default_factory=list)


def tune(
    groups: Sequence[Group], target: Target, meter: Meter, step: Callable[[str], None], goes_on: Callable[[], bool]
) -> Iterator[list[Settled]]:
    """Settle group after group; `step` is told the name of each step before it, and no group is begun unless `goes_on()`."""
    waiting: deque[_Screened] = deque()
    for number, group in enumerate(groups):
        if not goes_on():
            break
        for ahead in groups[number : number + _AHEAD]:
            meter.expect(_typical(ahead), [t for ts in _candidates(ahead, target).values() for t in ts])
        step(f"screening {_typical(group).name}")
        waiting.append(_screen(group, target, meter))
        if len(waiting) > _WAITING:
            yield _settle(waiting.popleft(), target, meter, step)
    while waiting:
        yield _settle(waiting.popleft(), target, meter, step)


def _typical(group: Group) -> Workload:
    """The batch that candidates are screened on: the one of middle cost."""
    by_cost = sorted(group.members, key=lambda w: max(cost(w).flops / 150, cost(w).bytes))
    return by_cost[len(by_cost) // 2]


def _kernels(group: Group, target: Target) -> tuple[str, ...]:
    """The kernels that can serve every batch of the group."""
    first, *others = (kernels_for(w, target) for w in group.members)
    return tuple(kernel for kernel in first if all(kernel in kernels for kernels in others))


def _candidates(group: Group, target: Target) -> dict[str, list[Tiles]]:
    return candidates(problem_of(_typical(group)), target, _kernels(group, target))


def _screen(group: Group, target: Target, meter: Meter) -> _Screened:
    """Time all candidates on one batch, keep the defaults and the fastest."""
    w = _typical(group)
    screened = _Screened(group, _kernels(group, target), {})
    tried: list[Tiles] = []
    for kernel, tiles in _candidates(group, target).items():
        # The default is timed as it is called today, and again with the programs that really live on an SM.
        counted = meter.counted(w, tiles)
        screened.faults += [f"{_words(t)}: {fault}" for t, fault in zip(tiles, counted, strict=True) if isinstance(fault, str)]
        screened.finalists[kernel] = [tiles[0]]
        tried += dict.fromkeys([tiles[0], *(t for t in counted if not isinstance(t, str))])
    times = dict(zip(tried, meter.times(w, tried, SCREEN_ROUNDS), strict=True))
    screened.faults += _faults(times)
    for kernel, kept in screened.finalists.items():
        timed = sorted((us, number, t) for number, (t, us) in enumerate(times.items()) if t.kernel == kernel and not isinstance(us, str))
        kept += [t for _, _, t in timed if t not in kept][:_FINALISTS]
        # Only what may be cut is weighed.
        if timed and spec_of(w, timed[0][2], target).num_partials:
            kept += [t for t in refined(timed[0][2]) if t not in kept]
    for member in group.members:
        meter.expect(member, [t for kept in screened.finalists.values() for t in kept])
    return screened


def _settle(screened: _Screened, target: Target, meter: Meter, step: Callable[[str], None]) -> list[Settled]:
    """Decide for the bucket, then for each of its problems, which may be better off with an answer of its own."""
    group = screened.group
    tiles = [t for kept in screened.finalists.values() for t in kept]
    times = {}
    for w in group.members:
        step(f"timing {w.name}")
        times[w] = dict(zip(tiles, meter.times(w, tiles, ROUNDS), strict=True))
        screened.faults += _faults(times[w])
    defaults = {kernel: kept[0] for kernel, kept in screened.finalists.items()}
    judge = _Judge(screened, meter, step)
    whole, picks, order = judge.decide("bucket", group.bucket, times, group.held_out, defaults, screened.kernels)
    settled = [whole]
    problems = {problem_of(w): [m for m in group.members if problem_of(m) == problem_of(w)] for w in group.members}
    for problem, members in problems.items():
        answer = Settled(problem)
        if len(problems) > 1 and whole.default_us:
            held_out = [same_problem(members[0])]
            answer, _, _ = judge.decide("exact", problem, {w: times[w] for w in members}, held_out, picks, order)
        settled.append(answer)
    return settled


class _Judge:
    """Decides for one key after another of a group.

    The default is what would be called without a table; what may be taken are the finalists.
    """

    def __init__(self, screened: _Screened, meter: Meter, step: Callable[[str], None]):
        self._default, self._finalists = screened.finalists[screened.kernels[0]][0], screened.finalists
        self._faults, self._meter, self._step = screened.faults, meter, step

    def _note(self) -> str:
        return "; ".join(dict.fromkeys(self._faults))

    def decide(
        self,
        level: str,
        key: Problem | Bucket,
        times: dict[Workload, dict[Tiles, float | str]],
        held_out: Sequence[Workload],
        base: dict[str, Tiles],
        order: Sequence[str],
    ) -> tuple[Settled, dict[str, Tiles], tuple[str, ...]]:
        """The outcome, by kernel what is now taken, and the kernels in their order now.

        `base` and `order` are what would be taken without this decision.
        """
        found_on, default = list(times.values()), self._default
        fault = next((one[default] for one in found_on if isinstance(one[default], str)), None)
        if fault is not None:
            return Settled(key, note=f"the default has no time: {fault}"), base, tuple(order)
        before = tuple(kernel for kernel in order if not any(isinstance(one[base[kernel]], str) for one in found_on))
        first = base[before[0]]
        default_us = _mean([_number(one[default]) for one in found_on])
        better = {kernel: self._better(found_on, kernel, base[kernel]) for kernel in before}
        # Another kernel than the first may win with what it has.
        rivals = [kernel for kernel in before[1:] if _ratio(found_on, (better[kernel] or [base[kernel]])[0], first) <= 1 - MIN_GAIN]
        if not rivals and not any(better.values()):
            us = _mean([_number(one[first]) for one in found_on])
            return Settled(key, (), us, default_us, None, self._note()), base, tuple(order)
        judged = list(dict.fromkeys([default, *(base[k] for k in before), *(t for ts in better.values() for t in ts)]))
        held = []
        for w in held_out:
            self._step(f"held out: {w.name}")
            held.append(dict(zip(judged, self._meter.times(w, judged, HELD_OUT_ROUNDS), strict=True)))
            self._faults += _faults(held[-1])
        picks = dict(base)
        for kernel in before:
            against = (base[kernel], default) if kernel == before[0] else (base[kernel],)
            picks[kernel] = next((t for t in better[kernel] if _never_slower(held, t, *against)), base[kernel])
        after = before
        for kernel in rivals:
            t, leader = picks[kernel], picks[after[0]]
            if _ratio(found_on, t, leader) <= 1 - MIN_GAIN and _never_slower([*found_on, *held], t, leader, default):
                after = (kernel, *(other for other in after if other != kernel))
        best = picks[after[0]]
        us = _mean([_number(one[best]) for one in found_on])
        both = [(one[best], one[default]) for one in held]
        worst = max((a / max(b, 0.01) for a, b in both if not isinstance(a, str) and not isinstance(b, str)), default=None)
        if picks == base and after == before:
            return Settled(key, (), us, default_us, worst, self._note()), base, tuple(order)
        names = (tuple(w.name for w in times), tuple(w.name for w in held_out))
        own_us = {kernel: _mean([_number(one[picks[kernel]]) for one in found_on]) for kernel in after}
        entries = tuple(Entry(level, key, picks[kernel], round(own_us[kernel], 2), round(default_us, 2), *names) for kernel in after)
        return Settled(key, entries, us, default_us, worst, self._note()), picks, after

    def _better(self, found_on: Sequence[dict[Tiles, float | str]], kernel: str, base: Tiles) -> list[Tiles]:
        """What beats `base` on average and is slower on no batch, the best first: a few binaries, each with its best cuts."""
        timed = [t for t in self._finalists[kernel] if not any(isinstance(one[t], str) for one in found_on)]
        faster = [t for t in timed if _ratio(found_on, t, base) <= 1 - MIN_GAIN and _never_slower(found_on, t, base)]
        faster.sort(key=lambda t: _ratio(found_on, t, base))
        of_binary: dict[Any, Tiles] = {}
        for t in faster:
            of_binary.setdefault(t.compiled_in, t)
        return list(of_binary.values())[:_JUDGED]


def _never_slower(times: Sequence[dict[Tiles, float | str]], t: Tiles, *others: Tiles) -> bool:
    """Whether `t` has a time on each batch, at most that of each of `others` but for noise."""
    return all(
        not isinstance(one[t], str) and all(isinstance(one[o], str) or _number(one[t]) <= _number(one[o]) * (1 + NOISE) for o in others)
        for one in times
    )


def _ratio(times: Sequence[dict[Tiles, float | str]], t: Tiles, other: Tiles) -> float:
    """Geometric mean of `t` over `other`."""
    return _mean([_number(one[t]) / _number(one[other]) for one in times])


def _number(us: float | str) -> float:
    assert not isinstance(us, str), us
    # A time is never 0 to the clock's resolution.
    return max(us, 0.01)


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _faults(times: dict[Tiles, float | str]) -> list[str]:
    return [f"{_words(t)}: {us}" for t, us in times.items() if isinstance(us, str)]


def _words(t: Tiles) -> str:
    return f"{t.kernel} {t.block_m}x{t.block_n}, {t.num_stages} stages, {t.num_warps} warps"
