"""Reading the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError names the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def generation_config(folder: Path) -> dict[str, Any]:
    """What generation_config.json holds; {} without one."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def eos_ids(folder: Path, *sources: dict[str, Any]) -> list[int]:
    """Union of the sources' `eos_token_id`, ascending."""
    found: set[int] = set()
    for source in sources:
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise ValueError(f"{folder}: eos_token_id must be a token id or a list of them, not {value!r}")
            found.add(item)
    return sorted(found)
