"""Tiny random models of each family, and their greedy tokens from eager attention and from the engine with uniattn."""

from collections.abc import Iterable

import pytest
import torch

transformers = pytest.importorskip("transformers")

from uniattn.integrations import transformers as integration  # noqa: E402

VOCAB = 96
WINDOW = 24
# One token, around multiples of 16 and of the window, shorter and longer than both.
PROMPT_LENS = (5, 70, 1, 33, 16, 50, 2)

# Weights are drawn ten and more times larger than a model's usual start: attention must be far from uniform, or an error in it
# would leave the tokens as they are.
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MOSTLY_SLIDING = ["sliding_attention"] * 3 + ["full_attention"]


def llama():
    return transformers.LlamaConfig(**TINY)


def qwen3():
    return transformers.Qwen3Config(**{**TINY, "num_attention_heads": 6})


def qwen3_windows():
    return transformers.Qwen3Config(**TINY, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)


def mistral():
    return transformers.MistralConfig(**TINY, sliding_window=WINDOW)


def gemma2():
    own = {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, "layer_types": ALTERNATING}
    return transformers.Gemma2Config(**TINY, **own, sliding_window=WINDOW)


def gemma3():
    own = {"query_pre_attn_scalar": 8, "layer_types": MOSTLY_SLIDING}
    return transformers.Gemma3TextConfig(**TINY, **own, sliding_window=WINDOW)


def gpt_oss():
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ALTERNATING}
    return transformers.GptOssConfig(**TINY, **own, sliding_window=WINDOW)


FAMILIES = [llama, qwen3, qwen3_windows, mistral, gemma2, gemma3, gpt_oss]


def make_model(config, device: str = "cpu"):
    """A model with seeded random weights in fp32; sinks are drawn wide enough to take a good part of a row's weight."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model.to(device)


def make_prompts(prompt_lens: Iterable[int] = PROMPT_LENS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in prompt_lens]


def greedy(num_new: int):
    return transformers.GenerationConfig(
        max_new_tokens=num_new, do_sample=False, eos_token_id=VOCAB, pad_token_id=0
    )  # no token ends an answer


def eager(model, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """The tokens of `generate` with the model's own attention, one prompt at a time."""
    model.set_attn_implementation("eager")
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy(num_new))
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


def batched(model, prompts: list[list[int]], num_new: int, **options) -> list[list[int]]:
    """The tokens of the engine with uniattn. It swallows what attention raises and fails the requests, hence the assertions."""
    model.set_attn_implementation(integration.register())
    config = transformers.ContinuousBatchingConfig(**{"block_size": 16, "num_blocks": 256, "max_batch_tokens": 40, **options})
    outputs = model.generate_batch(prompts, generation_config=greedy(num_new), continuous_batching_config=config)
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    return [output.generated_tokens for output in outputs.values()]
