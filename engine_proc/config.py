"""Configuration of an engine process."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct):
    """Made once by the launcher from its flags."""

    run_dir: str
    secret: bytes
    rank: int
    ranks: int
    kind: str  # "torch" | "mock"
    model_dir: str
    device: str  # "cpu" | "cuda"
    dtype: str  # "fp32" | "bf16" | "auto"
    context_length: int = 0  # 0 = min(model, pool)
    block_tokens: int = 128
    device_blocks: int = 0  # 0 = from memory
    prefill_chunk_tokens: int = 2048
    max_running: int = 64
    max_bypass: int = 32
    prefix_cache: bool = True
    load_format: str = "safetensors"  # "safetensors" | "random"
    threads: int = 1
    step_limit_seconds: float = 120.0
    gpu_memory_fraction: float = 0.9
    attention_backend: str = "auto"  # one of attention.registry.BACKENDS
    cuda_graphs: bool = True
    test_hooks: bool = False
    key_bits: int = 256
    mock_step_ms: float = 0.0
    mock_model: str = "counter"  # "counter" | "echo"; a request's hooks may script it
    cache_secret: bytes = b""  # with it, blocks that fill with produced ids are named as tokenizers name prompts
    share_prefix_cache: bool = False  # all tenants have one root
