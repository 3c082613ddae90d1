"""The Prometheus text format: families with HELP and TYPE lines, samples, histograms."""

from __future__ import annotations

from wire.messages import Histogram

PREFIX = "deepinfer:"
OTHER = "number reported by a process of the service"
HELP = {
    "requests_running": "sequences in the engines' running batches",
    "requests_waiting": "sequences in the engines' queues",
    "requests_aborted_total": "requests ended before their end, by reason",
    "requests_refused_total": "requests refused by the router, by error code",
    "requests_routed_total": "prompts given to a rank, by reason",
    "sequences_ended_total": "sequences that the router has released, by final state",
    "frontend_live_requests": "requests that frontends have not answered to the end",
    "tokenizer_live_requests": "requests that tokenizers hold",
    "engine_inflight": "sequences dispatched to an engine and not ended",
    "engine_load_tokens": "estimated uncached prompt tokens and output tokens left on an engine",
    "engine_ready": "1 if the engine is in rotation",
    "gpu_pages_total": "blocks of the device pools",
    "gpu_pages_free": "blocks that hold nothing",
    "gpu_pages_cached": "unreferenced blocks that hold a cached prefix",
    "gpu_pages_pinned": "blocks that must not move: in use or in a copy",
    "swa_slots_total": "window blocks of the device pools",
    "swa_slots_free": "window blocks that hold nothing",
    "swa_slots_cached": "unreferenced window blocks that hold a cached state",
    "host_pages_total": "pages of the host pools",
    "host_pages_free": "host pages that hold nothing",
    "host_pages_cached": "host pages that hold a cached block",
    "host_pages_pinned": "host pages in a copy",
    "host_tokens_loaded_total": "prompt tokens loaded from host memory",
    "host_save_skipped_total": "saves to host memory that found no room",
    "prefix_tokens_queried_total": "prompt tokens looked up in the prefix cache",
    "prefix_tokens_reused_total": "prompt tokens found in the prefix cache",
    "prefix_key_collisions_total": "block keys that matched with different tokens",
    "preemptions_total": "sequences whose blocks were taken away to be rebuilt later",
    "kvnet_transfers_open": "KV transfers under way, by side",
    "kvnet_bad_frames_total": "refused KV frames, by reason",
    "kvnet_late_frames_total": "KV frames that came after the end of their transfer",
    "ipc_bad_messages_total": "internal messages that were refused, by process",
    "ipc_gaps_total": "gaps in the sequence numbers of internal links, by process",
    "outputs_stale_total": "outputs of attempts that are over",
    "outputs_missing_total": "gaps inside the output of a sequence",
    "prompt_tokens_total": "prompt tokens of ended sequences",
    "generation_tokens_total": "produced tokens",
    "cached_tokens_total": "prompt tokens that were not computed, by where they were",
    "journal_sequences": "live sequences in the router's journal",
    "journal_bytes": "bytes of ids and keys in the router's journal",
    "prefix_map_keys": "block keys in the router's prefix map",
    "affinity_homes": "sessions, users and first messages with a home rank",
    "ttft_seconds": "time from a request to its first token",
    "inter_token_seconds": "time between two tokens of a choice",
    "e2e_seconds": "time from a request to its last token",
    "queue_seconds": "time from a sequence's arrival at its engine to its first step",
    "http_requests_total": "HTTP answers, by status",
    "streams_stalled_total": "streams that were ended because their reader did not read",
    "late_outputs_total": "text that reached a frontend after the end of its request",
    "tokenizer_late_outputs_total": "ids that reached a tokenizer after the end of their sequence",
    "tokenizer_segment_hits_total": "text segments found encoded",
    "tokenizer_segment_misses_total": "text segments that were encoded",
    "tokenizer_segment_cache_tokens": "tokens in the caches of encoded segments",
}
HISTOGRAMS = ("ttft_seconds", "inter_token_seconds", "e2e_seconds", "queue_seconds")
# In the contract's list, so they are on the page whether or not a process reports them.
ALWAYS_GAUGES = (
    "requests_running",
    "requests_waiting",
    "frontend_live_requests",
    "tokenizer_live_requests",
    *(f"gpu_pages_{kind}" for kind in ("total", "free", "cached", "pinned")),
    *(f"swa_slots_{kind}" for kind in ("total", "free", "cached")),
    *(f"host_pages_{kind}" for kind in ("total", "free", "cached", "pinned")),
)
ALWAYS_COUNTERS = (
    "host_tokens_loaded_total",
    "host_save_skipped_total",
    "prefix_tokens_queried_total",
    "prefix_tokens_reused_total",
    "prefix_key_collisions_total",
    "kvnet_late_frames_total",
)
LABELLED = {"kvnet_transfers_open": "gauge", "kvnet_bad_frames_total": "counter", "requests_aborted_total": "counter"}


def number(value: float) -> str:
    """A sample's value: whole numbers without a point."""
    return str(int(value)) if value == int(value) else repr(value)


def family_of(sample: str) -> str:
    return sample.partition("{")[0]


def families(kind: str, samples: dict[str, float], prefix: str, help_texts: dict[str, str]) -> list[str]:
    """Lines of all families of one kind ("counter" | "gauge"), sorted by name."""
    lines, last = [], ""
    for sample in sorted(samples, key=lambda name: (family_of(name), name)):
        family = family_of(sample)
        if family != last:
            last = family
            lines += _head(prefix + family, kind, help_texts.get(family, OTHER))
        lines.append(f"{prefix}{sample} {number(samples[sample])}")
    return lines


def empty_family(name: str, kind: str) -> list[str]:
    """A family of ours that has no sample now."""
    return _head(PREFIX + name, kind, HELP.get(name, OTHER))


def histogram(name: str, found: Histogram | None) -> list[str]:
    """A histogram of ours with cumulative buckets; without samples if there is none."""
    family, _, labels = name.partition("{")
    lines = _head(PREFIX + family, "histogram", HELP.get(family, OTHER))
    if found is None:
        return lines
    rest = labels.removesuffix("}")
    inner, outer = (f"{rest}," if rest else ""), (f"{{{rest}}}" if rest else "")
    count = 0
    for bound, part in zip([*found.bounds, "+Inf"], found.counts, strict=True):
        count += part
        lines.append(f'{PREFIX}{family}_bucket{{{inner}le="{bound}"}} {count}')
    lines.append(f"{PREFIX}{family}_sum{outer} {number(found.total)}")
    lines.append(f"{PREFIX}{family}_count{outer} {count}")
    return lines


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
