"""Models that the serving benchmark runs with random weights: folders with a config, as `vllm serve` takes them."""

import json
from pathlib import Path

LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5, rope_theta=500000.0,
    max_position_embeddings=131072, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16",
)  # fmt: skip
LLAMA_8B = LLAMA | dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)

SHAPES = {
    "llama-3.1-8b": LLAMA_8B,
    "mistral-small-24b": LLAMA
    | dict(
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        hidden_size=5120,
        intermediate_size=32768,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=131072,
        sliding_window=None,
    ),
    # Five layers with a window of 1024, then one without; the text model alone, whose masks know no images.
    "gemma-3-12b": dict(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        hidden_size=3840,
        intermediate_size=15360,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        vocab_size=262208,
        sliding_window=1024,
        layer_types=[("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(48)],
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        max_position_embeddings=131072,
        torch_dtype="bfloat16",
        bos_token_id=2,
        eos_token_id=1,
    ),
    # gpt-oss's attention in a dense model: sinks, and windows of 128 in every other layer. `sinks_model.py` is its code.
    "llama-sinks": LLAMA_8B
    | dict(
        architectures=["LlamaSinksForCausalLM"],
        sliding_window=128,
        layer_types=[("full" if i % 2 else "sliding") + "_attention" for i in range(32)],
    ),
    # For a quick look at whether all works.
    "tiny": LLAMA
    | dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, vocab_size=2048),
}


def write(name: str, folder: Path) -> Path:
    """Write the config of the shape `name` below `folder` and return the model's folder."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    return path


def vocab_size(name: str) -> int:
    """Token ids of the shape are below this."""
    size = SHAPES[name]["vocab_size"]
    assert isinstance(size, int)
    return size
