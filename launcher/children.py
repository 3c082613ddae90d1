"""Which processes the service consists of, and the configuration of each."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine_proc.config import EngineConfig
from frontend.config import FrontendConfig
from launcher.flags import Flags
from router_proc.config import RouterConfig
from tokenizer_proc.config import TokenizerConfig
from wire.limits import Limits

ENGINE_MODULES = {"torch": "engine_proc.main", "mock": "engine_proc.mock_main"}
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class ChildSpec:
    """One process to run: `python -m module`, its envelope's fields, what it inherits."""

    module: str
    role: str
    index: int
    config: bytes  # JSON of its configuration struct
    fds: tuple[int, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)  # on top of the launcher's

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"


@dataclass(frozen=True)
class Place:
    """What is known when the processes can be started."""

    run_dir: Path
    model_dir: Path
    served_models: list[str]
    listen_fd: int
    address: str
    port: int
    api_keys: dict[str, str]
    cache_secret: bytes


def cores(cgroup: Path = CGROUP_CPU) -> int:
    """Cores that this process may use: its affinity, and its control group's quota."""
    found = len(os.sched_getaffinity(0))
    try:
        quota, _, period = cgroup.read_text().strip().partition(" ")
    except OSError:
        return found
    if quota == "max" or not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return found
    return max(1, min(found, -(-int(quota) // int(period))))


def engine_threads(dp: int) -> int:
    """CPU threads of one engine: one core is left to the other processes."""
    return max(1, (cores() - 1) // dp)


def specs(flags: Flags, place: Place) -> list[ChildSpec]:
    """All processes in the order of their start: who listens before who dials."""
    secret = secrets.token_bytes(32)
    limits = _limits(flags)
    router = RouterConfig(
        run_dir=str(place.run_dir),
        secret=secret,
        ranks=flags.dp,
        tokenizers=flags.tokenizers,
        frontends=flags.frontends,
        routing=flags.routing,
        affinity_slack_tokens=flags.affinity_slack_tokens,
        max_queued_requests=flags.max_queued_requests,
        max_queued_tokens=flags.max_queued_tokens,
        engine_silence_seconds=flags.engine_silence_seconds,
        test_hooks=flags.test_hooks,
    )
    found = [ChildSpec("router_proc.main", "router", 0, msgspec.json.encode(router))]
    frontend = msgspec.json.encode(_frontend(flags, place, secret, limits))
    for index in range(flags.frontends):
        found.append(ChildSpec("frontend.main", "frontend", index, frontend, fds=(place.listen_fd,)))
    tokenizer = msgspec.json.encode(_tokenizer(flags, place, secret, limits))
    for index in range(flags.tokenizers):
        found.append(ChildSpec("tokenizer_proc.main", "tokenizer", index, tokenizer))
    threads = str(engine_threads(flags.dp))
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    for rank in range(flags.dp):
        engine = msgspec.json.encode(_engine(flags, place, secret, rank))
        found.append(ChildSpec(ENGINE_MODULES[flags.engine], "engine", rank, engine, environment=environment))
    return found


def _limits(flags: Flags) -> Limits:
    values = {name: getattr(flags, name) for name in Limits.__struct_fields__}
    return Limits(**values)


def _frontend(flags: Flags, place: Place, secret: bytes, limits: Limits) -> FrontendConfig:
    return FrontendConfig(
        run_dir=str(place.run_dir),
        secret=secret,
        listen_fd=place.listen_fd,
        host=place.address,
        port=place.port,
        served_models=place.served_models,
        created=int(time.time()),
        tokenizers=flags.tokenizers,
        frontends=flags.frontends,
        limits=limits,
        api_keys=place.api_keys,
        test_hooks=flags.test_hooks,
        keepalive_seconds=flags.keepalive_seconds,
        header_timeout_seconds=flags.header_timeout_seconds,
        body_timeout_seconds=flags.body_timeout_seconds,
        send_stall_seconds=flags.send_stall_seconds,
        comment_seconds=flags.comment_seconds,
    )


def _tokenizer(flags: Flags, place: Place, secret: bytes, limits: Limits) -> TokenizerConfig:
    return TokenizerConfig(
        run_dir=str(place.run_dir),
        secret=secret,
        cache_secret=place.cache_secret,
        model_dir=str(place.model_dir),
        served_models=place.served_models,
        limits=limits,
        chat_template=str(Path(flags.chat_template).absolute()) if flags.chat_template else "",
        sampling_defaults=flags.sampling_defaults,
        default_max_tokens=flags.default_max_tokens,
        share_prefix_cache=flags.share_prefix_cache,
        segment_cache_tokens=flags.segment_cache_tokens,
        test_hooks=flags.test_hooks,
        key_bits=flags.key_bits,
    )


def _engine(flags: Flags, place: Place, secret: bytes, rank: int) -> EngineConfig:
    return EngineConfig(
        run_dir=str(place.run_dir),
        secret=secret,
        rank=rank,
        ranks=flags.dp,
        kind=flags.engine,
        model_dir=str(place.model_dir),
        device=flags.device,
        dtype=flags.dtype,
        context_length=flags.context_length,
        block_tokens=flags.block_tokens,
        device_blocks=flags.device_blocks,
        prefill_chunk_tokens=flags.prefill_chunk_tokens,
        max_running=flags.max_running,
        max_bypass=flags.max_bypass,
        prefix_cache=flags.prefix_cache,
        load_format=flags.load_format,
        threads=engine_threads(flags.dp),
        step_limit_seconds=flags.step_limit_seconds,
        gpu_memory_fraction=flags.gpu_memory_fraction,
        attention_backend=flags.attention_backend,
        cuda_graphs=flags.cuda_graphs,
        test_hooks=flags.test_hooks,
        key_bits=flags.key_bits,
        mock_step_ms=flags.mock_step_ms,
        mock_model=flags.mock_model,
        cache_secret=place.cache_secret,
        share_prefix_cache=flags.share_prefix_cache,
    )
