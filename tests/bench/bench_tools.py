"""A recorded run for the tests of what renders it: two groups and a curve of a sweep, with every kind of result."""

from uniattn.bench import roofline, sweep
from uniattn.bench.records import Host, Report, Result
from uniattn.bench.run import empty_row
from uniattn.bench.workloads import Workload, select

PEAKS = roofline.known_peaks("NVIDIA H200")
NAMES = ("decode 1 x 512", "decode 64 x 8192", "prefill 1 x 2048")


def timed(us: float, plan_us: float | None = None) -> Result:
    """A right result whose rounds lie 1% around `us`."""
    return Result(
        rounds_us=[us * 1.01, us, us * 0.99], plan_us=plan_us, relative_error=1.5e-3, max_error=2e-4, error_of_allowed=0.4
    )


def row(w: Workload, **results: Result):
    made = empty_row(w, PEAKS)
    made.results = {key.replace("_", "-"): result for key, result in results.items()}
    return made


def recorded_run(ours_us: float = 400.0) -> Report:
    """uniattn takes `ours_us` on decode 64 x 8192, FlashAttention-3 500; on the curve uniattn jumps from 3 to 4 sequences."""
    labels = {"uniattn": "uniattn", "fa3": "FlashAttention-3", "torch-sdpa": "torch SDPA"}
    facts = {"card": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-02 03:04 UTC"}
    report = Report(facts, PEAKS.flops, PEAKS.bytes, PEAKS.source, labels, {"FlashInfer": "No module named 'flashinfer'"})
    small, large, prefill = (next(w for w in select() if w.name == name) for name in NAMES)
    wrong = Result("wrong: 3 elements are NaN or infinite", relative_error=0.5, max_error=1.0, error_of_allowed=9.0)
    report.rows = [
        row(small, uniattn=timed(10.0, 2.5), fa3=timed(14.8), torch_sdpa=Result("not covered: windows")),
        row(large, uniattn=timed(ours_us, 3.0), fa3=timed(500.0), torch_sdpa=timed(5000.0)),
        row(prefill, uniattn=timed(100.0), fa3=timed(80.0), torch_sdpa=wrong),
    ]
    curve = sweep.group("batch", (1, 1, 2048))
    for n, us in ((1, 8.0), (2, 9.0), (3, 10.0), (4, 20.0)):
        w = Workload(f"{curve}, batch {n}", curve, ((1, 2048),) * n, x=n)
        report.rows.append(row(w, uniattn=timed(us), fa3=timed(12.0)))
    report.host = {"uniattn": Host(9.0, 18.0, 6.0), "fa3": Host(15.0, 25.0, 8.0)}
    return report
