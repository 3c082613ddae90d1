"""What does everything around the model cost? The whole service with the mock engine, real HTTP clients beside it.

    python -m bench.pipeline [--rows 1,2,3,4] [--runs 3] [--profile ROLE]

Prints one table with the pass lines of DESIGN section 14, rows 1 to 4. Clients are processes of their own (their CPU
time is stated); all share the machine's cores with the service. Figures are medians of `--runs` runs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.client import Job, Load, Result
from tests.pipeline.harness import Service, model_copy, role_of, service
from tokenizer_proc.config import TokenizerConfig
from tokenizer_proc.encode import Encoder
from tokenizer_proc.model_files import load_model_files
from tokenizer_proc.render import ChatTemplate
from wire.limits import Limits

STREAMS = 64
ONE_PER_CHUNK = 1.05  # tokens per chunk up to which a run counts as "one token per chunk"
STEPS_MS = (4.0, 3.0, 2.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4)
# Where threads wait; the event loop's own C code (Runner.run) cannot be told from its wait.
WAITS = (
    "Child._watch",
    "Workers._run",
    "Condition.wait",
    "Poller.poll",
    "Runner.run",
    "Beat.run",
    "Event.wait",
    "MockPending",
)
BACKLOG_TOKENS = 16  # ids per stream and step
CONTEXT = 1 << 18
WORDS = """the a house sea tree answer question small green is was runs under over and but never often 12 345 def
return"""


@dataclass
class Row:
    """One line of the table. `passed` is None where the row has no pass line of its own."""

    what: str
    measured: str
    line: str
    passed: bool | None
    note: str


class Prose:
    """Text of about a number of tokens of the model, the same for the same seed."""

    def __init__(self, model: Path) -> None:
        self.files = load_model_files(model)
        sample = " ".join(random.Random(0).choices(WORDS.split(), k=2000))
        self._tokens_per_word = len(self.files.tokenizer.encode(sample).ids) / 2000

    def text(self, seed: int, tokens: int) -> str:
        return " ".join(random.Random(seed).choices(WORDS.split(), k=max(1, round(tokens / self._tokens_per_word))))


def streamed(model: str, hooks: dict[str, Any], **fields: Any) -> str:
    """A request's body: streamed, usage at the end."""
    body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}
    return json.dumps(body | {"metadata": {"deepinfer_hooks": hooks}})


