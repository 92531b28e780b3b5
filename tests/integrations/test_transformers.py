"""transformers' continuous batching through `paged|uniattn`: the same greedy tokens as the model's eager attention, in fp32."""

from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig  # noqa: E402

import uniattn  # noqa: E402
from uniattn.integrations import transformers as integration  # noqa: E402

VOCAB = 96
WINDOW = 24
# Prompts of one token, shorter and longer than the window, and around multiples of the block sizes used here.
PROMPT_LENS = (5, 70, 1, 33, 16, 50, 2)

# Weights ten and more times larger than a model's usual start: attention must be far from uniform, or tokens would not show an error in it.
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def llama():
    return transformers.LlamaConfig(**TINY, num_hidden_layers=3)


def qwen3():
    return transformers.Qwen3Config(**{**TINY, "num_attention_heads": 6}, num_hidden_layers=2)


def qwen3_windows():
    return transformers.Qwen3Config(
        **TINY, num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    )


def mistral():
    return transformers.MistralConfig(**TINY, num_hidden_layers=3, sliding_window=WINDOW)


def gemma2():
    return transformers.Gemma2Config(
        **TINY, num_hidden_layers=4, sliding_window=WINDOW, layer_types=ALTERNATING, attn_logit_softcapping=0.8, query_pre_attn_scalar=8
    )


def gemma3():
    return transformers.Gemma3TextConfig(
        **TINY, num_hidden_layers=4, sliding_window=WINDOW, layer_types=["sliding_attention"] * 3 + ["full_attention"], query_pre_attn_scalar=8
    )


def gpt_oss():
    return transformers.GptOssConfig(
        **TINY, num_hidden_layers=4, sliding_window=WINDOW, layer_types=ALTERNATING, num_local_experts=4, num_experts_per_tok=2
    )


FAMILIES = [llama, qwen3, qwen3_windows, mistral, gemma2, gemma3, gpt_oss]


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small run several times faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
    return model


def make_prompts(prompt_lens=PROMPT_LENS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in prompt_lens]


def greedy(num_new):
    return GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)


def eager(model, prompts, num_new):
    model.set_attn_implementation("eager")
    return [
        model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p), dtype=torch.int64), generation_config=greedy(num_new))[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]


def batched(model, prompts, num_new, *, block_size=16, max_batch_tokens=40, num_blocks=256, **options):
    """The engine's tokens with uniattn. Errors in the attention function are swallowed by the engine, hence the assertion."""
    model.set_attn_implementation(integration.register())
    config = ContinuousBatchingConfig(block_size=block_size, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, **options)
    outputs = model.generate_batch(prompts, generation_config=greedy(num_new), continuous_batching_config=config)
    assert len(outputs) == len(prompts)
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("make_config", FAMILIES)
def test_same_tokens_as_eager(make_config):
    """Several requests of mixed lengths; 40 tokens a step cut the longer prompts into chunks, which share steps with decodes."""
    model, prompts = make_model(make_config()), make_prompts()
    assert batched(model, prompts, 40) == eager(model, prompts, 40)


@pytest.mark.parametrize("make_config", [llama, mistral, gemma2])
@pytest.mark.parametrize(
    ("block_size", "max_batch_tokens"),
    [(4, 17), (16, 256), (24, 64), (256, 33)],
    ids=["tiny blocks and chunks", "whole prompts, nothing to read at first", "a block no power of two", "a block of more than a sequence"],
)
def test_block_and_chunk_sizes(make_config, block_size, max_batch_tokens):
    model, prompts = make_model(make_config()), make_prompts()
    got = batched(model, prompts, 8, block_size=block_size, max_batch_tokens=max_batch_tokens, num_blocks=1 + 8192 // block_size)
    assert got == eager(model, prompts, 8)
