"""Readers of option values: each says in one line what it accepts."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
UNIT = re.compile(r"(\d+)\s*(K|M|G)?i?B?", re.IGNORECASE)
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def whole(low: int, high: int) -> Callable[[str], int]:
    """A reader of integers from `low` to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {low} to {high}")
        return value

    return read


def number(low: float, high: float) -> Callable[[str], float]:
    """A reader of finite numbers from `low` to `high`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:g} to {high:g}")
        return value

    return read


def size(low: int, high: int) -> Callable[[str], int]:
    """A reader of byte counts: an integer, or one with K, M or G (powers of 1,024)."""

    def read(text: str) -> int:
        found = UNIT.fullmatch(text)
        value = int(found[1]) * UNITS[(found[2] or "").upper()] if found else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes from {low} to {high} (or 4M, 1G ...)")
        return value

    return read


def filled(value: str) -> str:
    """Any text but none: an empty one is a variable that was not set."""
    if not value:
        raise argparse.ArgumentTypeError("it must not be empty")
    return value


def name(text: str) -> str:
    """A name that clients write in a URL or in the field `model`."""
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of 1 to 128 characters from A-Z a-z 0-9 . _ : / -")
    return text
