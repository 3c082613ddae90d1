"""min_p, top_k and top_p as thresholds, so that a row's outcome depends on the row alone and ties are never cut.

Applied in this order, each on what the former left: min_p, top_k, top_p.
"""

from __future__ import annotations

import torch

_HEAD = 1024  # the nucleus is looked for among so many first, which needs no full sort


def keep_likely(
    z: torch.Tensor, min_p: torch.Tensor | None, top_k: torch.Tensor | None, largest_k: int, top_p: torch.Tensor | None
) -> torch.Tensor:
    """z: logits / temperature, fp32 [R, V], changed in place: shifted so that the best is 0, -inf where left out.

    min_p fp32 [R] (0 = off), top_k int64 [R] (0 = off, else at most `largest_k`), top_p fp32 [R] (1 = off); None = off
    for all rows. The best id always stays.
    """
    z.sub_(z.amax(-1, keepdim=True))
    if min_p is not None:  # p >= min_p * p_max is z >= log(min_p), since p_max has z = 0
        z.masked_fill_(z < min_p.log()[:, None], float("-inf"))
    if top_k is not None:
        best = z.topk(min(largest_k, z.shape[-1])).values
        threshold = best.gather(1, (top_k - 1).clamp_(min=0)[:, None])
        z.masked_fill_((z < threshold) & (top_k > 0)[:, None], float("-inf"))
    if top_p is not None:
        weights = z.exp()
        find = nucleus_by_rank if z.device.type == "cpu" else nucleus_by_bisection
        outside = weights < find(weights, top_p)[:, None]
        z.masked_fill_(outside & (top_p < 1)[:, None], float("-inf"))
    return z


def nucleus_by_rank(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """As `nucleus_by_bisection`, faster on a CPU: ranks the head, and all only for rows whose head is too light."""
    needed = weights.sum(-1) * top_p
    head = weights.topk(min(_HEAD, weights.shape[-1])).values
    place = (head.cumsum(-1) < needed[:, None]).sum(-1)
    threshold = head.gather(1, place.clamp(max=head.shape[-1] - 1)[:, None])[:, 0]
    light = (place >= head.shape[-1]) & (top_p < 1)
    for row in light.nonzero()[:, 0].tolist():  # a host loop over rare rows, on the device that is the host
        ranked = weights[row].sort(descending=True).values
        at = int((ranked.cumsum(-1) < needed[row]).sum())
        threshold[row] = ranked[min(at, len(ranked) - 1)]
    return threshold


def nucleus_by_bisection(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The largest weight w of each row such that {weights >= w} holds top_p of the row's sum; fp32 [R].

    weights fp32 [R, V] in [0, 1]. Floats >= 0 are ordered like their bits, so 30 halvings over the bits of [0, 1]
    find w exactly, with no sort and nothing read back.
    """
    needed = (weights.sum(-1) * top_p)[:, None]
    low = torch.zeros_like(needed, dtype=torch.int32)  # {weights >= low} is heavy enough, {>= high} is not
    high = torch.full_like(low, 0x3F800001)
    for _ in range(30):
        middle = low + (high - low) // 2
        mass = torch.where(weights >= middle.view(torch.float32), weights, 0.0).sum(-1, keepdim=True)
        heavy = mass >= needed
        low = torch.where(heavy, middle, low)
        high = torch.where(heavy, high, middle)
    return low.view(torch.float32)[:, 0]
