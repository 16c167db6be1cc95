"""Shapes of well-known models, for analysis and for benchmarks with random weights at real sizes.

Each entry names the public ``config.json`` its numbers come from.
"""

from __future__ import annotations

from labkit.engine.config import ModelConfig

MODELS: dict[str, ModelConfig] = {
    # HuggingFaceTB/SmolLM2-135M-Instruct config.json; the embedded GGUF file carries the same numbers.
    "smollm2-135m": ModelConfig(
        architecture="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_positions=8_192,
        rms_eps=1e-5,
        rope_theta=100_000.0,
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    # meta-llama/Meta-Llama-3-8B config.json
    "llama-3-8b": ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=8_192,
        rms_eps=1e-5,
        rope_theta=500_000.0,
        bos_token_id=128_000,
        eos_token_ids=(128_001,),
    ),
    # meta-llama/Llama-2-7b-hf config.json; no grouping, one KV head a query head
    "llama-2-7b": ModelConfig(
        architecture="llama",
        vocab_size=32_000,
        hidden_size=4_096,
        intermediate_size=11_008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        max_positions=4_096,
        rms_eps=1e-5,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    # mistralai/Mistral-7B-v0.1 config.json; 32 768 positions there, capped at its attention window of 4 096
    "mistral-7b": ModelConfig(
        architecture="mistral",
        vocab_size=32_000,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=4_096,
        rms_eps=1e-5,
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    # Qwen/Qwen1.5-7B config.json; the last 7B of its line without grouped KV heads
    "qwen1.5-7b": ModelConfig(
        architecture="qwen2",
        vocab_size=151_936,
        hidden_size=4_096,
        intermediate_size=11_008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        max_positions=32_768,
        rms_eps=1e-6,
        rope_theta=1_000_000.0,
        qkv_bias=True,
        bos_token_id=151_643,
        eos_token_ids=(151_643,),
    ),
    # Qwen/Qwen2-7B config.json
    "qwen2-7b": ModelConfig(
        architecture="qwen2",
        vocab_size=152_064,
        hidden_size=3_584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        max_positions=131_072,
        rms_eps=1e-6,
        rope_theta=1_000_000.0,
        qkv_bias=True,
        bos_token_id=151_643,
        eos_token_ids=(151_643,),
    ),
    # Qwen/Qwen3-0.6B config.json; 16 heads of 128 make attention twice as wide as the hidden state
    "qwen3-0.6b": ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=1_024,
        intermediate_size=3_072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        max_positions=40_960,
        rms_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_embeddings=True,
        qk_norm=True,
        bos_token_id=151_643,
        eos_token_ids=(151_645,),
    ),
}
