"""Law: every stream has the contract's form, order and end, whatever comes in which pieces (behaviours 13-20)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.frontend_world import World, world
from wire.messages import Rejected


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


def test_tokens_become_chunks_then_the_finish_chunk_then_done(here: World) -> None:
    call = here.chat(stream=True).accept()
    stream = call.stream()
    call.text("Hel")
    assert stream.first_token() < 2
    call.text('lo "é\n').finish()
    stream.read()
    assert stream.text() == 'Hello "é\n'
    assert stream.finish_reason() == "length"
    assert stream.headers["x-deepinfer-route"] == "rank=2; reason=session"
    assert stream.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "Hel"}
    assert not any(chunk.get("usage") for chunk in stream.chunks)


def test_refusal_after_the_tokenizer_saw_it_is_a_plain_answer(here: World) -> None:
    call = here.chat(stream=True)
    text = "the maximum context length is 10 tokens, this is 12"
    here.tokenizer.say(Rejected(call.rid, 400, "invalid_request_error", "context_length_exceeded", "messages", text))
    answer = call.answer()
    assert (answer.status, answer.error["code"], answer.error["message"]) == (400, "context_length_exceeded", text)
