"""What the prefix cache says and what it must never change.

54, 57: (device tier, mock engine) cached_tokens is floor128(T - 1) on the second time and the answer is the same;
the numeric part with a real model is in test_prefix_cache_torch.py. 55: key collisions are misses. 65: keys are the
same in every process. 66: a unit is attached only to a prompt with the same ids.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.harness import ROOT, Service, service
from tests.pipeline.web import poll, together

COMPLETIONS = "/v1/completions"
BLOCK = 128

# SHA-256 chain of blocks of 4 ids, root = 32 zero bytes, ids 0..11; computed once with another implementation.
KEY_VECTORS = [
    "b02e0d143ccacaaee83a69ef8eda1d98b38aa1e3799ee50360538059e0c2a5c4",
    "a42a5305c04a857685206d3e54998e9fe3b29191d5b1af140d42f2bc385310a4",
    "25a09fde32a84b5b28a6aef861d9cb4da879d27e37c4138459e09511fc2e5a6e",
]
ROOT_VECTOR = "e9730ae165480d54cf6174d1796fa0c205975cc2f85209a59d91f5e75ad4fb56"
KEY_PROGRAM = """
import array, json
from wire.keys import block_keys, root_key
ids = array.array("i", range(14)).tobytes()
keys = [key.hex() for key in block_keys(bytes(32), ids, 4)]
print(json.dumps([keys, root_key(b"secret", "digest", "bf16/128", "a").hex()]))
"""


def unique(seed: int, count: int, vocabulary: int = 250) -> list[int]:
    """`count` ids that no other seed gives."""
    source = random.Random(seed)
    return [source.randrange(10, vocabulary) for _ in range(count)]


def ask(server: Service, ids: list[int], **fields: Any) -> tuple[str, int]:
    answer = server.post(COMPLETIONS, server.prompt_body(ids, **{"max_tokens": 16, "temperature": 0, **fields}))
    assert answer.status == 200, answer.body
    return answer.text(), answer.usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 384, 385, 600])
def test_57_all_but_the_last_token_may_be_cached(server: Service, length: int) -> None:
    ids = unique(1000 + length, length)
    cold, again = ask(server, ids), ask(server, ids)
    assert cold[1] == 0
    assert again[1] == (length - 1) // BLOCK * BLOCK
    assert again[0] == cold[0]


def test_57_a_conversation_finds_its_last_turn(server: Service) -> None:
    ids = unique(2000, 300)
    ask(server, ids)
    assert ask(server, ids + unique(2001, 50))[1] == 256
    assert ask(server, ids[:200] + unique(2002, 200))[1] == 128
    assert ask(server, ids[:100] + unique(2003, 200))[1] == 0


@pytest.mark.parametrize("length", [127, 256, 600])
def test_57_the_cache_can_be_turned_off_for_a_request(server: Service, length: int) -> None:
    ids = unique(3000 + length, length)
    cold = ask(server, ids, prefix_cache=False)
    assert ask(server, ids) == (cold[0], 0), "a request without prefix cache stored its prefix"
    assert ask(server, ids, prefix_cache=False) == cold
    answer = server.post(COMPLETIONS, server.prompt_body(ids, prefix_cache=False, max_tokens=1))
    assert answer.usage["prompt_tokens_details"]["miss_reason"] == "disabled"


def test_57_usage_tells_why(server: Service) -> None:
    ids = unique(4000, 300)
    body = server.prompt_body(ids, max_tokens=1)
    first, second = (server.post(COMPLETIONS, body).usage["prompt_tokens_details"] for _ in range(2))
    assert first["miss_reason"] == "cold"
    assert (second["cached_tokens"], second["device_tokens"], second["host_tokens"]) == (256, 256, 0)


def test_57_choices_of_one_request_count_the_prompt_once(server: Service) -> None:
    ids = unique(5000, 300)
    answer = server.post(COMPLETIONS, server.prompt_body(ids, n=3, max_tokens=2))
    assert answer.usage["prompt_tokens"] == 300
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] % BLOCK == 0


def test_54_a_flush_makes_the_next_one_cold(server: Service) -> None:
    ids = unique(6000, 300)
    cold = ask(server, ids)
    assert ask(server, ids)[1] == 256
    reply = server.post("/deepinfer/test/hook", {"name": "flush_device_cache", "rank": 0, "args": {}})
    assert reply.status == 200, reply.body
    assert ask(server, ids) == cold
    reply = server.post("/deepinfer/test/hook", {"name": "check_pools", "rank": 0, "args": {}})
    assert reply.status == 200, reply.body


@pytest.mark.parametrize("prompts", [80, pytest.param(1000, marks=pytest.mark.long)])
def test_55_key_collisions_are_misses(folder: Path, server: Service, prompts: int) -> None:
    with service(folder, "--key-bits", "8") as colliding:
        wanted = [unique(7000 + number, 260) for number in range(prompts)]
        for ids in wanted:
            assert ask(colliding, ids, max_tokens=6)[0] == ask(server, ids, max_tokens=6, prefix_cache=False)[0]
        poll("collisions are counted", lambda: colliding.metrics().total("prefix_key_collisions_total") > 0, 5)
        assert server.metrics().total("prefix_key_collisions_total") == 0


def keys_in_another_process(seed: str) -> Any:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    out = subprocess.run(
        [sys.executable, "-c", KEY_PROGRAM], cwd=ROOT, env=environment, capture_output=True, check=True, timeout=60
    )
    return json.loads(out.stdout)


def test_65_keys_equal_the_fixed_vectors_in_every_process() -> None:
    for seed in ("0", "1", "4294967295"):
        assert keys_in_another_process(seed) == [KEY_VECTORS, ROOT_VECTOR]


@pytest.mark.parametrize("rounds", [8, pytest.param(50, marks=pytest.mark.long)])
def test_66_pairs_at_the_same_moment_never_share_what_they_should_not(folder: Path, rounds: int) -> None:
    """An echo model, conversations with markers of their own, and a pool that is too small for all of them."""
    with service(folder, "--device-blocks", "24") as server:
        source = random.Random(1)
        conversations = [unique(8000 + number, 200) for number in range(20)]

        def echo(ids: list[int]) -> None:
            body = server.prompt_body(ids, hooks={"echo": True, "dump_prompt": True}, max_tokens=len(ids))
            cold = server.prompt_body(ids, hooks={"echo": True}, max_tokens=len(ids), prefix_cache=False)
            answer, reference = server.post(COMPLETIONS, body), server.post(COMPLETIONS, cold)
            assert answer.status == reference.status == 200, (answer.body, reference.body)
            assert answer.json()["deepinfer_prompt_ids"] == ids
            assert answer.text() == reference.text()

        for ids in conversations:
            echo(ids)
        for round_ in range(rounds):
            pair = [source.choice(conversations) + unique(9000 + 2 * round_ + side, 70) for side in range(2)]
            together([partial(echo, ids) for ids in pair])
        poll("reuse is counted", lambda: server.metrics().total("prefix_tokens_reused_total") > 0, 5)
