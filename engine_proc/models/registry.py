"""Which model family serves which architecture name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_proc.models import llama
from engine_proc.models.base import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY,)


def family_of(config: dict[str, Any], folder: Path) -> Family:
    """The family for a config.json; ValueError names the architecture and those that are served."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    accepted = [known for family in FAMILIES for known in family.architectures]
    for family in FAMILIES:
        if name in family.architectures:
            return family
    raise ValueError(f"{folder}: unknown architecture {name!r}; served are {', '.join(accepted)}")
