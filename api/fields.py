"""Typed reading of fields of a JSON object: null is absent, a wrong type or range is an ApiError with the field's name.

JSON true and false are never numbers here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from api.errors import invalid

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
INT32_MAX = (1 << 31) - 1
UINT64_MAX = (1 << 64) - 1

Object = Mapping[str, Any]


def integer(source: Object, name: str, low: int, high: int, cap: int | None = None) -> int | None:
    """An integer in [low, high]; above `cap` it is lowered to `cap`."""
    value = source.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise invalid(name, f"{name} must be an integer")
    if not low <= value <= high:
        raise invalid(name, f"{name} must be {_range(low, high)}")
    return value if cap is None else min(value, cap)


def positive(source: Object, name: str, low: int = 1) -> int | None:
    """An integer of at least `low`; what no 32-bit counter holds is lowered to 2^31 - 1, which no context holds."""
    value = source.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise invalid(name, f"{name} must be an integer")
    if value < low:
        raise invalid(name, f"{name} must be at least {low}")
    return min(value, INT32_MAX)


def number(
    source: Object, name: str, low: float, high: float, open_low: bool = False, param: str | None = None
) -> float | None:
    """A finite number in [low, high], or (low, high] with `open_low`."""
    value = source.get(name)
    param = param or name
    if value is None:
        return None
    if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
        raise invalid(param, f"{param} must be a finite number")
    if not low <= value <= high or (open_low and value == low):
        bound = "above" if open_low else "at least"
        raise invalid(param, f"{param} must be {bound} {low:g} and at most {high:g}")
    return float(value)


def boolean(source: Object, name: str, param: str | None = None) -> bool | None:
    value = source.get(name)
    if value is not None and type(value) is not bool:
        raise invalid(param or name, f"{param or name} must be a boolean")
    return value


def string(source: Object, name: str, param: str | None = None) -> str | None:
    value = source.get(name)
    if value is not None and type(value) is not str:
        raise invalid(param or name, f"{param or name} must be a string")
    return value


def mapping(source: Object, name: str, param: str | None = None) -> dict[str, Any] | None:
    value = source.get(name)
    if value is not None and type(value) is not dict:
        raise invalid(param or name, f"{param or name} must be an object")
    return value


def array(source: Object, name: str, limit: int, param: str | None = None) -> list[Any] | None:
    """A list of at most `limit` items."""
    value = source.get(name)
    param = param or name
    if value is None:
        return None
    if type(value) is not list:
        raise invalid(param, f"{param} must be an array")
    if len(value) > limit:
        raise invalid(param, f"{param} must have at most {limit} items")
    return value


def is_ids(value: list[Any]) -> bool:
    """Whether all items are integers (no booleans) that could be a token id; the vocabulary is checked later."""
    return set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) <= INT32_MAX))


def check_integers(value: Any, param: str) -> None:
    """Refuse an integer that no message between processes can carry, anywhere inside `value`."""
    stack = [value]
    while stack:
        item = stack.pop()
        if type(item) is dict:
            stack += item.values()
        elif type(item) is list:
            stack += item
        elif type(item) is int and not INT64_MIN <= item <= UINT64_MAX:
            raise invalid(param, f"{param} holds an integer beyond 64 bits")


def _range(low: int, high: int) -> str:
    return f"from {low} to {high}"
