"""Small tokenizers of several kinds, and chat templates in the styles of well-known models, made for tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.unit.tokenizer_world import TINY
from tokenizer_proc.samples import TEXT_SAMPLES

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
PROSE = [*TEXT_SAMPLES, "The quick brown fox jumps over the lazy dog and the house by the sea is old."] * 8

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

SMOL = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" and not message.tool_calls %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message.tool_calls %}{{- "[TOOL_CALLS] " + message.tool_calls|length|string + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported, with the exception of system!") }}
    {%- endif %}
{%- endfor %}
"""

ZEPHYR = """\
{% for message in messages %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""

CONTROL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "smol": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>", "<issue_start>"],
    "llama3": ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "zephyr": ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"],
}  # fmt: skip
TEMPLATES = {"qwen": QWEN, "smol": SMOL, "llama3": LLAMA3, "mistral": MISTRAL, "zephyr": ZEPHYR}
EDGES = {"qwen": (0, 2), "smol": (0, 2), "llama3": (0, 1), "mistral": (0, 1), "zephyr": (0, 1)}  # bos, eos


@lru_cache
def byte_level() -> str:
    """tokenizer.json of the tiny model without its added tokens."""
    spec = json.loads((TINY / "tokenizer.json").read_text())
    spec["added_tokens"] = []
    return json.dumps(spec)


@lru_cache
def sentencepiece(scheme: str) -> str:
    """tokenizer.json of a SentencePiece-like BPE with byte fallback.

    `scheme`: "legacy" (Llama 2: normalizer Prepend), "first" | "always" | "never" (Metaspace).
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    metaspace = "never" if scheme == "legacy" else scheme
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=120,
        show_progress=False,
    )
    tokenizer.train_from_iterator(PROSE, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    if scheme == "legacy":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    return tokenizer.to_str()


@lru_cache
def metaspace_only() -> str:
    """A unigram tokenizer whose decoder is Metaspace alone."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(PROSE, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    return json.dumps(spec)


@lru_cache
def wordpiece() -> str:
    """A tokenizer whose decoder no table can stand for."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(PROSE, trainer)
    return tokenizer.to_str()


SPECS: dict[str, Callable[[], str]] = {
    "byte_level": byte_level,
    "legacy": lambda: sentencepiece("legacy"),
    "first": lambda: sentencepiece("first"),
    "always": lambda: sentencepiece("always"),
    "never": lambda: sentencepiece("never"),
    "unigram": metaspace_only,
}


def with_control(spec: str, control: list[str], marks: tuple[str, ...] | list[str] = (), **flags: bool) -> Tokenizer:
    """The tokenizer with special tokens, and with `marks`: added tokens that are not special."""
    tokenizer = Tokenizer.from_str(spec)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True, **flags) for text in control])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in marks])
    return tokenizer


def model_folder(folder: Path, kind: str, style: str, **settings: Any) -> Path:
    """A folder with a tokenizer of `kind` and the chat template of `style`."""
    folder.mkdir(parents=True, exist_ok=True)
    control = CONTROL[style]
    with_control(SPECS[kind](), control, ["<think>", "</think>", "<tool_call>", "</tool_call>"]).save(
        str(folder / "tokenizer.json")
    )
    bos, eos = EDGES[style]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": control[bos],
        "eos_token": control[eos],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATES[style],
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(TINY / "config.json", folder / "config.json")
    return folder
