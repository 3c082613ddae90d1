"""Produced blocks are found by the next turn: engine and tokenizer name them alike (behaviour 57, mock engine).

The first prompt is shorter than a block, so every key of the chain comes from the root that the engine computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.harness import Service, service

COMPLETIONS = "/v1/completions"


def cached(server: Service, ids: list[int], **fields: Any) -> int:
    answer = server.post(COMPLETIONS, server.prompt_body(ids, **{"max_tokens": 1, **fields}))
    assert answer.status == 200, answer.body
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


def turn(server: Service, first: int) -> list[int]:
    """One turn with a short prompt; → prompt and answer as ids."""
    prompt = [first] * 20
    script = [10 + (first * number) % 239 for number in range(300)]
    assert cached(server, prompt, hooks={"script": script}, max_tokens=301) == 0
    return prompt + script


def test_57_a_turn_finds_what_the_last_one_produced(server: Service) -> None:
    assert cached(server, [*turn(server, 201), 7, 8, 9]) == 256


@pytest.mark.parametrize("shared", [False, True])
def test_92_what_a_tenant_produced_is_its_own(folder: Path, shared: bool) -> None:
    keys = folder.parent / "keys"
    keys.write_text("one:key-one\ntwo:key-two\n")
    keys.chmod(0o600)
    flags = ("--api-key-file", str(keys), *(["--share-prefix-cache"] if shared else []))
    with service(folder, *flags, key="key-one") as server:
        longer = [*turn(server, 202), 7]
        assert cached(server, longer) == 256
        answer = server.post(COMPLETIONS, server.prompt_body(longer, max_tokens=1), {"Authorization": "Bearer key-two"})
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] == (256 if shared else 0)
