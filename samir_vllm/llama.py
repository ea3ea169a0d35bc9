"""The Llama forward pass, written once over the Backend protocol.

Every backend runs these lines; what differs is only what the operations are made of. Knows no device,
no sequence, no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from samir_vllm.backends import Array, Backend
from samir_vllm.config import ModelConfig

Observer = Callable[[str, int, Array], None]
"""Called as ``observer(name, layer_idx, array)`` at each named buffer; layer -1 is outside the layers."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer on the device; matrices are [out, in]."""

    input_norm: Array  # [hidden]
    qkv_proj: Array  # [(H + 2 Hkv) * D, hidden]: q, k, v one below the other, so that one GEMM gives all
    o_proj: Array  # [hidden, H * D]
    post_attention_norm: Array  # [hidden]
    gate_up_proj: Array  # [2 I, hidden]
    down_proj: Array  # [hidden, I]


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """A whole model on the device."""

    embed_tokens: Array  # [vocab_size, hidden]
    layers: list[LayerWeights]
    norm: Array  # [hidden]
    lm_head: Array  # [vocab_size, hidden]; the embeddings themselves where the head is tied


def load_weights(
    backend: Backend,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    progress: Callable[[int], None] = lambda done: None,
) -> LlamaWeights:
    """Upload a checkpoint layer by layer.

    Args:
        backend: where to.
        config: the model.
        tensors: BF16 arrays by their Hugging Face names.
        progress: called with the number of layers done.
    """

    def up(*names: str) -> Array:
        return backend.upload([tensors[name] for name in names])

    def layer(i: int) -> LayerWeights:
        p = f"model.layers.{i}."
        attn, mlp = p + "self_attn.", p + "mlp."
        weights = LayerWeights(
            input_norm=up(p + "input_layernorm.weight"),
            qkv_proj=up(attn + "q_proj.weight", attn + "k_proj.weight", attn + "v_proj.weight"),
            o_proj=up(attn + "o_proj.weight"),
            post_attention_norm=up(p + "post_attention_layernorm.weight"),
            gate_up_proj=up(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            down_proj=up(mlp + "down_proj.weight"),
        )
        progress(i + 1)
        return weights

    with backend.uploading():
        embed_tokens = up("model.embed_tokens.weight")
        return LlamaWeights(
            embed_tokens=embed_tokens,
            layers=[layer(i) for i in range(config.num_layers)],
            norm=up("model.norm.weight"),
            lm_head=embed_tokens if config.tie_word_embeddings else up("lm_head.weight"),
        )


def gemm_shapes(weights: LlamaWeights) -> list[Array]:
    """One matrix of each shape that the forward pass multiplies by, the LM head last."""
    layer = weights.layers[0]
    return [layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj, weights.lm_head]


def hidden_states(
    backend: Backend, weights: LlamaWeights, inputs: Any, observe: Observer | None = None
) -> Array:
    """One step through the layers.

    Args:
        backend: whose ``stage`` made ``inputs``.
        weights: on that backend.
        inputs: the staged batch of T tokens.
        observe: sees each buffer, for tools that compare backends.

    Returns:
        The residual stream BF16 [T, hidden], before the final norm.
        K and V of all T tokens are in their pages.
    """
    see = observe or (lambda name, layer_idx, array: None)
    x = backend.embedding(weights.embed_tokens, inputs)  # [T, hidden]
    see("embedding", -1, x)
    for i, layer in enumerate(weights.layers):
        qkv = backend.norm_qkv(x, layer.input_norm, layer.qkv_proj)  # [T, (H + 2 Hkv) * D]
        see("qkv", i, qkv)
        q = backend.rope_kv_write(qkv, i, inputs)  # [T, H, D]
        see("q", i, q)
        attention = backend.attention(q, i, inputs)  # [T, H * D]
        see("attention", i, attention)
        x = backend.linear_add(attention, layer.o_proj, x)  # [T, hidden]
        see("attention_residual", i, x)
        mlp = backend.norm_mlp(x, layer.post_attention_norm, layer.gate_up_proj)  # [T, I]
        see("mlp", i, mlp)
        x = backend.linear_add(mlp, layer.down_proj, x)  # [T, hidden]
        see("mlp_residual", i, x)
    return x


def forward(backend: Backend, weights: LlamaWeights, inputs: Any, observe: Observer | None = None) -> Array:
    """One step through the model; arguments as for ``hidden_states``.

    Returns:
        Logits FP32 [L, vocab_size] of the batch's ``logit_rows``.
    """
    x = hidden_states(backend, weights, inputs, observe)
    logits = backend.logits(x, weights.norm, weights.lm_head, inputs.logit_rows)  # [L, vocab_size]
    if observe is not None:
        observe("logits", -1, logits)
    return logits
