"""One engine with one attention backend: starts vLLM, sends it every kind of traffic asked for, and writes what was measured.

`serve.py` runs this in a process of its own for each backend; the job comes as JSON on the command line.
"""

import asyncio
import json
import os
import sys
import time
from dataclasses import fields
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import shapes
import traffic


def compilations(worker: Any) -> int:
    """Kernels that uniattn has compiled in a worker's process."""
    from uniattn.launch.cache import num_compilations

    return num_compilations()


def engine_arguments(job: dict[str, Any]) -> Any:
    """vLLM's arguments; those that a release lacks are left out."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    wanted = dict(
        model=job["model"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", attention_backend=job["backend"],
        max_model_len=job["max_model_len"], max_num_batched_tokens=8192, enable_prefix_caching=False,
        gpu_memory_utilization=0.9, disable_log_stats=True, jit_monitor_mode="error" if job["jit_error"] else "warn",
    )  # fmt: skip
    known = {field.name for field in fields(AsyncEngineArgs)}
    return AsyncEngineArgs(**{name: value for name, value in wanted.items() if name in known})


async def one(engine: Any, number: str, prompt: list[int], num_out: int, wait: float, start: float) -> tuple[float, float, float]:
    """Send one request at its time; when it was sent, when its first token came, when its last did (seconds)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    await asyncio.sleep(max(0.0, start + wait - time.perf_counter()))
    sampling = SamplingParams(max_tokens=num_out, ignore_eos=True, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.DELTA)
    sent, first = time.perf_counter(), 0.0
    async for _ in engine.generate({"prompt_token_ids": prompt}, sampling, number):
        first = first or time.perf_counter()
    return sent, first, time.perf_counter()


async def point(engine: Any, job: dict[str, Any], trace: str, rate: float | None) -> dict[str, Any]:
    """All requests of a trace at one rate."""
    limit = job["limit"] if rate is None else min(int(rate * job["seconds"]) + 1, job["limit"] or 10**9)
    wanted = traffic.requests(trace, Path(job["traces"]), limit)
    prompts = traffic.prompts(wanted, job["vocab_size"])
    waits = traffic.arrivals(len(wanted), rate)
    start = time.perf_counter()
    names = [f"{trace}-{rate}-{i}-{start}" for i in range(len(wanted))]
    sent_first_done = await asyncio.gather(
        *(one(engine, *each, start) for each in zip(names, prompts, [r.output for r in wanted], waits, strict=True))
    )
    wall = max(done for _, _, done in sent_first_done) - start
    ttft = [1e3 * (first - sent) for sent, first, _ in sent_first_done]
    tpot = [1e3 * (done - first) / (r.output - 1) for (_, first, done), r in zip(sent_first_done, wanted, strict=True) if r.output > 1]
    return dict(
        trace=trace, rate=rate, num_requests=len(wanted), wall_s=wall,
        tokens_per_s=sum(r.prompt + r.output for r in wanted) / wall, output_tokens_per_s=sum(r.output for r in wanted) / wall,
        ttft_p50_ms=median(ttft), ttft_p99_ms=quantiles(ttft, n=100)[-1], tpot_p50_ms=median(tpot),
        tpot_p99_ms=quantiles(tpot, n=100)[-1], e2e_mean_ms=1e3 * mean(done - sent for sent, _, done in sent_first_done),
    )  # fmt: skip


async def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, warm it up, and run every point."""
    import torch
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    begin = time.perf_counter()
    engine = AsyncLLM.from_engine_args(engine_arguments(job))
    try:
        job = job | dict(vocab_size=shapes.vocab_size(job["shape"]))
        await point(engine, job | dict(limit=8), "random", None)
        started = time.perf_counter() - begin
        is_ours = job["backend"] not in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
        before = await engine.collective_rpc(compilations) if is_ours else None
        points = []
        for trace, rate in job["points"]:
            points.append(await point(engine, job, trace, rate))
            print(f"{job['backend']}: {points[-1]}", file=sys.stderr, flush=True)
        after = await engine.collective_rpc(compilations) if is_ours else None
    finally:
        engine.shutdown()
    return dict(
        backend=job["backend"], shape=job["shape"], start_s=started, points=points, vllm=vllm.__version__, torch=torch.__version__,
        device=torch.cuda.get_device_name(), compiled_while_serving=None if before is None else [after[0] - before[0]],
    )  # fmt: skip


if __name__ == "__main__":
    # Lets the counter's function travel to the workers.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    the_job = json.loads(sys.argv[1])
    Path(the_job["result"]).write_text(json.dumps(asyncio.run(measure(the_job))))
