"""The pages /metrics (ours, and the family that agent-replay aggregators read) and /deepinfer/metrics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from router_proc import prometheus
from router_proc.prometheus import ALWAYS_COUNTERS, ALWAYS_GAUGES, HELP, HISTOGRAMS, LABELLED, PREFIX, family_of

if TYPE_CHECKING:
    from router_proc.service import Router

PEER_PREFIX = "sglang:"
PEER_HELP = {
    "prompt_tokens_total": "prompt tokens of ended requests",
    "generation_tokens_total": "generated tokens",
    "cached_tokens_total": "cached prompt tokens, by source",
    "cache_hit_rate": "cached share of all prompt tokens since the start",
    "num_running_reqs": "running requests",
    "num_queue_reqs": "queued requests",
    "token_usage": "used share of the device token pool",
    "max_total_num_tokens": "tokens that the device pools hold",
    "num_retracted_reqs_total": "preempted requests",
    "hicache_host_used_tokens": "tokens in the host cache",
    "hicache_host_total_tokens": "tokens that the host cache holds",
    "realtime_tokens_total": "tokens that were computed, by mode",
}


def page(form: str, router: Router) -> bytes:
    """`form`: "prometheus" | "json"."""
    return _prometheus_page(router) if form == "prometheus" else _json_page(router)


def _own_counters(router: Router) -> dict[str, float]:
    totals, links = router.live.totals, router.listener.counters
    found: dict[str, float] = {
        'ipc_bad_messages_total{process="router.0"}': links.bad_messages,
        'ipc_gaps_total{process="router.0"}': links.gaps,
        "outputs_stale_total": totals.stale_outputs,
        "outputs_missing_total": totals.missing_outputs,
        "prompt_tokens_total": totals.prompt_tokens,
        "generation_tokens_total": totals.generated_tokens,
        'cached_tokens_total{source="device"}': totals.device_tokens,
        'cached_tokens_total{source="host"}': totals.host_tokens,
    }
    for name, label, counts in (
        ("requests_routed_total", "reason", totals.routed),
        ("requests_refused_total", "code", totals.refused),
        ("sequences_ended_total", "state", totals.ended),
        ("requests_aborted_total", "reason", totals.aborted),
    ):
        found.update({f'{name}{{{label}="{key}"}}': value for key, value in counts.items()})
    return found


def _own_gauges(router: Router) -> dict[str, float]:
    live = router.live
    found: dict[str, float] = {
        "journal_sequences": len(live.journal.sequences),
        "journal_bytes": live.journal.size(),
        "prefix_map_keys": len(live.placement.map),
        "affinity_homes": live.placement.homes,
    }
    for rank in live.ranks:
        label = f'{{engine="{rank.index}"}}'
        load = live.placement.loads[rank.index]
        found[f"engine_inflight{label}"] = len(rank.sequences)
        found[f"engine_load_tokens{label}"] = 0 if load == math.inf else load
        found[f"engine_ready{label}"] = rank.ready
    return found


def _merged(router: Router) -> tuple[dict[str, float], dict[str, float]]:
    """Counters and gauges of all processes, the router's own among them."""
    counters = dict.fromkeys(ALWAYS_COUNTERS, 0.0) | router.registry.counters()
    for name, value in _own_counters(router).items():
        # A client that left is counted by its frontend, wherever its request was then.
        if name != 'requests_aborted_total{reason="client"}':
            counters[name] = counters.get(name, 0) + value
    gauges = dict.fromkeys(ALWAYS_GAUGES, 0.0) | router.registry.gauges() | _own_gauges(router)
    return counters, gauges


