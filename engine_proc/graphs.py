"""Functions of device tensors as CUDA graphs: one per batch size of a ladder, captured once, replayed with new inputs.

A replay costs the host one launch instead of hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

_DENSE = (1, 2, 4, 8, 12, 16, 24, 32)

Out = TypeVar("Out")


def ladder(most: int) -> list[int]:
    """The batch sizes up to `most`, and `most` itself; steps grow with the size, so that few rows are for nothing."""
    sizes = {size for size in _DENSE if size < most}
    size = _DENSE[-1]
    while size < most:
        sizes.add(size)
        size += max(8, 1 << (size.bit_length() - 3))  # an eighth to a quarter
    return sorted(sizes | {most})


class Graphs(Generic[Out]):
    """`forward` of one int64 tensor, for several sizes of it."""

    def __init__(self, forward: Callable[[torch.Tensor], Out], inputs: Mapping[int, torch.Tensor]) -> None:
        """`inputs[size]`: valid inputs, which stay the graph's own."""
        self.sizes = sorted(inputs)
        self.inputs = inputs
        self._forward = forward
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Out]] = {}

    def capture(self, progress: Callable[[int], None]) -> None:
        """Without it `forward` runs as it is written. `progress(done)` counts sizes.

        The largest comes first: the smaller ones find room in its memory, since they never run at the same time.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self.inputs[self.sizes[0]].device)  # type: ignore[no-untyped-call]  # as torch has it
        for size in reversed(self.sizes):
            with torch.cuda.stream(stream):  # kernels are built and libraries choose theirs outside of a capture
                self._forward(self.inputs[size])
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                out = self._forward(self.inputs[size])
            self._graphs[size] = graph, out
            progress(len(self._graphs))

    def size_for(self, rows: int) -> int:
        """The smallest size that holds so many rows; there must be one."""
        return next(size for size in self.sizes if size >= rows)

    def run(self, size: int, staged: torch.Tensor) -> Out:
        """staged: int64, pinned, in the shape of this size → what `forward` gives, valid until the next run."""
        self.inputs[size].copy_(staged, non_blocking=True)
        if size not in self._graphs:
            return self._forward(self.inputs[size])
        graph, out = self._graphs[size]
        graph.replay()
        return out
