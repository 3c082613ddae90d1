"""Decode steps as CUDA graphs: one for each of a ladder of batch sizes, captured once and replayed with other inputs.

A replay costs the host one launch instead of hundreds. All that a decode step reads of the host's is two numbers per
row, its slot and its position; a batch is filled up to the next size with rows that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_DENSE = (1, 2, 4, 8, 12, 16, 24, 32)
_NOTHING = -1  # the position of a row that only fills the batch

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def ladder(most: int) -> list[int]:
    """The batch sizes up to `most`, and `most` itself; steps grow with the size, so that few rows are for nothing."""
    sizes = {size for size in _DENSE if size < most}
    size = _DENSE[-1]
    while size < most:
        sizes.add(size)
        size += max(8, 1 << (size.bit_length() - 3))  # an eighth to a quarter
    return sorted(sizes | {most})


class DecodeGraphs:
    """`forward(slots, positions)`, int64 [B] each → a tensor [B, ...], for every B up to `most`."""

    def __init__(self, forward: Forward, most: int, device: torch.device, capture: bool) -> None:
        """Without `capture` the same steps run as they are written, for comparison.

        Row `most` of the slots is the one that fills batches.
        """
        self._forward = forward
        self._sizes = ladder(most)
        self._inputs = {size: torch.empty(2, size, dtype=torch.int64, device=device) for size in self._sizes}
        for inputs in self._inputs.values():
            inputs[0], inputs[1] = most, _NOTHING
        self._filler = (most, _NOTHING)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        if capture:
            self._capture(device)

    def _capture(self, device: torch.device) -> None:
        """The largest first: the smaller ones find room in its memory, since they never run at the same time."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not type it
        for size in reversed(self._sizes):
            inputs = self._inputs[size]
            with torch.cuda.stream(
                stream
            ):  # kernels are built and libraries find their algorithms outside of a capture
                self._forward(inputs[0], inputs[1])
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                out = self._forward(inputs[0], inputs[1])
            self._graphs[size] = graph, out

    def size_for(self, rows: int) -> int:
        """The smallest size of the ladder that holds so many rows."""
        return next(size for size in self._sizes if size >= rows)

    def pad(self, slots: list[int], positions: list[int]) -> list[list[int]]:
        """[2][B]: what `run` takes, on the host."""
        more = self.size_for(len(slots)) - len(slots)
        return [slots + [self._filler[0]] * more, positions + [self._filler[1]] * more]

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs int64 [2, B] on the device → what `forward` gives, until the next run."""
        size = inputs.shape[1]
        if size not in self._graphs:
            return self._forward(inputs[0], inputs[1])
        graph, out = self._graphs[size]
        self._inputs[size].copy_(inputs)
        graph.replay()
        return out
