"""Reads a model folder's tokenizer files: the tokenizer, special tokens, chat templates, generation defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

OPENINGS, CLOSINGS = ("<|", "<｜"), ("|>", "｜>")


@dataclass
class ModelFiles:
    """What the tokenizer process knows of a model.

    `control` are added tokens whose text in a client's string must stay text: those marked special, and those written
    like control marks (`<|...|>`), which some models do not mark. `templates` maps names to chat templates; "default"
    is the one for chats, "tool_use" (if there) the one for chats with tools.
    """

    tokenizer: Tokenizer
    source: str  # text of tokenizer.json
    decoder: dict[str, Any] | None  # its decoder
    special_tokens: dict[str, str]  # bos_token, eos_token, ... as templates see them
    control: dict[str, int]  # text -> id
    prefix_ids: list[int]  # what the tokenizer puts around a text (BOS, EOS)
    suffix_ids: list[int]
    templates: dict[str, str] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def load_model_files(folder: Path, chat_template: str = "") -> ModelFiles:
    """Read the folder. `chat_template`: a path that replaces the model's own. Raises ValueError naming the file."""
    path = folder / "tokenizer.json"
    source, decoder = _read_tokenizer(path)
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: {error}") from error
    settings = _optional(folder / "tokenizer_config.json")
    special_tokens = _texts(_optional(folder / "special_tokens_map.json")) | _texts(settings)
    prefix, suffix = _surroundings(tokenizer)
    return ModelFiles(
        tokenizer=tokenizer,
        source=source,
        decoder=decoder,
        special_tokens=special_tokens,
        control=_control_tokens(tokenizer),
        prefix_ids=prefix,
        suffix_ids=suffix,
        templates=_templates(folder, settings, chat_template),
        generation=_optional(folder / "generation_config.json"),
    )


def _read_tokenizer(path: Path) -> tuple[str, dict[str, Any] | None]:
    spec = read_json(path)
    decoder = spec.get("decoder")
    return path.read_text(encoding="utf-8"), decoder if isinstance(decoder, dict) else None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _texts(settings: dict[str, Any]) -> dict[str, str]:
    """Every `*_token` of the settings as text."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    return {
        token.content: number
        for number, token in tokenizer.get_added_tokens_decoder().items()
        if token.content
        and (token.special or (token.content.startswith(OPENINGS) and token.content.endswith(CLOSINGS)))
    }


def _surroundings(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts around a text. As in the reference library, only tokenizer.json has a say in it."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _templates(folder: Path, settings: dict[str, Any], chat_template: str) -> dict[str, str]:
    if chat_template:
        return {"default": _read(Path(chat_template))}
    found: dict[str, str] = {}
    given = settings.get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        found = {item["name"]: item["template"] for item in given if {"name", "template"} <= item.keys()}
    elif isinstance(given, dict):
        found = {name: text for name, text in given.items() if isinstance(text, str)}
    if (path := folder / "chat_template.jinja").exists():
        found["default"] = _read(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read(path)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as a chat template ({error})") from error
