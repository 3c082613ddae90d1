"""The host's numbers of one step, sent to the device in one copy that nobody waits for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class Handle:
    """Stands for an array until `Upload.send`; then `tensor` is its int64 copy on the device, in the same shape."""

    __slots__ = ("end", "shape", "start", "tensor")

    tensor: torch.Tensor

    def __init__(self, start: int, shape: tuple[int, ...], size: int) -> None:
        self.start = start
        self.shape = shape
        self.end = start + size


class Upload:
    """Collects integer arrays, then sends them as one int64 tensor.

    On CUDA the staging memory is pinned and comes from the caching host allocator, which gives it out again only
    after the copy has completed; so a step may be prepared while former ones still run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: list[npt.NDArray[np.int64]] = []
        self._handles: list[Handle] = []
        self._size = 0

    def add(self, values: npt.ArrayLike) -> Handle:
        """`values`: integers of any shape."""
        array = np.ascontiguousarray(values, dtype=np.int64)
        handle = Handle(self._size, array.shape, array.size)
        self._arrays.append(array.reshape(-1))
        self._handles.append(handle)
        self._size = handle.end
        return handle

    def send(self) -> None:
        """Enqueues the copy; every handle has its tensor afterwards."""
        if not self._handles:
            return
        staging = torch.empty(self._size, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        if self._arrays:
            np.concatenate(self._arrays, out=staging.numpy())
        sent = staging.to(self._device, non_blocking=True)
        for handle in self._handles:
            handle.tensor = sent[handle.start : handle.end].view(handle.shape)