def _prometheus_page(router: Router) -> bytes:
    counters, gauges = _merged(router)
    lines = prometheus.families("counter", counters, PREFIX, HELP)
    lines += prometheus.families("gauge", gauges, PREFIX, HELP)
    there = {family_of(name) for name in (*counters, *gauges)}
    for name, kind in LABELLED.items():
        if name not in there:
            lines += prometheus.empty_family(name, kind)
    histograms = router.registry.histograms()
    for name in sorted({*HISTOGRAMS, *histograms}):
        lines += prometheus.histogram(name, histograms.get(name))
    peer_counters, peer_gauges = _peer_family(router, counters, gauges)
    lines += prometheus.families("counter", peer_counters, PEER_PREFIX, PEER_HELP)
    lines += prometheus.families("gauge", peer_gauges, PEER_PREFIX, PEER_HELP)
    return ("\n".join(lines) + "\n").encode()


def _peer_family(
    router: Router, counters: dict[str, float], gauges: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """The names that tools know which read only this family."""
    totals, info = router.live.totals, router.service.info
    block_tokens = 0 if info is None else info.block_tokens
    cached = totals.device_tokens + totals.host_tokens
    pages, free = gauges["gpu_pages_total"], gauges["gpu_pages_free"] + gauges["gpu_pages_cached"]
    host, host_free = gauges["host_pages_total"], gauges["host_pages_free"]
    found = {
        "prompt_tokens_total": totals.prompt_tokens,
        "generation_tokens_total": totals.generated_tokens,
        'cached_tokens_total{cache_source="device"}': totals.device_tokens,
        'cached_tokens_total{cache_source="host"}': totals.host_tokens,
        "num_retracted_reqs_total": counters.get("preemptions_total", 0),
        'realtime_tokens_total{mode="prefill_compute"}': totals.prompt_tokens - cached,
        'realtime_tokens_total{mode="prefill_cache"}': cached,
        'realtime_tokens_total{mode="decode"}': totals.generated_tokens,
    }
    now = {
        "cache_hit_rate": cached / totals.prompt_tokens if totals.prompt_tokens else 0.0,
        "num_running_reqs": gauges["requests_running"],
        "num_queue_reqs": gauges["requests_waiting"],
        "token_usage": (pages - free) / pages if pages else 0.0,
        "max_total_num_tokens": sum(rank.info.pool_tokens for rank in router.live.ranks if rank.info is not None),
        "hicache_host_used_tokens": (host - host_free) * block_tokens,
        "hicache_host_total_tokens": host * block_tokens,
    }
    return {name: float(value) for name, value in found.items()}, {name: float(value) for name, value in now.items()}


def _json_page(router: Router) -> bytes:
    """Indented JSON, one key a line: the service, each rank with all its numbers, and the other processes."""
    service, live = router.service, router.live
    status = router.status(0.0)
    ranks: dict[str, Any] = {}
    for rank in live.ranks:
        load = live.placement.loads[rank.index]
        own: dict[str, Any] = {
            "ready": rank.ready,
            "generation": 0 if rank.peer is None else rank.peer.generation,
            "inflight": len(rank.sequences),
            "load_tokens": 0 if load == math.inf else load,
        }
        if rank.info is not None:
            own["engine"] = msgspec.to_builtins(msgspec.structs.asdict(rank.info))
        process = router.registry.processes.get(rank.name)
        told = {} if process is None else _plain({**process.counters, **process.gauges}) | process.detail
        ranks[str(rank.index)] = own | told | own
    others = {
        name: _plain({**process.counters, **process.gauges}) | process.detail
        for name, process in sorted(router.registry.processes.items())
        if not name.startswith("engine.")
    }
    others["router.0"] = _plain({**_own_counters(router), **_own_gauges(router)})
    body = {
        "state": {"state": status.state, "reason": status.reason, "ready": status.ranks_ready, "ranks": status.ranks},
        "service": None if service.info is None else msgspec.structs.asdict(service.info),
        "ranks": ranks,
        "processes": others,
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"


def _plain(numbers: dict[str, float]) -> dict[str, float]:
    """Whole numbers as such."""
    return {name: int(value) if value == int(value) else value for name, value in sorted(numbers.items())}
