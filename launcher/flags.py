"""The launcher's configuration, read from the command line and the two environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.options import ENGINE, make_parser

DEVICES = {"nvidia": "cuda", "cpu": "cpu"}  # DEEPINFER_ACCELERATOR -> --device


@dataclass(frozen=True)
class Flags:
    """Every option by its name. Times in seconds, sizes in bytes; 0 means "no limit" or "automatic" where said."""

    model: str
    served_model_name: tuple[str, ...]
    cache_dir: Path | None
    engine: str
    device: str
    dtype: str
    load_format: str
    context_length: int
    default_max_tokens: int
    sampling_defaults: str
    chat_template: str
    template_kwargs: tuple[str, ...]
    host: str
    port: int
    port_file: Path | None
    api_key: tuple[str, ...]
    api_key_file: Path | None
    header_timeout_seconds: float
    body_timeout_seconds: float
    keepalive_seconds: float
    send_stall_seconds: float
    comment_seconds: float
    dp: int
    tokenizers: int
    frontends: int
    max_running: int
    max_bypass: int
    prefill_chunk_tokens: int
    device_blocks: int
    block_tokens: int
    gpu_memory_fraction: float
    attention_backend: str
    cuda_graphs: bool
    step_limit_seconds: float
    prefix_cache: bool
    share_prefix_cache: bool
    cluster_secret_file: Path | None
    segment_cache_tokens: int
    routing: str
    affinity_slack_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    engine_silence_seconds: float
    max_n: int
    max_messages: int
    max_tools: int
    max_stop: int
    max_stop_chars: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_top_logprobs: int
    max_completion_logprobs: int
    max_json_depth: int
    max_body_bytes: int
    inline_body_bytes: int
    start_timeout_seconds: float
    drain_seconds: float
    log_level: str
    test_hooks: bool
    key_bits: int
    mock_step_ms: float
    mock_model: str


def parse(arguments: list[str], environment: Mapping[str, str]) -> Flags:
    """The launcher's configuration. Ends the process with code 2 and one line at the first wrong value."""
    parser = make_parser()
    found, unknown = parser.parse_known_args(arguments)
    parser.refuse_unknown(unknown)
    values: dict[str, Any] = vars(found)
    for several in ("served_model_name", "template_kwargs", "api_key"):
        values[several] = tuple(values[several])
    accelerator = environment.get("DEEPINFER_ACCELERATOR", "")
    if accelerator and accelerator not in DEVICES:
        parser.error(f"environment DEEPINFER_ACCELERATOR: {accelerator!r} is not one of nvidia, cpu")
    values["device"] = values["device"] or DEVICES.get(accelerator, "cpu")
    values["chat_template"] = values["chat_template"] or ""
    values["model"] = values["model"] or environment.get("DEEPINFER_HF_MODEL_DIR", "")
    if values["gpu_memory_fraction"] is None:
        values["gpu_memory_fraction"] = ENGINE.gpu_memory_fraction
    elif values["device"] != "cuda":
        parser.error("argument --gpu-memory-fraction needs --device cuda")
    flags = Flags(**values)
    if flags.engine != "mock" and (flags.mock_step_ms, flags.mock_model) != (0.0, "counter"):
        parser.error("arguments --mock-step-ms and --mock-model need --engine mock")
    if flags.device != "cuda" and flags.attention_backend == "paged":
        parser.error("argument --attention-backend: paged needs --device cuda; accepted here are auto, sdpa")
    if flags.key_bits != 256 and not flags.test_hooks:
        parser.error("argument --key-bits: below 256 it needs --test-hooks")
    return flags
