"""The official `openai` package works against the service as against its own.

Chat, streams, async, usage, n, logprobs, completions, models; and errors come out as the package's own classes.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from frontend.config import FrontendConfig
from tests.pipeline.harness import Service, service
from tests.pipeline.parts import Part
from wire.limits import Limits

KEY = "sk-client-test"
MESSAGES: list[Any] = [{"role": "user", "content": "Say something."}]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with a key, one place to run and one in the queue."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text(f"team:{KEY}\n")
    (folder / "keys").chmod(0o600)
    flags = ("--api-key-file", str(folder / "keys"), "--max-running", "2", "--max-queued-requests", "2")
    with service(folder, *flags, key=KEY) as found:
        yield found


@pytest.fixture
def client(guarded: Service) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{guarded.port}/v1", api_key=KEY, max_retries=0, timeout=30) as found:
        yield found


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


def test_chat_stream(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_the_stream_helper(client: OpenAI) -> None:
    extra = {"metadata": {"deepinfer_hooks": {"script": [40, 41, 42, 43]}}}  # ends by itself, as the helper wants
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, extra_body=extra) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content


def test_a_stream_left_early_is_closed(client: OpenAI, guarded: Service) -> None:
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1000, stream=True)
    next(iter(stream))
    stream.close()
    guarded.idle()


def test_async(guarded: Service) -> None:
    async def run() -> tuple[str | None, ...]:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{guarded.port}/v1", api_key=KEY, max_retries=0) as client:

            async def one(number: int) -> str | None:
                messages: list[Any] = [{"role": "user", "content": f"number {number}"}]
                answer = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
                return answer.choices[0].message.content

            async def streamed() -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=8, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(one(1), one(2), one(1), streamed())

    first, second, again, streamed = asyncio.run(run())
    assert first == again
    assert first and second and streamed


def test_choices_and_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, n=3, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 5
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0
            assert len(entry.top_logprobs) == 2


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["one", "two"], max_tokens=6, n=2, logprobs=1)
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(choice.text and choice.logprobs is not None for choice in answer.choices)
    stream = client.completions.create(model="tiny", prompt="one", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_bad_request(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=5)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10**7, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


def test_authentication(guarded: Service) -> None:
    with (
        OpenAI(base_url=f"http://127.0.0.1:{guarded.port}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        stranger.chat.completions.create(model="tiny", messages=MESSAGES)
    assert caught.value.code == "invalid_api_key"


def test_rate_limit(client: OpenAI) -> None:
    def slow() -> Any:
        extra = {"metadata": {"deepinfer_hooks": {"step_ms": 50}}}
        return client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=1000, stream=True, extra_body=extra
        )

    streams = [slow() for _ in range(4)]
    with pytest.raises(openai.RateLimitError) as caught:
        slow()
    assert caught.value.code == "queue_full"
    for stream in streams:
        stream.close()


def test_internal_error(client: OpenAI) -> None:
    extra = {"metadata": {"deepinfer_hooks": {"nan_step": 2}}}
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, extra_body=extra)
    assert caught.value.status_code == 500
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, stream=True, extra_body=extra
    )
    with pytest.raises(openai.APIError) as in_band:
        list(stream)
    assert in_band.value.code == "internal_error"


def test_no_service_behind_the_frontend(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A frontend alone, without router and tokenizer, answers 503 at once."""
    folder = tmp_path_factory.mktemp("alone")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        port = listener.getsockname()[1]
        config = FrontendConfig(
            str(folder),
            secrets.token_bytes(32),
            listener.fileno(),
            "127.0.0.1",
            port,
            ["tiny"],
            created=1,
            tokenizers=1,
            frontends=1,
            limits=Limits(),
        )
        part = Part("frontend.main", "frontend", 0, config, folder / "frontend.log")
        try:
            part.wait_ready()
            with (
                OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as lonely,
                pytest.raises(openai.InternalServerError) as caught,
            ):
                lonely.chat.completions.create(model="tiny", messages=MESSAGES)
        finally:
            part.stop()
    assert caught.value.status_code == 503
    assert caught.value.code == "engine_unavailable"
