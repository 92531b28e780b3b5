"""Times uniattn beside FlashAttention-3 on one GPU, in one run.

    python benchmarks/against_fa3.py [--fa3 PATH.so] [--rounds 3] [--only NAME ...] [--json FILE]

`--fa3` is the path of vLLM's FlashAttention-3 library (`_vllm_fa3_C.abi3.so`); without it only uniattn is timed. Each call is
captured in a CUDA graph with an L2 flush before it; a round is the median of several replays less the flush alone; rounds of
the two alternate, and the ratio is between medians of rounds. uniattn runs with a prebuilt plan, FA3 with prebuilt metadata. A
row whose output misses the check against fp32 softmax reports no time.
"""

import argparse
import json
import math
import statistics
from dataclasses import dataclass, field

import torch

import uniattn

PAGE_SIZE = 16
HEAD_DIM = 128
# One H200: bf16 matrix product in TFLOP/s and read bandwidth in TB/s, measured.
MATRIX_TFLOPS, BANDWIDTH_TBS = 790, 4.3


@dataclass
class Workload:
    """A batch of `(q_len, kv_len)` sequences, causal, bf16, shuffled pages."""

    name: str
    lens: list[tuple[int, int]]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    tensors: dict = field(default_factory=dict, repr=False)

    def build(self) -> None:
        gen = torch.Generator("cuda").manual_seed(0)
        pages = [math.ceil(kv / PAGE_SIZE) for _, kv in self.lens]
        num_pages = sum(pages) + 7
        shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).int()
        table = torch.full((len(self.lens), max(pages)), -1, dtype=torch.int32)
        first = 0
        for row, n in zip(table, pages, strict=True):
            row[:n] = shuffled[first : first + n]
            first += n

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=gen)

        q_lens = torch.tensor([q for q, _ in self.lens])
        self.tensors = dict(
            q=normal(int(q_lens.sum()), self.num_q_heads, HEAD_DIM),
            k=normal(num_pages, PAGE_SIZE, self.num_kv_heads, HEAD_DIM),
            v=normal(num_pages, PAGE_SIZE, self.num_kv_heads, HEAD_DIM),
            cu=torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).int().cuda(),
            seqlens=torch.tensor([kv for _, kv in self.lens], dtype=torch.int32, device="cuda"),
            table=table.cuda(),
        )

    @property
    def max_q(self) -> int:
        return max(q for q, _ in self.lens)

    @property
    def max_kv(self) -> int:
        return max(kv for _, kv in self.lens)

    @property
    def flops(self) -> float:
        return sum(4 * self.num_q_heads * HEAD_DIM * (q * (kv - q) + q * (q + 1) / 2) for q, kv in self.lens)

    @property
    def bytes(self) -> float:
        kv_bytes = sum(kv for _, kv in self.lens) * self.num_kv_heads * HEAD_DIM * 2 * 2
        return kv_bytes + sum(q for q, _ in self.lens) * self.num_q_heads * HEAD_DIM * 2 * 2

    @property
    def floor_us(self) -> float:
        return max(self.flops / MATRIX_TFLOPS / 1e6, self.bytes / BANDWIDTH_TBS / 1e6)

    def expected(self, seq: int) -> tuple[slice, torch.Tensor]:
        """fp32 attention of one sequence, its last 256 query tokens at most."""
        t = self.tensors
        q_len, kv_len = self.lens[seq]
        end = int(t["cu"][seq + 1])
        n = min(q_len, 256)
        pages = t["table"][seq, : math.ceil(kv_len / PAGE_SIZE)].long()
        k, v = (t[x][pages].flatten(0, 1)[:kv_len].float() for x in "kv")
        q = t["q"][end - n : end].float().unflatten(1, (self.num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->hgqk", q, k) * HEAD_DIM**-0.5
        pos = torch.arange(kv_len - n, kv_len, device="cuda")
        scores.masked_fill_(torch.arange(kv_len, device="cuda") > pos[:, None], -torch.inf)
        return slice(end - n, end), torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v).flatten(1, 2)


def mixed(num_decodes: int, low: int, high: int, prefill: tuple[int, int]) -> list[tuple[int, int]]:
    gen = torch.Generator().manual_seed(1)
    return [(1, int(n)) for n in torch.randint(low, high + 1, (num_decodes,), generator=gen)] + [prefill]


WORKLOADS = [
    Workload("decode 64 x 8192", [(1, 8192)] * 64),
    Workload("prefill 1 x 8192", [(8192, 8192)]),
    Workload("63 decodes (256-4096) + prefill 1985", mixed(63, 256, 4096, (1985, 1985))),
    Workload("decode 1 x 8192", [(1, 8192)]),
    Workload("decode 8 x 4096", [(1, 4096)] * 8),
    Workload("decode 32 x 2048", [(1, 2048)] * 32),
    Workload("prefill 1 x 2048", [(2048, 2048)]),
    Workload("prefill 16 x 512", [(512, 512)] * 16),
    Workload("64 x 5 queries at 4096", [(5, 4096)] * 64),
    Workload("15 decodes (256-2048) + prefill 497", mixed(15, 256, 2048, (497, 497))),
]


def uniattn_call(w: Workload, num_splits=None):
    t = w.tensors
    batch = dict(cu_seqlens_q=t["cu"], seqlens_k=t["seqlens"], page_table=t["table"], max_seqlen_q=w.max_q, max_seqlen_k=w.max_kv)
    plan = uniattn.plan(t["q"], t["k"], t["v"], **batch, num_splits=num_splits)
    out = torch.full_like(t["q"], torch.nan)

    def call() -> torch.Tensor:
        return uniattn.attention(t["q"], t["k"], t["v"], **batch, plan=plan, out=out)

    return call, out


def fa3_call(w: Workload):
    t = w.tensors
    num_seqs, dims = len(w.lens), (w.num_q_heads, w.num_kv_heads, HEAD_DIM, HEAD_DIM)
    fa3 = torch.ops._vllm_fa3_C
    metadata = fa3.get_scheduler_metadata(
        num_seqs, w.max_q, w.max_kv, *dims, torch.bfloat16, t["seqlens"], t["cu"], None, None, None, None, PAGE_SIZE, 0, True,
        -1, -1, False, 0, None, 0,
    )  # fmt: skip
    out = torch.full_like(t["q"], torch.nan)

    def call() -> torch.Tensor:
        return fa3.fwd(
            t["q"], t["k"], t["v"], None, None, None, out, t["cu"], None, None, None, t["seqlens"], w.max_q, w.max_kv, t["table"],
            None, None, None, None, None, None, None, None, HEAD_DIM**-0.5, True, -1, -1, 0.0, True, metadata, 0, None, 0, None,
            1, 0, None,
        )  # fmt: skip

    return call, out


class Timer:
    """Median time of a call in a CUDA graph, L2 flushed before each, the flush's own time taken off."""

    def __init__(self, calls_per_replay: int = 8, replays: int = 5):
        self.flush = torch.empty(160 << 20, dtype=torch.uint8, device="cuda")
        self.calls_per_replay, self.replays = calls_per_replay, replays
        self.flush_us = self._replay_us(self.capture(None))

    def capture(self, call) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if call:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.calls_per_replay):
                self.flush.zero_()
                if call:
                    call()
        return graph

    def us(self, graph: torch.cuda.CUDAGraph) -> float:
        return self._replay_us(graph) - self.flush_us

    def _replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(self.replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / self.calls_per_replay)
        return statistics.median(times)