@contextmanager
def mock_service(*flags: str) -> Iterator[Service]:
    """A service with the mock engine on a copy of the tiny model with a long context."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        model = model_copy(Path(folder) / "model", max_position_embeddings=CONTEXT)
        pool = ("--device-blocks", "20000", "--max-running", "128")
        with service(Path(folder) / "service", *pool, *flags, model=model) as found:
            yield found


def median_of(runs: int, measure: Callable[[int], float]) -> float:
    return statistics.median(measure(run) for run in range(runs))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --- row 1 ------------------------------------------------------------------------------------------------------------


def throughput(server: Service, step_ms: float, tokens: int, per_step: int, seed: int) -> Result:
    """All streams with the same number of tokens, from start to end."""
    hooks = {"step_ms": step_ms, "tokens_per_step": per_step}
    source = random.Random(seed)
    bodies = [
        streamed(server.model, hooks, prompt=[source.randrange(10, 250) for _ in range(32)], max_tokens=tokens)
        for _ in range(STREAMS)
    ]
    return Load(Job(server.port, bodies, STREAMS, STREAMS)).result()


def fastest_one_per_chunk(server: Service, seconds: float, runs: int) -> tuple[float, float, str]:
    """(tokens/s, step ms, note) of the fastest step at which nearly each chunk carries one token."""
    best, best_step, note, missed = 0.0, STEPS_MS[0], "no step was slow enough", 0
    for step_ms in STEPS_MS:
        tokens = int(seconds * 1000 / step_ms)
        found = [throughput(server, step_ms, tokens, 1, run) for run in range(runs)]
        result = sorted(found, key=lambda each: each.tokens / each.seconds)[runs // 2]
        rate, merged = result.tokens / result.seconds, result.tokens / result.chunks
        print(f"  step {step_ms:g} ms: {rate:,.0f} tokens/s, {merged:.3f} tokens a chunk", file=sys.stderr)
        if merged > ONE_PER_CHUNK:
            if (missed := missed + 1) == 2:
                break
            continue
        missed = 0
        if rate > best:
            best, best_step = rate, step_ms
            note = f"step {step_ms:g} ms, {merged:.2f} tokens a chunk, clients' CPU {share(result)}"
    return best, best_step, note


def share(result: Result) -> str:
    return f"{result.cpu_seconds / result.seconds:.0%} of a core"


def row_1(runs: int, seconds: float) -> tuple[list[Row], float]:
    """The two figures of row 1, and the step time of the first one."""
    with mock_service() as server:
        rate, step_ms, note = fastest_one_per_chunk(server, seconds, runs)
        tokens = int(seconds * 200_000 / STREAMS)
        backlog = [throughput(server, 0.0, tokens, BACKLOG_TOKENS, run) for run in range(runs)]
    result = sorted(backlog, key=lambda each: each.tokens / each.seconds)[runs // 2]
    fast = result.tokens / result.seconds
    merged = f"{result.tokens / result.chunks:.1f} tokens a chunk, clients' CPU {share(result)}"
    rows = [
        Row("64 streams, one token per chunk", f"{rate:,.0f} tokens/s", "≥ 30,000", rate >= 30_000, note),
        Row("64 streams, under backlog", f"{fast:,.0f} tokens/s", "≥ 200,000", fast >= 200_000, merged),
    ]
    return rows, step_ms


# --- row 2 ------------------------------------------------------------------------------------------------------------


def cpu_seconds(server: Service) -> dict[str, float]:
    """CPU seconds of each role's processes so far."""
    spent: Counter[str] = Counter()
    for child in server.children():
        times = child.cpu_times()
        spent[role_of(child)] += times.user + times.system
    return dict(spent)


