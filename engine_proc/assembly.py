"""Putting an engine together from its parts, for every kind of model, and running it to its end."""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import zmq

from engine_proc.blocks import BlockPool
from engine_proc.cache_spec import CacheSpec
from engine_proc.config import EngineConfig
from engine_proc.prefix import PrefixCache, PrefixRules
from engine_proc.scheduler import Limits, Scheduler
from engine_proc.service import Engine, Runner
from engine_proc.watchdog import Watchdog
from wire.child import Child
from wire.link import Beat, Dialer
from wire.messages import PROTOCOL_VERSION, EngineInfo, Hello

TURN_SECONDS = 1.0
MOST_ERROR_CHARS = 500

log = logging.getLogger("deepinfer.engine")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a loaded model, real or not, tells about itself."""

    digest: str
    spec: CacheSpec
    vocab_size: int
    context_length: int
    eos_ids: list[int]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready but for its blocks. depth: steps under way while the next one is planned."""

    facts: Facts
    num_blocks: int
    make_runner: Callable[[int], Runner]  # number of blocks → runner
    depth: int


class Connection:
    """The link to the router with its heartbeat; made before the model is loaded."""

    def __init__(self, config: EngineConfig, generation: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hello = Hello(PROTOCOL_VERSION, "engine", config.rank, generation, config.secret, os.getpid())
        self.link = Dialer(self.context, f"{config.run_dir}/router.sock", hello)
        self._beat = Beat(self.context, self.link, generation)
        self._beat.start()

    def close(self) -> None:
        self._beat.stop()
        self.link.close()
        self.context.destroy(0)


def context_length(config: EngineConfig, facts: Facts, pool_tokens: int) -> int:
    """How long a sequence may become. ValueError when an explicit length is more than there is room for."""
    wanted, model = config.context_length, facts.context_length
    if wanted > pool_tokens:
        raise ValueError(
            f"--context-length {wanted} is more than the {pool_tokens} tokens that the block pool can hold "
            f"(--device-blocks; on cuda --gpu-memory-fraction)"
        )
    if wanted > model:
        raise ValueError(f"--context-length {wanted} is more than the model's own {model} tokens")
    if wanted:
        return wanted
    found = min(model, pool_tokens)
    log.info("context length %d tokens: the model has %d, the block pool holds %d", found, model, pool_tokens)
    return found


def engine_info(config: EngineConfig, facts: Facts, num_blocks: int) -> EngineInfo:
    """What the router is told. Raises ValueError as `context_length` does."""
    pool_tokens = num_blocks * facts.spec.block_tokens
    return EngineInfo(
        model_digest=facts.digest,
        cache_format=facts.spec.cache_format,
        vocab_size=facts.vocab_size,
        context_length=context_length(config, facts, pool_tokens),
        model_context_length=facts.context_length,
        pool_tokens=pool_tokens,
        block_tokens=facts.spec.block_tokens,
        keep_tokens=facts.spec.keep_tokens,
        eos_ids=facts.eos_ids,
        max_running=config.max_running,
        dtype=facts.dtype,
        device=facts.device,
    )


def assemble(
    config: EngineConfig,
    facts: Facts,
    info: EngineInfo,
    num_blocks: int,
    runner: Runner,
    link: Dialer,
    depth: int,
    watch: Watchdog | None = None,
) -> Engine:
    """An engine around a runner with `num_blocks` blocks and `config.max_running` slots."""
    pool = BlockPool(num_blocks, facts.spec.block_tokens)
    rules = PrefixRules(
        config.cache_secret, facts.digest, config.prefix_cache, config.share_prefix_cache, config.key_bits
    )
    limits = Limits(config.max_running, config.prefill_chunk_tokens, config.max_bypass)
    scheduler = Scheduler(pool, PrefixCache(pool, facts.spec, rules), runner, limits)
    return Engine(config, info, runner, scheduler, link, depth, watch)


def run(child: Child, load: Callable[[Child, EngineConfig], Loaded]) -> None:
    """From the start of the process to the launcher's stop."""
    config = child.config(EngineConfig)
    connection = Connection(config, child.generation)
    try:
        loaded = load(child, config)
        info = engine_info(config, loaded.facts, loaded.num_blocks)
        child.phase("reserving blocks")
        runner = loaded.make_runner(loaded.num_blocks)
    except ValueError as error:
        give_up(child, str(error))
    except Exception as error:  # noqa: BLE001  the process ends with it, in one line
        give_up(child, describe(error))
    watchdog = step_watchdog(child, config)
    link = connection.link
    engine = assemble(config, loaded.facts, info, loaded.num_blocks, runner, link, loaded.depth, watchdog)
    engine.watch(child.fileno())
    link.greet(info)
    child.ready(blocks=loaded.num_blocks, context_length=info.context_length, device=info.device, dtype=info.dtype)
    gc.collect()
    gc.freeze()  # what the start has made stays: no collection looks at it again
    watchdog.start()
    try:
        while not child.stopping:
            if engine.turn(TURN_SECONDS):
                for control in child.controls():
                    if control.what == "lost":
                        engine.lost(control)
            if engine.refused:
                give_up(child, f"the router refused this engine: {engine.refused}")
    except Exception as error:  # noqa: BLE001  the process ends with it, in one line
        give_up(child, describe(error))
    watchdog.stop()
    connection.close()


def describe(error: BaseException) -> str:
    """One line that says what and where."""
    text = " ".join(str(error).split())[:MOST_ERROR_CHARS]
    places = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(places[-1].filename).name} line {places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {text}{where}"


def give_up(child: Child, text: str) -> NoReturn:
    """Tell the launcher why in one line and end at once: nothing of a broken device may hold the process back."""
    try:
        child.fail(text)
    finally:
        os._exit(1)


def step_watchdog(child: Child, config: EngineConfig) -> Watchdog:
    """Ends the process when a step takes longer than --step-limit-seconds."""
    limit = config.step_limit_seconds
    return Watchdog(limit, lambda _: give_up(child, f"a step takes longer than {limit:g} s (--step-limit-seconds)"))
