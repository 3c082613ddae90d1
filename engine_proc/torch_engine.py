"""What an engine of PyTorch models is put together from: the model on its device, and a runner for it."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from engine_proc import memory
from engine_proc.assembly import Facts, Loaded
from engine_proc.config import EngineConfig
from engine_proc.loader import load as load_model
from engine_proc.runner import Runner
from wire.child import Child

TELL_SECONDS = 0.1  # between two reports of progress

log = logging.getLogger("deepinfer.engine")


def load(child: Child, config: EngineConfig) -> Loaded:
    """The model of the configuration on its device, with room for blocks counted. Raises ValueError in one line."""
    torch.set_num_threads(config.threads)
    device = _device(config)
    told = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal told
        if (now := time.monotonic()) - told >= TELL_SECONDS or done == total:
            told = now
            child.phase("loading weights", done, total)

    model_dir = Path(config.model_dir)
    child.phase("loading weights")
    loaded = load_model(model_dir, device, config.dtype, config.load_format, progress, config.block_tokens)
    spec = loaded.model.cache_spec
    facts = Facts(loaded.digest, spec, loaded.vocab_size, loaded.context_length, loaded.eos_ids, loaded.dtype, device)
    if device == "cpu":
        num_blocks = memory.cpu_blocks(config, spec, loaded.context_length, memory.available_bytes())
    else:
        free, total = torch.cuda.mem_get_info(device)
        num_blocks = memory.cuda_blocks(config, spec, loaded.context_length, free, total)
    log.info(
        "%d blocks of %d tokens, %.1f MiB", num_blocks, spec.block_tokens, num_blocks * spec.block_bytes() / (1 << 20)
    )

    def make_runner(blocks: int) -> Runner:
        return Runner(
            loaded,
            blocks,
            config.max_running,
            config.attention_backend,
            config.cuda_graphs,
            lambda done, total: child.phase("capturing graphs", done, total),
        )

    return Loaded(
        facts,
        num_blocks,
        make_runner,
        depth=0 if device == "cpu" else 1,
    )


def _device(config: EngineConfig) -> str:
    """On CUDA each rank has a device of its own, unless the configuration names one."""
    return f"cuda:{config.rank}" if config.device == "cuda" else config.device
