"""The law: a body's depth is told exactly, whatever its strings hold, without a step for each of its values."""

from __future__ import annotations

import json
import random
from typing import Any

from api import decode

STRINGS = ["a]b[", 'q"}{\\', "\\\\", '\\"[[', "]", "\u20ac[", "{", ""]


def made(source: random.Random, levels: int) -> Any:
    kind = source.random()
    if levels == 0 or kind < 0.2:
        return source.choice([1, None, True, *STRINGS])
    if kind < 0.6:
        return [made(source, levels - 1) for _ in range(source.randrange(3))]
    return {source.choice(STRINGS): made(source, levels - 1) for _ in range(source.randrange(3))}


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def test_the_depth_of_any_body() -> None:
    source = random.Random(3)
    for _ in range(2000):
        value = [made(source, source.randrange(7))]
        body = json.dumps(value, ensure_ascii=source.random() < 0.5).encode()
        assert not decode._is_deeper(body, depth(value))
        assert decode._is_deeper(body, depth(value) - 1)