def conversation(prose: Prose, seed: int, old_tokens: int, new_tokens: int) -> list[dict[str, str]]:
    """A conversation whose last message is new and whose former ones depend on `seed // 1000` only."""
    messages = [{"role": "system", "content": prose.text(seed // 1000, 60)}]
    for part in range(4 if old_tokens else 0):
        role = "user" if part % 2 == 0 else "assistant"
        messages.append({"role": role, "content": prose.text(seed // 1000 * 10 + part, (old_tokens - 60) // 4)})
    return [*messages, {"role": "user", "content": prose.text(7_000_000 + seed, new_tokens)}]


def cpu_per_request(
    server: Service, prose: Prose, old: int, new: int, seed: int
) -> tuple[float, dict[str, float], str]:
    """(ms of all serving processes, by role, clients' share) for one request with 128 tokens out, 64 at a time."""
    hooks = {"step_ms": 10}
    count = 4 * STREAMS
    numbers = [
        seed * 1_000_000 + 1000 * (each if old == 0 else each % STREAMS) + each // STREAMS for each in range(count)
    ]
    messages = [conversation(prose, number, old, new) for number in numbers]
    bodies = [streamed(server.model, hooks, messages=each, max_tokens=128) for each in messages]
    if old:  # the turn before: what is old has been seen
        warm = [streamed(server.model, hooks, messages=each[:-1], max_tokens=1) for each in messages[:STREAMS]]
        Load(Job(server.port, warm, STREAMS, STREAMS, path="/v1/chat/completions")).result()
    before = cpu_seconds(server)
    result = Load(Job(server.port, bodies, STREAMS, count, path="/v1/chat/completions")).result()
    spent = {role: 1000 * (after - before[role]) / count for role, after in cpu_seconds(server).items()}
    return sum(spent.values()), spent, share(result)


def row_2(runs: int) -> list[Row]:
    rows = []
    with mock_service() as server:
        prose = Prose(server.model_dir)
        for name, old, new, line in (("1K all new", 0, 960, 5.0), ("128 new of 1K", 880, 128, 2.5)):
            found = [cpu_per_request(server, prose, old, new, 10 * run + (old > 0)) for run in range(runs)]
            total, spent, client = sorted(found, key=lambda each: each[0])[runs // 2]
            parts = ", ".join(f"{role} {ms:.2f}" for role, ms in sorted(spent.items()))
            rows.append(
                Row(
                    f"CPU per request, 128 out, {name}",
                    f"{total:.2f} ms",
                    f"≤ {line:g} ms",
                    total <= line,
                    f"{parts}; clients' CPU {client}",
                )
            )
    return rows


# --- row 3 ------------------------------------------------------------------------------------------------------------


def row_3(runs: int, model: Path | None) -> list[Row]:
    """In this process: the chat of the last turn, rendered and encoded after the turn before."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder:
        source = model or model_copy(Path(folder) / "model", max_position_embeddings=CONTEXT)
        prose = Prose(source)
        config = TokenizerConfig("", b"", b"", str(source), ["bench"], Limits())
        encoder = Encoder(prose.files, config.segment_cache_tokens)
        encoder.longest = CONTEXT
        template = ChatTemplate(prose.files.templates, prose.files.special_tokens, prose.files.control)
        messages: list[dict[str, Any]] = [{"role": "system", "content": prose.text(1, 1000)}]
        for turn in range(127):
            role = "user" if turn % 2 == 0 else "assistant"
            messages.append({"role": role, "content": prose.text(2 + turn, 1000)})
        started = time.perf_counter()
        before = len(encoder.chat(*template.render(messages, None, None))) // 4
        cold = time.perf_counter() - started
        times, total = [], 0
        for run in range(5 * runs):
            turn_messages = [*messages, {"role": "user", "content": prose.text(1_000_000 + run, 1000)}]
            started = time.perf_counter()
            total = len(encoder.chat(*template.render(turn_messages, None, None))) // 4
            times.append(1000 * (time.perf_counter() - started))
    found = statistics.median(times)
    note = f"{before:,} tokens before, {total - before:,} new; all of it anew: {1000 * cold:.0f} ms"
    return [Row("128K conversation + 1K new: render + encode", f"{found:.1f} ms", "≤ 10 ms", found <= 10, note)]


# --- row 4 ------------------------------------------------------------------------------------------------------------


def added_latency(server: Service, seed: int, seconds: float) -> list[float]:
    """First-byte times in ms of single requests with 32-token prompts, sent one after the other to one rank."""
    source = random.Random(seed)
    prompts = [[source.randrange(10, 250) for _ in range(32)] for _ in range(500)]
    bodies = [streamed(server.model, {}, prompt=prompt, max_tokens=1) for prompt in prompts]
    session = {"X-Session-ID": "probe"}
    job = Job(server.port, bodies, 1, 10**6, headers=session, pause=0.005, seconds=seconds)
    return Load(job).result().first_byte_ms[20:]


def row_4(runs: int, step_ms: float, seconds: float) -> list[Row]:
    """Half of row 1's streams on one rank; single requests to the other one, whose mock step takes no time."""
    flags = ("--dp", "2", "--affinity-slack-tokens", "1000000000")
    firsts: list[float] = []
    loads: list[Result] = []
    with mock_service(*flags) as server:
        alone = percentile(added_latency(server, 99, seconds), 0.5)
        for run in range(runs):
            hooks = {"step_ms": step_ms}
            tokens = int((seconds + 2) * 1000 / step_ms)
            bodies = [streamed(server.model, hooks, prompt=[9, run, 9], max_tokens=tokens)] * (STREAMS // 2)
            load = Load(Job(server.port, bodies, STREAMS // 2, STREAMS // 2, headers={"X-Session-ID": "load"}))
            time.sleep(1.0)  # the load is under way
            firsts += added_latency(server, run, seconds)
            loads.append(load.result())
    rate = statistics.median(each.tokens / each.seconds for each in loads)
    p50, p99 = percentile(firsts, 0.5), percentile(firsts, 0.99)
    merged = loads[0].tokens / loads[0].chunks
    note = f"{len(firsts)} requests beside {rate:,.0f} tokens/s, {merged:.2f} tokens a chunk; alone {alone:.2f} ms"
    return [
        Row("HTTP → engine → first byte, p50", f"{p50:.2f} ms", "≤ 1 ms", p50 <= 1, note),
        Row("HTTP → engine → first byte, p99", f"{p99:.2f} ms", "≤ 5 ms", p99 <= 5, ""),
    ]


# --- profile ----------------------------------------------------------------------------------------------------------


def profile(role: str, step_ms: float, seconds: float) -> None:
    """Top costs of one role's process under row 1's load, by py-spy: share of the samples that did not wait."""
    if not (spy := shutil.which("py-spy") or shutil.which(str(Path(sys.executable).parent / "py-spy"))):
        sys.exit("bench.pipeline: --profile needs py-spy (pip install py-spy)")
    with mock_service() as server, tempfile.NamedTemporaryFile(suffix=".txt") as out:
        (process, *_) = server.children(role)
        hooks = {"step_ms": step_ms, "tokens_per_step": 1 if step_ms else BACKLOG_TOKENS}
        tokens = int((seconds + 3) * 1000 / step_ms) if step_ms else int(seconds * 400_000 / STREAMS)
        bodies = [streamed(server.model, hooks, prompt=[9, 9, each], max_tokens=tokens) for each in range(STREAMS)]
        load = Load(Job(server.port, bodies, STREAMS, STREAMS))
        time.sleep(1.0)  # the load is under way
        command = [
            spy,
            "record",
            "-p",
            str(process.pid),
            "-d",
            str(int(seconds)),
            "-r",
            "400",
            "-f",
            "raw",
            "-o",
            out.name,
        ]
        subprocess.run(command, check=True, capture_output=True)
        load.result()
        own: Counter[str] = Counter()
        whole: Counter[str] = Counter()
        for line in Path(out.name).read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            frames = stack.split(";")
            if frames[-1].startswith(WAITS):
                continue
            own[frames[-1]] += int(count)
            for frame in set(frames):
                whole[frame] += int(count)
    samples = sum(own.values())
    print(f"{role}: {samples} samples\n{'own':>6} {'with callees':>13}  function")
    for frame, taken in own.most_common(20):
        print(f"{taken / samples:>6.1%} {whole[frame] / samples:>13.1%}  {frame}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,3,4", help="which rows of the table (default: 1,2,3,4)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument(
        "--step-ms", type=float, default=2.0, help="for --profile (0 = backlog), and row 4 without row 1"
    )
    parser.add_argument("--profile", metavar="ROLE", choices=("frontend", "tokenizer", "router", "engine"))
    parser.add_argument("--model", type=Path, help="folder whose tokenizer row 3 takes (default: the tiny test model)")
    args = parser.parse_args()
    if args.profile:
        profile(args.profile, args.step_ms, args.seconds)
        return
    wanted, step_ms = set(args.rows.split(",")), args.step_ms
    rows: list[Row] = []
    if "1" in wanted:
        rows, step_ms = row_1(args.runs, args.seconds)
    if "2" in wanted:
        rows += row_2(args.runs)
    if "3" in wanted:
        rows += row_3(args.runs, args.model)
    if "4" in wanted:
        rows += row_4(args.runs, step_ms, args.seconds)
    print(f"{'what':<46} {'measured':>18} {'pass line':>10}  {'':<4} note")
    for row in rows:
        print(f"{row.what:<46} {row.measured:>18} {row.line:>10}  {'ok' if row.passed else 'MISS':<4} {row.note}")


if __name__ == "__main__":
    main()
