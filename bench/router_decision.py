"""How long does a routing decision take? 64 ranks (and 1,024), 128K-token prompts; pass line: p99 at most 50 µs."""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import time

from router_proc.placement import Placement, Wanted

BLOCK = 128


def chain(seed: int, blocks: int) -> bytes:
    """Keys of a chain of blocks."""
    key, keys = seed.to_bytes(8, "little"), []
    for _ in range(blocks):
        key = hashlib.sha256(key).digest()
        keys.append(key)
    return b"".join(keys)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(ranks: int, tokens: int, decisions: int) -> tuple[list[float], list[float]]:
    """Microseconds of each decision, and of the counting and remembering after it."""
    source = random.Random(1)
    placement = Placement(ranks, "affinity", 8192)
    for rank in range(ranks):
        placement.ready(rank, rank + 1, BLOCK, 1, 4_000_000)
    blocks = tokens // BLOCK
    conversations = [chain(seed, blocks) for seed in range(64)]
    decided, counted, shares = [], [], []
    for number in range(decisions):
        keys = source.choice(conversations)
        part = source.randrange(blocks // 2, blocks)
        session = f"session-{number % 97}" if number % 4 == 0 else ""
        # fmt: off
        wanted = Wanted("tenant", keys[: 32 * part], part * BLOCK + 17, 512, session, "", keys[:16])
        # fmt: on
        started = time.perf_counter()
        choice = placement.choose(wanted)
        chosen = time.perf_counter()
        assert choice is not None
        shares.append(placement.dispatched(wanted, choice))
        decided.append(1e6 * (chosen - started))
        counted.append(1e6 * (time.perf_counter() - chosen))
        if len(shares) > 16 * ranks:
            for share in shares.pop(source.randrange(len(shares))):
                placement.release(share, 300)
    return decided, counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decisions", type=int, default=3000)
    args = parser.parse_args()
    gc.disable()
    print(f"{'ranks':>6} {'tokens':>8} {'what':<22} {'p50 µs':>8} {'p99 µs':>8}")
    for ranks, tokens in ((64, 131_072), (64, 2048), (1024, 131_072)):
        decided, counted = measure(ranks, tokens, args.decisions)
        for what, values in (("decision", decided), ("counting, remembering", counted)):
            print(f"{ranks:>6} {tokens:>8} {what:<22} {percentile(values, 0.5):>8.1f} {percentile(values, 0.99):>8.1f}")


if __name__ == "__main__":
    main()
