"""Configuration of a tokenizer process."""

from __future__ import annotations

import msgspec

from wire.limits import Limits


class TokenizerConfig(msgspec.Struct):
    """Made once by the launcher from its flags."""

    run_dir: str
    secret: bytes  # of the session: links
    cache_secret: bytes  # of the server or cluster: roots of block keys
    model_dir: str  # folder with tokenizer.json, tokenizer_config.json, config.json, generation_config.json
    served_models: list[str]
    limits: Limits
    chat_template: str = ""  # path; "" = the model's own
    sampling_defaults: str = "model"  # "model" (generation_config.json) | "openai"
    default_max_tokens: int = 0  # 0 = to the end of the context
    share_prefix_cache: bool = False
    segment_cache_tokens: int = 4_000_000
    test_hooks: bool = False
    key_bits: int = 256
