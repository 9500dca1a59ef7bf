"""Tiny random models of every family that the trainer knows, as Hugging Face folders and as GGUF files.

The GGUF files are written from transformers' weights with the `gguf` package's own table of names, and with nothing of
ours: they are what the conversion of a real model would give.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

VOCABULARY = 96
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

# Name -> transformers' configuration and model class, and what differs from `COMMON`. Those in SERVED are also written
# as GGUF; the others are variants that only the trainer's forward pass has to tell apart.
SERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": False}),
    "smollm": ("LlamaConfig", "LlamaForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 12}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"tie_word_embeddings": False, "pad_token_id": 0}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 12, "num_key_value_heads": 1}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 12,
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "query_pre_attn_scalar": 12,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
}
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama without groups": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama with biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "llama 3": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "mistral with a window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}),
    "qwen2 with windows above": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "phi3 with a window": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 5, "pad_token_id": 0}),
}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large enough that the distribution is far from uniform, as a trained model's is.
    "initializer_range": 0.2,
}
# Texts at which llama.cpp ends an answer whatever the file's keys say; the last ids of the tiny vocabulary.
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"),
    *("<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
)


def write_family(folder: Path, name: str) -> Any:
    """A random model of the family or variant as a folder; the transformers model that wrote it."""
    config_class, model_class, changes = (SERVED | VARIANTS)[name]
    torch.manual_seed(11)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**COMMON | changes)).eval()
    for tensor_name, parameter in model.named_parameters():
        if (
            tensor_name.endswith(".bias") or "norm" in tensor_name
        ):  # fresh ones are all 0 or 1: a mistake would not show
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    model.save_pretrained(folder)
    return model


def write_family_gguf(
    path: Path,
    model: Any,
    quantised: gguf.GGMLQuantizationType | None = None,
    add_tokenizer: Callable[[gguf.GGUFWriter], None] | None = None,
    **keys: int,
) -> None:
    """The model as a GGUF file of float32 tensors.

    Args:
        quantised: the type of the matrices whose rows are whole blocks of it.
        add_tokenizer: instead of the vocabulary of words that mean nothing.
        keys: further integers, by the name behind the architecture with `__` for `.`.
    """
    config = model.config
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    _add_facts(writer, config, arch)
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    (add_tokenizer or _add_tokenizer)(writer)
    architecture = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == arch)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if arch.startswith("gemma") and hf_name.endswith("norm.weight"):
            values = values + np.float32(1)
        n_heads = heads.get(hf_name.split(".")[-2]) if arch == "llama" else None
        if n_heads is not None:  # Hugging Face rotates halves of a head, llama.cpp neighbouring rows
            values = values.reshape(n_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        values = np.ascontiguousarray(values)
        if quantised is not None and values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[quantised][0] == 0:
            writer.add_tensor(gguf_name, gguf.quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_facts(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_type("model")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    rope = config.rope_parameters
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_freq_base(rope["rope_theta"])


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    plain = ["<unk>", "<s>", "</s>", "<0x0A>", *(f"w{n}" for n in range(4, VOCABULARY - len(END_TEXTS)))]
    tokens = [*plain, *END_TEXTS]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.BYTE]
    kinds += [gguf.TokenType.NORMAL] * (len(plain) - 4) + [gguf.TokenType.CONTROL] * len(END_TEXTS)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
