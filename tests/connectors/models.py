"""Tiny Llama checkpoints whose outputs depend visibly on their KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


def write_llama(directory: Path, seed: int = 0) -> Path:
    """A checkpoint with random weights, large enough that attention matters."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, heads = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_attention_heads"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.12).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": matrix(CONFIG["vocab_size"], hidden) * 8,
        "lm_head.weight": matrix(CONFIG["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for index in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        tensors |= {
            f"{layer}self_attn.q_proj.weight": matrix(heads * CONFIG["head_dim"], hidden),
            f"{layer}self_attn.k_proj.weight": matrix(kv, hidden),
            f"{layer}self_attn.v_proj.weight": matrix(kv, hidden),
            f"{layer}self_attn.o_proj.weight": matrix(hidden, heads * CONFIG["head_dim"]),
            f"{layer}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}mlp.down_proj.weight": matrix(hidden, inner),
            f"{layer}input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            f"{layer}post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        }
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_config(directory: Path, **changes: Any) -> Path:
    """A model without weights, for `load_format="dummy"`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def write_lora(directory: Path, rank: int = 8) -> Path:
    """A random adapter for `write_llama`'s model."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "r": rank,
                "lora_alpha": 4 * rank,
                "target_modules": ["q_proj", "v_proj"],
                "bias": "none",
                "task_type": "CAUSAL_LM",
            }
        )
    )
    generator = torch.Generator().manual_seed(3)
    hidden = CONFIG["hidden_size"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    tensors = {}
    for index in range(CONFIG["num_hidden_layers"]):
        for name, rows in (("q_proj", hidden), ("v_proj", kv)):
            prefix = f"base_model.model.model.layers.{index}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.3
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
