"""A meter whose times are computed, and groups of small batches."""

from dataclasses import replace

from uniattn.bench.workloads import Workload
from uniattn.tuner.shapes import groups
from uniattn.tuning.cards import CARDS

H200 = CARDS["h200"]
DECODES = [Workload(f"decode {n} x {kv}", "tune", ((1, kv),) * n) for n, kv in ((32, 1024), (24, 4096), (32, 4096))]
PREFILL = Workload("prefill 1 x 2048", "tune", ((2048, 2048),))


class FakeMeter:
    """`us(w, tiles)` is the time, or the reason why there is none; what was asked is kept."""

    def __init__(self, us):
        self.us, self.expected, self.asked = us, [], []

    def expect(self, w, tiles):
        self.expected.append((w, list(tiles)))

    def counted(self, w, tiles):
        return [t if t.kernel == "hopper" else replace(t, programs_per_sm=3) for t in tiles]

    def times(self, w, tiles, rounds):
        self.asked.append((w, list(tiles), rounds))
        return [self.us(w, t) for t in tiles]


def decode_group():
    (group,) = groups(DECODES)
    return group
