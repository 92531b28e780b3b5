"""Answers from the engine's continuous batching, and the same answers from the model's own eager attention."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from uniattn.errors import UniattnError

BLOCK_SIZE = 32


class EngineError(UniattnError):
    """The engine did not answer a request."""


@dataclass(frozen=True)
class Answer:
    """One request's greedy tokens and the seconds from the start of the job until they were all there."""

    index: int
    tokens: list[int]
    seconds: float


@dataclass(frozen=True)
class Batches:
    """What the engine's steps were made of, counted from the lengths that the model was called with.

    A query of one token over more keys than that is a decode; any other is a prefill or a chunk of one.
    """

    steps: int
    mixed: int
    largest: int  # requests in the fullest step


def answer(
    model: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    max_batch_tokens: int,
    on_answer: Callable[[Answer], None],
    on_step: Callable[[int], None],
) -> Batches:
    """Answer all prompts by continuous batching with uniattn's attention.

    Args:
        model: a causal language model of transformers.
        prompts: token ids of each request.
        max_new_tokens: the most tokens that an answer has.
        max_batch_tokens: the most new tokens in one step: longer prompts are read in chunks.
        on_answer: called as each request finishes, on the calling thread.
        on_step: called with the number of new tokens of each step, on the engine's thread.

    Raises:
        EngineError: a request failed, with the reason.
    """
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    from uniattn.integrations.transformers import register

    model.set_attn_implementation(register())
    config = ContinuousBatchingConfig(
        block_size=BLOCK_SIZE,
        num_blocks=_blocks_needed(model.config.get_text_config(), [len(p) + max_new_tokens for p in prompts]),
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=min(len(prompts), max_batch_tokens),
    )
    lengths: list[tuple[Any, Any]] = []

    def note_lengths(module: Any, args: Any, options: dict[str, Any]) -> None:
        # The engine reuses its buffers, hence the copies; they are read after the job, so that no step waits for one.
        cu_seqlens_k = options["cu_seq_lens_k"]
        cu_seqlens_k = next(iter(cu_seqlens_k.values())) if isinstance(cu_seqlens_k, dict) else cu_seqlens_k
        lengths.append((options["cu_seq_lens_q"].clone(), cu_seqlens_k.clone()))
        on_step(options["input_ids"].numel())

    manager = model.init_continuous_batching(generation_config=_greedy(model, max_new_tokens), continuous_batching_config=config)
    hook = model.register_forward_pre_hook(note_lengths, with_kwargs=True)
    finished = 0
    try:
        ids = {manager.add_request(prompt, request_id=f"prompt {i}"): i for i, prompt in enumerate(prompts)}
        begin = time.perf_counter()
        manager.start()
        while finished < len(prompts):
            result = manager.get_result(timeout=0.2)
            if result is None and not manager.is_running():
                raise _failed(f"a stop after {finished} of {len(prompts)} answers")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise _failed(f"an error in request {ids[result.request_id] + 1}: {result.error}")
            finished += 1
            on_answer(Answer(ids[result.request_id], list(result.generated_tokens), time.perf_counter() - begin))
    finally:
        hook.remove()
        manager.stop(block=True, hard_stop=finished < len(prompts))
        manager.destroy()
    return _count(lengths)


def _failed(got: str) -> EngineError:
    return EngineError("generate_batch", got, "every request must be answered", "see what the engine printed above")


def eager_tokens(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The greedy tokens of the model's own eager attention, for one prompt alone."""
    import torch

    model.set_attn_implementation("eager")
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=_greedy(model, max_new_tokens))
    return out[0, len(prompt) :].tolist()


def _greedy(model: Any, max_new_tokens: int) -> Any:
    """Greedy decoding that ends where the model's own configuration says that an answer ends."""
    from transformers import GenerationConfig

    own = model.generation_config
    eos = own.eos_token_id if own.eos_token_id is not None else -1
    pad = own.pad_token_id if own.pad_token_id is not None else 0
    return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=pad)


def _blocks_needed(config: Any, totals: Sequence[int]) -> int:
    """Blocks that hold all requests at once, for every group of layers, with the margin that the engine's scheduler keeps free.

    The engine groups layers of a kind by the greatest common divisor of the kinds' counts, and each group takes blocks of its
    own.
    """
    kinds = getattr(config, "layer_types", None) or ["full"] * config.num_hidden_layers
    counts = [kinds.count(kind) for kind in set(kinds)]
    num_groups = len(kinds) // math.gcd(*counts)
    blocks = sum(math.ceil(total / BLOCK_SIZE) + 1 for total in totals) * num_groups
    return math.ceil(blocks * 1.25) + 1


def _count(lengths: Sequence[tuple[Any, Any]]) -> Batches:
    """Count steps and those with both a decode and a prefill, from `(cu_seqlens_q, cu_seqlens_k)` of every step."""
    mixed = largest = 0
    for cu_seqlens_q, cu_seqlens_k in lengths:
        q_lens, kv_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        num_decodes = sum(q == 1 and kv > 1 for q, kv in zip(q_lens, kv_lens, strict=True))
        num_requests = sum(q > 0 for q in q_lens)
        mixed += 0 < num_decodes < num_requests
        largest = max(largest, num_requests)
    return Batches(len(lengths), mixed, largest)
