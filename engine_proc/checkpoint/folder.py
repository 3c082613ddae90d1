"""From what a user names as the model to a checked folder, and the few facts about it that every process needs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_proc.checkpoint import embedded, store
from engine_proc.checkpoint.convert import FORMAT_VERSION, convert
from engine_proc.checkpoint.facts import eos_ids, generation_config, read_json
from engine_proc.checkpoint.store import Progress

_HEAD_BYTES = 1 << 20
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder with config.json and tokenizer.json.

    name: what the model may be called to clients: the embedded name, or the folder's or file's own. eos_ids: union of
    config.json and generation_config.json, ascending. context_length: in tokens.
    """

    path: Path
    name: str
    architecture: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]


def default_cache_dir(environment: Mapping[str, str], home: Path) -> Path:
    """Where converted models lie: below XDG_CACHE_HOME if that is an absolute path, else below ~/.cache."""
    named = environment.get("XDG_CACHE_HOME", "")
    base = Path(named) if Path(named).is_absolute() else home / ".cache"
    return base / "deepinfer" / "models"


def resolve(model: str, cache_dir: Path, progress: Progress, weights: bool = True) -> ModelFolder:
    """The folder for an embedded name, a Hugging Face folder, or a .gguf file (converted into the cache).

    weights: *.safetensors must be there (a mock engine needs none). ValueError in one line names what is missing or
    wrong and what is accepted.
    """
    if model in embedded.MODELS:
        return read(embedded.fetch(model, cache_dir, progress), model, weights)
    path = Path(model).expanduser()
    if path.is_dir():
        return read(path, path.resolve().name, weights)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return read(_convert_file(path, cache_dir, progress), path.stem, weights)
    what = "is neither a folder nor a .gguf file" if path.exists() else "does not exist"
    names = ", ".join(embedded.MODELS)
    raise ValueError(
        f"model {model!r} {what}; accepted are an embedded model ({names}), a folder with config.json, tokenizer.json "
        f"and *.safetensors, or a .gguf file"
    )


def _convert_file(source: Path, cache_dir: Path, progress: Progress) -> Path:
    """The cached folder of a GGUF file.

    Size, time and head tell files apart: hashing many gigabytes at each start would take longer than loading them.
    """
    try:
        stat = source.stat()
        with source.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror or error}") from None
    digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} ".encode() + head).hexdigest()

    def fill(folder: Path, scratch: Path) -> None:
        convert(source, folder, lambda done, total: progress("convert", done, total))

    name = _UNSAFE.sub("-", source.stem).strip("-.") or "model"
    return store.make(cache_dir, name, digest, FORMAT_VERSION, fill, progress)


def read(folder: Path, name: str, weights: bool = True) -> ModelFolder:
    """Checks a folder and reads its facts. ValueError in one line names the file or field that is missing or wrong."""
    for needed in ("config.json", "tokenizer.json"):
        if not (folder / needed).is_file():
            piece_model = needed == "tokenizer.json" and (folder / "tokenizer.model").is_file()
            hint = " (tokenizer.model is there, but only tokenizer.json is read)" if piece_model else ""
            raise ValueError(
                f"{folder} has no {needed}{hint}; a model folder has config.json, tokenizer.json and *.safetensors"
            )
    if weights and not any(folder.glob("*.safetensors")):
        other = next((path.name for kind in ("*.bin", "*.pth", "*.gguf") for path in sorted(folder.glob(kind))), None)
        hint = f" ({other} is there, but weights are read from safetensors)" if other else ""
        raise ValueError(f"{folder} has no *.safetensors with the model's weights{hint}")
    config = read_json(folder / "config.json")
    text = config.get("text_config", {})
    if not isinstance(text, dict):
        raise ValueError(f"{folder / 'config.json'}: text_config must be an object")
    generation = generation_config(folder)
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(f"{folder / 'config.json'}: architectures must be a list that names the model's class")
    return ModelFolder(
        path=folder.resolve(),
        name=name,
        architecture=names[0],
        vocab_size=_count(folder, config, text, "vocab_size"),
        context_length=_count(folder, config, text, "max_position_embeddings"),
        eos_ids=tuple(eos_ids(folder, config if "eos_token_id" in config else text, generation)),
    )


def _count(folder: Path, config: dict[str, Any], text: dict[str, Any], field: str) -> int:
    """Of the configuration, or of its text part where the model has several."""
    value = config.get(field, text.get(field))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        shown = "missing" if value is None else repr(value)
        raise ValueError(f"{folder / 'config.json'}: {field} must be an integer above 0, not {shown}")
    return value
