"""Server-sent events of one streamed answer: constant bytes around JSON-escaped text, and the loop that writes them.

Whatever is ready goes out in one write; a chunk holds one choice. The status line was withheld until the request was
accepted, so an error from here on is an event.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from api.errors import ApiError
from frontend.exchange import BodyWriter, Connection
from frontend.hub import Hub
from frontend.live import Choice, LiveRequest
from frontend.responses import join_logprobs, legacy_logprobs, usage_of
from wire.messages import Shape

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

encode = msgspec.json.Encoder().encode


class ChunkForm:
    """The constant parts of one stream's chunks."""

    def __init__(self, shape: Shape, identity: str, created: int, prompt_tokens: int, prompt_ids: list[int] | None):
        self._chat = shape.route == "chat"
        self._legacy = not self._chat and shape.logprobs >= 0
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = {"id": identity, "object": kind, "created": created, "model": shape.model}
        self._head = b"data: " + encode(head)[:-1]
        opening = b'"delta":{' if self._chat else b'"text":'
        self._starts = [
            self._head + b',"choices":[{"index":' + str(index).encode() + b"," + opening for index in range(shape.n)
        ]
        self._closing = b"}" if self._chat else b""
        self._usage_null = b',"usage":null}\n\n' if shape.include_usage else b"}\n\n"
        self._continuous = shape.continuous_usage
        self._plain_end = self._closing + b',"logprobs":null,"finish_reason":null}]' + self._usage_null
        self._prompt_tokens = prompt_tokens
        # A test hook: the prompt's ids go into the first chunk.
        self._extra = b"" if prompt_ids is None else b',"deepinfer_prompt_ids":' + encode(prompt_ids)

    def chunks(self, live: LiveRequest) -> list[bytes]:
        """Everything that came since the last call, as events; the choices count as sent."""
        out: list[bytes] = []
        for choice in live.dirty:
            choice.dirty = False
            if choice.parts or choice.logprobs:
                self._text_chunk(out, live, choice)
            if choice.finish_reason:
                self._finish_chunk(out, live, choice)
        live.dirty.clear()
        live.pending = 0
        return out

    def _text_chunk(self, out: list[bytes], live: LiveRequest, choice: Choice) -> None:
        parts = choice.parts
        text = encode(parts[0] if len(parts) == 1 else "".join(parts))
        out.append(self._starts[choice.index])
        if self._chat:
            out.append(b'"content":' if choice.started else b'"role":"assistant","content":')
        choice.started = True
        out.append(text)
        parts.clear()
        if choice.logprobs or self._continuous or self._extra:
            out.append(self._closing)
            out.append(b',"logprobs":')
            out.append(self._logprobs(choice))
            out.append(b',"finish_reason":null}]')
            self._end(out, live)
        else:
            out.append(self._plain_end)

    def _finish_chunk(self, out: list[bytes], live: LiveRequest, choice: Choice) -> None:
        out.append(self._starts[choice.index])
        if not self._chat:
            out.append(b'""')
        elif not choice.started:
            out.append(b'"role":"assistant","content":""')
        choice.started = True
        out.append(self._closing)
        out.append(b',"logprobs":null,"finish_reason":"')
        out.append(choice.finish_reason.encode())
        out.append(b'"}]')
        self._end(out, live)

    def _end(self, out: list[bytes], live: LiveRequest) -> None:
        if self._extra:
            out.append(self._extra)
            self._extra = b""
        if self._continuous:
            made = sum(choice.tokens for choice in live.choices)
            usage = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": made,
                "total_tokens": self._prompt_tokens + made,
            }
            out.append(b',"usage":')
            out.append(encode(usage))
            out.append(b"}\n\n")
        else:
            out.append(self._usage_null)

    def _logprobs(self, choice: Choice) -> bytes:
        if not choice.logprobs:
            return b"null"
        joined = join_logprobs(choice.logprobs)
        choice.logprobs.clear()
        return legacy_logprobs(joined) if self._legacy else b'{"content":' + joined + b',"refusal":null}'

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last chunk before the end, with no choices."""
        return self._head + b',"choices":[],"usage":' + encode(usage) + b"}\n\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


async def stream_answer(
    hub: Hub, live: LiveRequest, form: ChunkForm, send: Send, headers: Headers, connection: Connection
) -> None:
    """Answer an accepted request with a stream, to its end or until the client is gone.

    While nothing holds it up, text is written where it arrives; this coroutine does the rest: the end, comments,
    and whatever a client that does not read keeps waiting.
    """
    hub.streams.add(live)
    try:
        live.wrote = time.monotonic()
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *headers]})
        sink = _sink(live, form, connection.body_writer())
        while not live.gone:
            out = form.chunks(live)
            ended = live.released
            if ended:
                _ending(out, live, form)
            elif not out:
                if not live.comment_due:
                    live.sink = sink
                    await live.wait()
                    live.sink = None
                    continue
                out.append(COMMENT)
            live.comment_due = False
            live.wrote = time.monotonic()
            await send({"type": "http.response.body", "body": b"".join(out), "more_body": not ended})
            if ended:
                return
    finally:
        live.sink = None
        hub.streams.discard(live)


def _sink(live: LiveRequest, form: ChunkForm, writer: BodyWriter) -> Callable[[], bool]:
    """`live.sink`: writes what has come for an answer that goes on."""
    ready, write = writer.ready, writer.write

    def sink() -> bool:
        if live.released or live.gone or live.comment_due or not ready():
            return False
        if out := form.chunks(live):  # an empty part would end the answer
            write(b"".join(out))
            live.wrote = time.monotonic()
        return True

    return sink


def _ending(out: list[bytes], live: LiveRequest, form: ChunkForm) -> None:
    if live.error is not None:
        out.append(error_event(live.error))
    elif live.shape is not None and live.shape.include_usage:
        out.append(form.usage_chunk(usage_of(live)))
    out.append(DONE)
