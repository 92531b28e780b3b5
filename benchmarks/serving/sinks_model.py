"""A Llama whose layers have attention sinks, for vLLM, and what makes vLLM know it in each of its processes.

vLLM finds plugins by the metadata of installed packages; `as_plugin` writes such metadata for this file alone.
"""

import importlib
from pathlib import Path

NAME = "LlamaSinksForCausalLM"


def register() -> None:
    """Tell vLLM where the model is; the entry point that vLLM calls."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(NAME, f"{__name__}:{NAME}")


def as_plugin(folder: Path) -> list[str]:
    """Write an installed package's metadata into `folder`; returns what must be on `PYTHONPATH`."""
    info = folder / "uniattn_sinks_model-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: uniattn-sinks-model\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nsinks_model = {Path(__file__).stem}:register\n")
    return [str(folder), str(Path(__file__).parent)]


def __getattr__(name: str) -> type:
    """The model's class, made when vLLM asks for it: importing this file needs no vLLM."""
    if name != NAME:
        raise AttributeError(name)
    return _model()


def _model() -> type:
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    llama = importlib.import_module("vllm.model_executor.models.llama")

    class SinksAttention(llama.LlamaAttention):
        """The layer's attention, made once more with sinks."""

        def __init__(self, *args, cache_config=None, quant_config=None, prefix="", **kwargs):
            super().__init__(*args, cache_config=cache_config, quant_config=quant_config, prefix=prefix, **kwargs)
            window = self.attn.sliding_window
            del get_current_vllm_config().compilation_config.static_forward_context[f"{prefix}.attn"]
            self.sinks = torch.nn.Parameter(torch.zeros(self.num_heads), requires_grad=False)
            self.attn = Attention(
                self.num_heads, self.head_dim, self.scaling, num_kv_heads=self.num_kv_heads, cache_config=cache_config,
                quant_config=quant_config, per_layer_sliding_window=window, prefix=f"{prefix}.attn", sinks=self.sinks,
            )  # fmt: skip

    class SinksLayer(llama.LlamaDecoderLayer):
        def __init__(self, vllm_config, prefix="", config=None):
            super().__init__(vllm_config, prefix, config, attn_layer_type=SinksAttention)

    class LlamaSinksForCausalLM(llama.LlamaForCausalLM):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=SinksLayer)

    LlamaSinksForCausalLM.__module__, LlamaSinksForCausalLM.__qualname__ = __name__, NAME
    globals()[NAME] = LlamaSinksForCausalLM
    return LlamaSinksForCausalLM
