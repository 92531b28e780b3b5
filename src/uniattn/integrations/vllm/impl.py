"""One layer's attention in vLLM: writes into the cache, and the call of the operator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from uniattn.attention import attention, write_kv
from uniattn.integrations.vllm import context_parallel, releases
from uniattn.integrations.vllm.metadata import UniattnMetadata
from uniattn.integrations.vllm.refusal import refuse
from uniattn.integrations.vllm.steps import PAGES, TOKENS, step_of


class UniattnImpl(AttentionImpl):
    """The attention of one layer. vLLM makes it with the first ten arguments of `AttentionImpl` by position, others by name.

    Args:
        sliding_window: tokens that a query sees, its own included; None for all.
        sinks: `[num_heads]`, a score for each head that joins the softmax (gpt-oss).
        other: what a model may pass beyond that. Anything that asks for something is refused, which stops vLLM at start-up.
    """

    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **other: Any,
    ) -> None:
        asked = sorted(name for name, value in other.items() if value not in (None, False, -1))
        if asked:
            refuse(f"a layer asks for {', '.join(asked)}, which uniattn has no code for")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = float(logits_soft_cap or 0.0)
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.is_encoder = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
        self.fp8_dtype = None
        if kv_cache_dtype.startswith("fp8"):
            self.fp8_dtype = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else current_platform.fp8_dtype()
        if self.is_encoder and self.fp8_dtype is not None:
            refuse("encoder attention keeps no cache, so there is none to quantise; leave out --kv-cache-dtype")
        if self.dcp_world_size > 1:
            context_parallel.check(self)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: UniattnMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of all sequences of the step into `output`, which is returned.

        Args:
            layer: vLLM's layer, which holds the cache's scales.
            query: `[num_tokens, num_heads, head_size]`; rows past the metadata's tokens are padding and stay unwritten.
            key, value: `[num_tokens, num_kv_heads, dim]`, the new tokens'. Only encoders and context parallelism read them here.
            kv_cache: the layer's cache; `releases.pages` tells its shapes.
            attn_metadata: the batch, None while vLLM measures memory.
            output: `[num_tokens, num_heads, dim]`.
            output_scale, output_block_scale: for quantised outputs, which this backend has told vLLM that it does not make.
        """
        if attn_metadata is None:
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("uniattn writes no quantised output, and says so in fused_output_quant_supported")
        num_tokens = attn_metadata.num_actual_tokens
        q, out = query[:num_tokens], output[:num_tokens]
        if self.is_encoder:
            k, v = _new_tokens(key, value, num_tokens)
            step = step_of(self, attn_metadata, TOKENS, q, k, v, self.sliding_window, causal=False)
            attention(q, k, v, **step.lengths, plan=step.plan, window=step.window, **self.scores, out=out)
            return output
        k_pages, v_pages = self.pages(kv_cache)
        scales = self.scales(layer)
        if self.dcp_world_size > 1:
            k, v = _new_tokens(key, value, num_tokens)
            context_parallel.forward(self, attn_metadata, q, k, v, k_pages, v_pages, scales, out)
            return output
        step = step_of(self, attn_metadata, PAGES, q, k_pages, v_pages, self.sliding_window, attn_metadata.causal)
        attention(
            q, k_pages, v_pages, page_table=attn_metadata.block_table, **step.lengths, plan=step.plan, window=step.window,
            **self.scores, **scales, out=out,
        )  # fmt: skip
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write K and V of new tokens, `[num_tokens, num_kv_heads, dim]`, into their slots; a slot below 0 is skipped.

        There may be fewer slots than tokens: the rest is padding of a CUDA graph.
        """
        if self.is_encoder:
            return
        num_slots = slot_mapping.shape[0]
        write_kv(key[:num_slots], value[:num_slots], *self.pages(kv_cache), slot_mapping, **self.scales(layer))

    @property
    def kind(self) -> dict[str, Any]:
        """What the layer's kernels are compiled for, as `uniattn.warmup` names it."""
        return dict(
            num_q_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_size, softcap=self.softcap,
            window=None if self.sliding_window is None else (self.sliding_window - 1, 0),
            sinks=None if self.sinks is None else self.sinks.dtype, alibi_slopes=self.alibi_slopes is not None,
        )  # fmt: skip

    @property
    def cache_kind(self) -> dict[str, Any]:
        """What else the kernels that read and write the cache are compiled for."""
        return {} if self.fp8_dtype is None else dict(kv_dtype=self.fp8_dtype, k_scale=True, v_scale=True)

    @property
    def scores(self) -> dict[str, Any]:
        """Arguments of `uniattn.attention` that tell a score's life in this layer."""
        return dict(softmax_scale=self.scale, softcap=self.softcap, sinks=self.sinks, alibi_slopes=self.alibi_slopes)

    def pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the cache; vLLM keeps fp8 as bytes."""
        k_pages, v_pages = releases.pages(kv_cache, self.head_size)
        if self.fp8_dtype is not None:
            return k_pages.view(self.fp8_dtype), v_pages.view(self.fp8_dtype)
        return k_pages, v_pages

    def scales(self, layer: Any) -> dict[str, Any]:
        """The cache's scales, float32 on the device, for the tensor or for each KV head; none where it is not quantised."""
        return {} if self.fp8_dtype is None else dict(k_scale=layer._k_scale, v_scale=layer._v_scale)


def _new_tokens(key: Tensor | None, value: Tensor | None, num_tokens: int) -> tuple[Tensor, Tensor]:
    """K and V of the batch's tokens, which vLLM leaves out only where a layer reads what another has written."""
    if key is None or value is None:
        raise NotImplementedError("uniattn needs K and V of the new tokens here: encoders keep no cache, and ranks share one")
    return key[:num_tokens], value[:num_tokens]