def relative_error(w: Workload, out: torch.Tensor) -> float:
    """Largest over a few sequences of |out - expected| / |expected| (norms)."""
    worst = 0.0
    for seq in sorted({0, len(w.lens) // 2, len(w.lens) - 1}):
        rows, want = w.expected(seq)
        worst = max(worst, float((out[rows].float() - want).norm() / want.norm()))
        if not torch.isfinite(out).all():
            return math.inf
    return worst


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--fa3")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--only", nargs="*")
    ap.add_argument("--json")
    args = ap.parse_args()
    if args.fa3:
        torch.ops.load_library(args.fa3)
    timer = Timer()
    rows = []
    for w in WORKLOADS:
        if args.only and not any(o in w.name for o in args.only):
            continue
        w.build()
        calls = {"uniattn": uniattn_call(w)} | ({"fa3": fa3_call(w)} if args.fa3 else {})
        row: dict = {"workload": w.name, "floor_us": round(w.floor_us, 1)}
        graphs = {}
        for name, (call, out) in calls.items():
            call()
            row[f"{name}_error"] = relative_error(w, out)
            if row[f"{name}_error"] < 1e-2:
                graphs[name] = timer.capture(call)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(args.rounds):
            for name, graph in graphs.items():
                times[name].append(timer.us(graph))
        row |= {f"{name}_us": round(statistics.median(t), 1) for name, t in times.items()}
        if len(graphs) == 2:
            row["ratio"] = round(row["uniattn_us"] / row["fa3_us"], 3)
        rows.append(row)
        w.tensors = {}
        print(row, flush=True)
    import triton

    facts = dict(card=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
    print(facts)
    print(f"{'workload':38s} {'floor':>8s} {'uniattn':>9s} {'FA3':>9s} {'ratio':>6s}")
    for r in rows:
        ours, fa3, ratio = (r.get(x, math.nan) for x in ("uniattn_us", "fa3_us", "ratio"))
        print(f"{r['workload']:38s} {r['floor_us']:8.1f} {ours:9.1f} {fa3:9.1f} {ratio:6.2f}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(facts | {"rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
