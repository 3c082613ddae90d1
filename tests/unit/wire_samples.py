"""One sample of each message with every field set, and the script that prints the golden file of their bytes.

`python -m tests.unit.wire_samples > tests/fixtures/wire_golden.json` after a change of format that is meant.
"""

from __future__ import annotations

import json
from pathlib import Path

from wire.link import HEADER
from wire.messages import (
    Abort,
    Accepted,
    EngineInfo,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Histogram,
    Hook,
    HookReply,
    Message,
    MetricsQuery,
    MetricsReply,
    Params,
    Refused,
    Rejected,
    Resync,
    Sampling,
    SequenceLogprobs,
    ServiceInfo,
    ServiceStatus,
    Shape,
    Stats,
    StepOutput,
    Submit,
    TextDelta,
    TextOutput,
    TokenLogprobs,
    Usage,
    Welcome,
    Who,
    encoder,
)

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "wire_golden.json"
RID = 0x1234_5678_9A00

ENGINE = EngineInfo("ab" * 32, "fp32/llama", 49_152, 8000, 8192, 65_536, 128, 1, [0, 2], 64, "fp32", "cpu")
SERVICE = ServiceInfo("ab" * 32, "fp32/llama", 49_152, 8000, 128, 1, [0, 2])
USAGE = Usage(300, 256, 128, 128, "evicted")
SAMPLING = Sampling(
    0.7, 0.9, 40, 0.05, 0.1, 0.2, 1.1, {5: -1.5}, -7, 33, "max_completion_tokens", 2, True, ["END"], [9], 3
)
PARAMS = Params(0.7, 0.9, 40, 0.05, 0.1, 0.2, 1.1, -7, 33, 2, True, [9], 3, {5: -1.5}, False, {"step_ms": 4})
SHAPE = Shape("completions", "tiny", True, 4, True, True, 3, True, True, 2)


def samples() -> list[Message]:
    """One of each type; no field has its default."""
    finished = Finished(RID | 1, 2, "stop", 7, USAGE, "internal_error", 2)
    records = SequenceLogprobs(RID | 1, 6, [TokenLogprobs(-0.25, [5, 6], [-0.25, -1.5])])
    delta = TextDelta(RID | 1, 10, "né", 7, "stop", USAGE, "request_timeout", b'[{"token":"n"}]')
    return [
        Hello(1, "engine", 3, 77, b"secret", 4242, ENGINE),
        Welcome(1, "router", 78, 2**62 + 1, SERVICE),
        Who(78),
        Refused("protocol version 2, this side speaks 1"),
        Heartbeat(77),
        Resync([RID, RID | 1], [4, 0]),
        ServiceStatus("degraded", "1 of 2 ranks are out", 1, 2, SERVICE, 5),
        Generate(
            RID,
            "tenant",
            SHAPE,
            SAMPLING,
            "completions",
            [{"role": "user", "content": "hi"}],
            [{"type": "function", "function": {"name": "f"}}],
            {"enable_thinking": False},
            ["one", [1, 2]],
            "session",
            "user",
            False,
            2.5,
            {"echo": True},
            "application/json",
        ),
        Submit(RID | 1, 2, 3, "tenant", PARAMS, "session", "user", b"0123456789abcdef", 2.5, b"\x00context"),
        Accepted([RID, RID | 1], [0, 2], 3, "prefix", SHAPE, 300, [1, 2]),
        Rejected(RID, 429, "rate_limit_error", "queue_full", "prompt", "the queue is full", 12),
        Abort([RID, RID | 1], "client"),
        StepOutput([RID | 1], [2], [6], [1], [finished], [records]),
        TextOutput([delta]),
        Stats({"a_total": 3.0}, {'b{c="d"}': 1.5}, {"e": Histogram([0.1, 1.0], [1, 0, 2], 4.5)}, {"f": [1]}),
        MetricsQuery(9, "json"),
        MetricsReply(9),
        Hook(10, 1, "check_pools", {"deep": True}),
        HookReply(10, True, {"free": 5}),
    ]


def golden() -> dict[str, str]:
    """Name → hex of the bytes."""
    found = {type(message).__name__: encoder.encode(message).hex() for message in samples()}
    found["(link header: session, sequence)"] = HEADER.pack(0x0102030405060708, 0x0A0B0C0D).hex()
    return found


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
