"""The identity rule: how outputs that must be "the same" are compared, wherever a test needs it.

Ids are equal. At the first difference the reference's teacher-forced logits are looked at: if the two ids are its
best two and lie closer than the dtype's gap, the difference is a tie; anything else is a failure. What follows a tie
is not compared. Ties are counted and bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

GAPS = {"fp32": 1e-3, "bf16": 0.125}

LogitsAt = Callable[[int], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Tie:
    """The first difference of one sequence, at produced id `index`."""

    name: str
    index: int
    expected: int
    actual: int
    gap: float


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> int:
    """Index of the first id that differs or is there in only one of them; -1 if they are equal."""
    for index, (left, right) in enumerate(zip(expected, actual, strict=False)):
        if left != right:
            return index
    return -1 if len(expected) == len(actual) else min(len(expected), len(actual))


@dataclass
class Identity:
    """Compares sequences by the rule and keeps the count."""

    dtype: str = "fp32"
    strict: bool = False  # no ties at all, as under --deterministic
    sequences: int = 0
    ties: list[Tie] = field(default_factory=list)

    def same(self, expected: Sequence[int], actual: Sequence[int], logits_at: LogitsAt, name: str = "") -> None:
        """`logits_at(i)`: the reference's logits [V] that produced expected id i. AssertionError on a failure."""
        self.sequences += 1
        index = first_difference(expected, actual)
        if index < 0:
            return
        assert index < min(len(expected), len(actual)), f"{name}: {len(expected)} ids expected, {len(actual)} produced"
        left, right = expected[index], actual[index]
        logits = logits_at(index)
        gap = float(logits.max() - min(logits[left], logits[right]))
        better = int((logits > min(logits[left], logits[right])).sum())
        message = f"{name}: id {index} is {right}, not {left}; logits {logits[right]:.6f} and {logits[left]:.6f}"
        assert gap < GAPS[self.dtype] and better <= 1, f"{message}, gap {gap:.6f} is no tie"
        assert not self.strict, f"{message}: a tie, and ties are refused"
        self.ties.append(Tie(name, index, left, right, gap))

    def at_most(self, ties: int) -> None:
        """The bound on ties of this comparison."""
        assert len(self.ties) <= ties, f"{len(self.ties)} ties in {self.sequences} sequences: {self.ties}"
