"""Starting a kernel while the one before it ends ("programmatic dependent launch" of Hopper and later devices).

A kernel launched so says early that the next one may come (`gdc_launch_dependents`) and waits for the one before it to
be complete (`gdc_wait`) before it touches anything that others write. Every program of every such kernel must wait,
also one that has nothing to do: the next kernel relies on all that came before.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on `device` can be launched so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch: for the kernel and for Triton."""
    return {"overlap": True, "launch_pdl": True} if overlaps(device) else {"overlap": False}
