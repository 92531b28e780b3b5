#!/usr/bin/env python3
"""vLLM's throughput and latency with uniattn beside vLLM's own attention backends, on models with random weights.

    python benchmarks/serving/serve.py --shape llama-3.1-8b --traces-folder path/to/traces
    python benchmarks/serving/serve.py --shape mistral-small-24b --trace random --rates 1 5 7 9 --backends FLASH_ATTN CUSTOM

Starts one engine after another, in processes of their own, and sends each the same requests: every trace all at once, and then at
each rate. Needs a GPU, vLLM, and uniattn installed as a package, since vLLM finds its plugin by the package's metadata. The table
is the last thing printed; `--json` keeps the figures, `--html` makes a page with plots.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
import shapes
import sinks_model
import traffic

MEASURE = Path(__file__).with_name("measure.py")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="llama-3.1-8b")
    parser.add_argument("--backends", nargs="+", default=["FLASH_ATTN", "TRITON_ATTN", "CUSTOM"], help="as --attention-backend")
    parser.add_argument("--trace", nargs="+", choices=traffic.TRACES, default=list(traffic.TRACES), help="sent all at once")
    parser.add_argument("--no-burst", action="store_true", help="leave out sending all at once")
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="requests a second of random 1000/100 (1 5 7 9)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long requests come at each rate")
    parser.add_argument("--limit", type=int, help="requests of a trace at most")
    parser.add_argument("--traces-folder", type=Path, default=Path("."), help="where the traces' files are")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--jit-error", action="store_true", help="let vLLM stop where a kernel is compiled while serving (0.25)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--html", type=Path, help="file for a page with plots")
    return parser.parse_args()


def run(job: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """One backend in a process of its own; None where it failed, whose last words then stand on stderr."""
    result = folder / f"{job['backend']}.json"
    path = [*sinks_model.as_plugin(folder / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    subprocess.run([sys.executable, str(MEASURE), json.dumps(job | {"result": str(result)})], env=environment, check=False)
    return json.loads(result.read_text()) if result.exists() else None


def main() -> int:
    """Run every backend, then print the table; exits 1 where one failed."""
    a = parse()
    points: list[tuple[str, float | None]] = [] if a.no_burst else [(trace, None) for trace in a.trace]
    points += [("random", rate) for rate in a.rates]
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.write(a.shape, Path(folder))
        results = []
        for backend in a.backends:
            job = dict(
                backend=backend, shape=a.shape, model=str(model), points=points, limit=a.limit, seconds=a.seconds,
                traces=str(a.traces_folder.resolve()), max_model_len=a.max_model_len, jit_error=a.jit_error,
            )  # fmt: skip
            results.append(run(job, Path(folder)))
            if a.json:  # after each backend, so that a run cut short leaves something
                a.json.write_text(json.dumps([r for r in results if r], indent=1))
    done = [r for r in results if r]
    if a.html and done:
        a.html.write_text(report.page(done))
    print(report.table(done))
    failed = [b for b, r in zip(a.backends, results, strict=True) if r is None]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
