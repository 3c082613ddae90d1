"""How many blocks fit: from what the machine, its control group, or the device has left."""

from __future__ import annotations

from pathlib import Path

from engine_proc.cache_spec import CacheSpec
from engine_proc.config import EngineConfig

CPU_SHARE = 0.25  # of the memory that is available, for the blocks of all ranks together
WORKSPACE_BYTES = 1 << 30  # on CUDA, for activations and the libraries' own
MEMINFO = Path("/proc/meminfo")
CGROUPS = (  # limit, usage, statistics, and there the name of what the kernel takes back when needed
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this process may still take: the machine's, or its control group's rest if that is less."""
    found = [1024 * number for number in _numbers(meminfo, "MemAvailable:")]
    for limit_name, usage_name, cached_name in CGROUPS:
        limit, usage = _number(cgroup / limit_name), _number(cgroup / usage_name)
        if limit >= 0 and usage >= 0:
            statistics = (cgroup / limit_name).with_name("memory.stat")
            found.append(max(0, limit - usage + sum(_numbers(statistics, cached_name))))
    if not found:
        raise ValueError("neither /proc/meminfo nor a control group tells how much memory there is; --device-blocks")
    return min(found)


def _number(path: Path) -> int:
    """-1 when there is none ("max" means no limit)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return -1
    return int(text) if text.isdigit() else -1


def _numbers(path: Path, name: str) -> list[int]:
    """The first number behind a name, in a file of lines with a name first; none if it is not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    return [int(words[1]) for line in lines if (words := line.split()) and words[0] == name]


def enough_blocks(config: EngineConfig, context_length: int, block_tokens: int) -> int:
    """More blocks than this cannot be in use at once."""
    return config.max_running * -(-(config.context_length or context_length) // block_tokens)


def cpu_blocks(config: EngineConfig, spec: CacheSpec, context_length: int, available: int) -> int:
    """Blocks of one rank on the CPU. ValueError names what is missing."""
    size = spec.block_bytes()
    if config.device_blocks:
        wanted = config.device_blocks * size * config.ranks  # they all take theirs from the same memory
        if wanted > available:
            ranks = f" for {config.ranks} ranks" if config.ranks > 1 else ""
            raise ValueError(
                f"--device-blocks {config.device_blocks} wants {_mib(wanted)}{ranks}, "
                f"but only {_mib(available)} of memory are available"
            )
        return config.device_blocks
    share = int(available * CPU_SHARE) // config.ranks
    count = min(share // size, enough_blocks(config, context_length, spec.block_tokens))
    return _at_least_one(count, size, share, "--device-blocks")


def cuda_blocks(config: EngineConfig, spec: CacheSpec, context_length: int, free: int, total: int) -> int:
    """Blocks of one rank on a CUDA device that holds its weights; free, total: bytes. ValueError names what is missing.

    --gpu-memory-fraction is of the whole device, and what is in use already (weights among it) counts against it.
    """
    size = spec.block_bytes()
    if config.device_blocks:
        if config.device_blocks * size > free:
            raise ValueError(
                f"--device-blocks {config.device_blocks} wants {_mib(config.device_blocks * size)}, "
                f"but only {_mib(free)} of device memory are free"
            )
        return config.device_blocks
    budget = int(free - (1.0 - config.gpu_memory_fraction) * total) - WORKSPACE_BYTES
    count = min(budget // size, enough_blocks(config, context_length, spec.block_tokens))
    return _at_least_one(count, size, budget, "--gpu-memory-fraction, --device-blocks")


def _at_least_one(count: int, size: int, budget: int, options: str) -> int:
    if count < 1:
        raise ValueError(
            f"too little memory: one block takes {_mib(size)}, "
            f"and {_mib(max(0, budget))} are left for blocks ({options})"
        )
    return count


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"
