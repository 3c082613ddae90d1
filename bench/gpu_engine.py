"""What does the engine give on one CUDA device? Decode, prefill and repeated prompts of a Qwen3-8B shape.

Weights are made on the device. Pass lines: decode at batch 1 at most 5.2 ms a step, the host's share at most 1 ms a
step at batch 256. The floor of a decode step is the bytes that it must read (weights once, K and V of every context)
over the bandwidth that a large copy reaches in the same run.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import hashlib
import itertools
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.local_engine import LocalEngine, StepTime, event, greedy
from engine_proc.loader import LoadedModel, load
from engine_proc.runner import Runner

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "eos_token_id": 0,
}
BATCHES = (1, 8, 32, 128, 256)
PROMPTS = (2048, 8192, 32768)
CONTEXT = 1024
PEER = {1: 5.20, 8: 5.70, 32: 6.53, 128: 11.11, 256: 18.65}  # ms, a strong peer on this shape and device
PEER_COLD = {2048: 47.9, 8192: 212.0, 32768: 1226.0}
PEER_AGAIN = {2048: 9.0, 8192: 11.5, 32768: 23.7}


def model(layers: int) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps({**QWEN3_8B, "num_hidden_layers": layers}))
        return load(path, "cuda", "bf16", "random", lambda done, total: None)


def bandwidth() -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    start, end = (event(), event())
    found = []
    for _ in range(6):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        found.append(2 * source.nbytes / start.elapsed_time(end) * 1e3)
    return float(statistics.median(found[1:]))


def prompt(length: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(1, QWEN3_8B["vocab_size"], length).tolist()
    return ids


def keys(ids: list[int], size: int) -> list[bytes]:
    """A name for each full block that depends on all ids up to its end."""
    digest, found = hashlib.sha256(), []
    for start in range(0, len(ids) - size + 1, size):
        digest.update(np.array(ids[start : start + size], np.int32).tobytes())
        found.append(digest.copy().digest())
    return found


def idle_share(times: list[StepTime]) -> float:
    """Share of the time in which the device had no work: from a step's end to the start of the next one."""
    events = [step.events for step in times if step.events is not None]
    idle = sum(max(0.0, before[1].elapsed_time(after[0])) for before, after in itertools.pairwise(events))
    return float(idle / events[0][0].elapsed_time(events[-1][1]))


def decode(loaded: LoadedModel, runner: Runner, batch: int, steps: int, speed: float, profile: bool) -> None:
    engine = LocalEngine(loaded, runner, 8192, batch, 1)
    engine.eos_ids = []  # random weights may produce one
    for seed in range(batch):
        engine.add(prompt(CONTEXT, seed), greedy(2 * batch + steps + 80))
    while engine.scheduler._prefilling or engine.scheduler.waiting:
        engine.turn()
    for _ in range(10):
        engine.turn()
    gc.collect()
    gc.freeze()
    engine.times.clear()
    for _ in range(steps):
        engine.turn()
    times = list(engine.times)
    torch.cuda.synchronize()
    assert all(step.rows == batch for step in times)
    if profile:
        _profile(engine)
    engine.run()
    shape = loaded.model.config.attention
    weights = sum(view.nbytes for view in runner.model.destinations().values()) - QWEN3_8B["vocab_size"] * 4096 * 2
    cached = batch * (CONTEXT + steps // 2) * shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    wall = 1e3 * statistics.median(step.wall for step in times)
    host = [1e3 * statistics.median(part) for part in zip(*((t.plan, t.launch, t.take) for t in times), strict=True)]
    floor = 1e3 * (weights + cached) / speed
    print(
        f"decode  batch {batch:4d}  {wall:7.2f} ms/step  (floor {floor:6.2f}, peer {PEER[batch]:6.2f})  "
        f"{1e3 * batch / wall:9,.0f} tokens/s  host {sum(host):5.2f} ms ({host[0]:.2f} plan, "
        f"{host[1]:.2f} launch, {host[2]:.2f} take)  device idle {100 * idle_share(times):4.1f}%",
        flush=True,
    )


def _profile(engine: LocalEngine) -> None:
    """Prints what 5 steps cost on the device, by kernel, and 10 on the host, by function."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(5):
            engine.turn()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    for row in rows[:16]:
        total = row.self_device_time_total / 5e3
        print(f"    {total:7.3f} ms/step  {row.count / 5:6.1f} x {1e3 * total / row.count * 5:7.1f} us  {row.key[:90]}")
    host = cProfile.Profile()
    host.enable()
    for _ in range(20):
        engine.turn()
    host.disable()
    entries = pstats.Stats(host).stats.items()  # type: ignore[attr-defined]  # its one way to the numbers
    for (file, line, name), (_, calls, own, total, _) in sorted(entries, key=lambda entry: -entry[1][2])[:24]:
        place = f"{Path(file).name}:{line} {name[:60]}"
        print(f"    host {5e4 * own:6.0f} us/step ({5e4 * total:6.0f} with callees)  {calls / 20:6.1f} x {place}")


def prefill(loaded: LoadedModel, runner: Runner, length: int, chunk: int) -> None:
    size = loaded.model.cache_spec.block_tokens
    cold: list[float] = []
    again: list[float] = []
    for seed in range(3):
        ids = prompt(length, 1000 * length + seed)
        for found in (cold, again):
            engine_time = _first_token(loaded, runner, ids, keys(ids, size), chunk, found is cold)
            found.append(1e3 * engine_time)
    first, repeated = statistics.median(cold[1:]), statistics.median(again[1:])
    print(
        f"prefill {length:6d} tokens in chunks of {chunk:5d}: TTFT {first:8.1f} ms (peer {PEER_COLD[length]:7.1f}), "
        f"{1e3 * length / first:9,.0f} tokens/s; repeated {repeated:6.1f} ms (peer {PEER_AGAIN[length]:5.1f})",
        flush=True,
    )


_engine: LocalEngine | None = None


def _first_token(
    loaded: LoadedModel, runner: Runner, ids: list[int], names: list[bytes], chunk: int, fresh: bool
) -> float:
    """Seconds from the submission to the first id; a fresh engine has nothing cached."""
    global _engine
    if fresh or _engine is None:
        _engine = LocalEngine(loaded, runner, chunk, 1, 1)
    torch.cuda.synchronize()
    began = time.perf_counter()
    sid = _engine.add(ids, greedy(4), names)
    _engine.run()
    return _engine.given[sid].first_at - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=QWEN3_8B["num_hidden_layers"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS))
    parser.add_argument("--chunks", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batch sizes whose costs are printed too")
    parser.add_argument("--attention", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    speed = bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy moves {speed / 1e12:.2f} TB/s", flush=True
    )
    loaded = model(args.layers)
    loaded_at = time.perf_counter()
    blocks = 256 * (CONTEXT + 256) // 128
    runner = Runner(loaded, blocks, max([*args.batches, 1]), args.attention, cuda_graphs=not args.no_graphs)
    torch.cuda.synchronize()
    ready = time.perf_counter()
    used, reserved = torch.cuda.memory_allocated() / 2**30, torch.cuda.memory_reserved() / 2**30
    print(f"weights made in {loaded_at - began:.1f} s; blocks, kernels and graphs in {ready - loaded_at:.1f} s")
    print(f"{used:.1f} GiB of device memory in use, {reserved:.1f} reserved", flush=True)
    for batch in args.batches:
        decode(loaded, runner, batch, args.steps, speed, batch in args.profile)
    for length in args.prompts:
        for chunk in args.chunks:
            prefill(loaded, runner, length, chunk)


if __name__ == "__main__":
    main()
