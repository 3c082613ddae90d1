"""A writer of small GGUF files for tests, and small models and tokenizers to put in them.

Shares no code with the reader.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# ggml's number and block bytes of what the tests write.
F32, F16, Q8_0, BF16 = 0, 1, 8, 30
STRINGS = "strings"


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _entry(value: Any) -> bytes:
    """A metadata value with its type in front: int as uint32, float as float32."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    kind, form = (6, "f") if isinstance(value[0], float) else (5, "i")
    return struct.pack(f"<IIQ{len(value)}{form}", 9, kind, len(value), *value)


@dataclass
class Stored:
    """A tensor as it goes into the file. shape: slowest dimension first."""

    kind: int
    shape: tuple[int, ...]
    data: bytes


def stored(values: np.ndarray[Any, Any], kind: int = F32) -> Stored:
    """fp32 values in one of the plain types or in Q8_0."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if kind == F16:
        data = values.astype(np.float16).tobytes()
    elif kind == BF16:
        data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    elif kind == Q8_0:
        data = b"".join(_q8_0(block) for block in values.reshape(-1, 32))
    else:
        data = values.tobytes()
    return Stored(kind, values.shape, data)


def _q8_0(block: np.ndarray[Any, Any]) -> bytes:
    scale = np.float16(np.abs(block).max() / 127)
    quants = np.zeros(32) if scale == 0 else np.clip(np.round(block / np.float32(scale)), -127, 127)
    return scale.tobytes() + quants.astype(np.int8).tobytes()


def gguf_bytes(metadata: dict[str, Any], tensors: dict[str, Stored], version: int = 3, alignment: int = 32) -> bytes:
    """A whole file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_text(key) + _entry(value) for key, value in metadata.items())
    body = b""
    for name, tensor in tensors.items():
        body += b"\0" * (-len(body) % alignment)
        head += _text(name) + struct.pack("<I", len(tensor.shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", tensor.kind, len(body))
        body += tensor.data
    return head + b"\0" * (-len(head) % alignment) + body


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level vocabularies, by byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


MERGES = [
    "t h",
    "h e",
    "th e",
    "Ġ the",
    "Ġ t",
    "a n",
    "an d",
    "Ġ and",
    "1 2",
    "12 3",
    "Ġ Ġ",
    "ĠĠ Ġ",
    "e r",
    "' s",
    "Ġ a",
]
WHOLE = "hand"  # a token that no merge makes
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_pair_metadata(pre: str | None = "smollm", extra: tuple[str, ...] = ()) -> dict[str, Any]:
    """Three control tokens, the bytes, the results of MERGES, WHOLE, and user-defined tokens."""
    tokens = [*SPECIALS, *byte_alphabet(), *dict.fromkeys(merge.replace(" ", "") for merge in MERGES), WHOLE, *extra]
    types = [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS) - len(extra)) + [4] * len(extra)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    return metadata if pre is None else {**metadata, "tokenizer.ggml.pre": pre}


def architecture_metadata(name: str, **changes: Any) -> dict[str, Any]:
    """A small model: 2 layers, width 64, 4 heads, 2 KV heads of 16."""
    values: dict[str, Any] = {
        "context_length": 256,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **changes,
    }
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in values.items()}}


def llama_tensors(vocab: int, kind: int = F32, seed: int = 0, output: bool = False) -> dict[str, Stored]:
    """Random weights of that model under GGUF's names."""
    draw = np.random.default_rng(seed)

    def weight(*shape: int) -> Stored:
        return stored(draw.standard_normal(shape), kind if len(shape) == 2 else F32)

    tensors = {"token_embd.weight": weight(vocab, 64), "output_norm.weight": weight(64)}
    if output:
        tensors["output.weight"] = weight(vocab, 64)
    for layer in range(2):
        for part, shape in {
            "attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
            "ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96),
        }.items():  # fmt: skip
            tensors[f"blk.{layer}.{part}.weight"] = weight(*shape)
    return tensors


def write_llama(path: Path, kind: int = F32, seed: int = 0) -> Path:
    """A whole small llama with the byte-level tokenizer."""
    tokenizer = byte_pair_metadata()
    tensors = llama_tensors(len(tokenizer["tokenizer.ggml.tokens"]), kind, seed)
    path.write_bytes(gguf_bytes({**architecture_metadata("llama"), **tokenizer}, tensors))
    return path
