"""The laws of the metrics: sums over processes, counters outlive a process, gauges end with it, what a process says can
never break the page, and every name of the contract is on it.
"""

from __future__ import annotations

import json
import re

import pytest

from router_proc.metrics import Registry
from tests.unit.router_world import World, engine_info, world
from wire.child import Control
from wire.messages import Abort, Finished, Histogram, Stats, Usage

SAMPLE = re.compile(r'^([a-z]+:[a-z_0-9]+)(\{[a-z_]+="[^"]*"(?:,[a-z_]+="[^"]*")*\})? (-?[0-9.e+-]+|NaN)$')
CONTRACT = [
    "requests_running",
    "requests_waiting",
    "requests_aborted_total",
    "frontend_live_requests",
    "tokenizer_live_requests",
    "engine_inflight",
    "gpu_pages_total",
    "gpu_pages_free",
    "gpu_pages_cached",
    "gpu_pages_pinned",
    "swa_slots_total",
    "swa_slots_free",
    "swa_slots_cached",
    "host_pages_total",
    "host_pages_free",
    "host_pages_cached",
    "host_pages_pinned",
    "host_tokens_loaded_total",
    "host_save_skipped_total",
    "prefix_tokens_queried_total",
    "prefix_tokens_reused_total",
    "prefix_key_collisions_total",
    "kvnet_transfers_open",
    "kvnet_bad_frames_total",
    "kvnet_late_frames_total",
    "ipc_bad_messages_total",
    "ipc_gaps_total",
    "ttft_seconds",
    "inter_token_seconds",
    "e2e_seconds",
    "queue_seconds",
]
PEER = [
    "prompt_tokens_total",
    "generation_tokens_total",
    "cached_tokens_total",
    "cache_hit_rate",
    "num_running_reqs",
    "num_queue_reqs",
    "token_usage",
    "max_total_num_tokens",
    "num_retracted_reqs_total",
    "hicache_host_used_tokens",
    "hicache_host_total_tokens",
    "realtime_tokens_total",
]


def stats(counters: dict[str, float] | None = None, gauges: dict[str, float] | None = None) -> Stats:
    return Stats(counters or {}, gauges or {}, {})


def read(page: str) -> tuple[dict[str, float], dict[str, str]]:
    """Samples and types; asserts the form: each family has one HELP and one TYPE line before all its samples."""
    samples: dict[str, float] = {}
    types: dict[str, str] = {}
    last = helped = ""
    for line in page.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ", 3)[2]
            assert len(line.split(" ", 3)[3]) > 3
        elif line.startswith("# TYPE "):
            _, _, last, kind = line.split(" ")
            assert last == helped, "HELP and TYPE belong together"
            assert last not in types, f"{last} comes twice"
            types[last] = kind
        else:
            found = SAMPLE.match(line)
            assert found, line
            family = re.sub("_(bucket|sum|count)$", "", found[1]) if types[last] == "histogram" else found[1]
            assert family == last, line
            assert found[1] + (found[2] or "") not in samples, line
            samples[found[1] + (found[2] or "")] = float(found[3])
    return samples, types


def own(found: World) -> dict[str, float]:
    return {name.removeprefix("deepinfer:"): value for name, value in read(found.page())[0].items()}


# --- merging ----------------------------------------------------------------------------------------------------------


def test_counters_outlive_a_process_and_gauges_end_with_it() -> None:
    registry = Registry()
    registry.put("engine.0", b"engine.0.1", stats({"c_total": 5}, {"g": 2}))
    registry.put("engine.1", b"engine.1.1", stats({"c_total": 7}, {"g": 3}))
    assert (registry.counters(), registry.gauges()) == ({"c_total": 12}, {"g": 5})
    registry.put("engine.0", b"engine.0.1", stats({"c_total": 6}, {"g": 1}))
    assert (registry.counters(), registry.gauges()) == ({"c_total": 13}, {"g": 4})
    registry.drop(b"engine.0.1")
    assert (registry.counters(), registry.gauges()) == ({"c_total": 13}, {"g": 3})
    registry.put("engine.0", b"engine.0.2", stats({"c_total": 1}, {"g": 9}))
    assert (registry.counters(), registry.gauges()) == ({"c_total": 14}, {"g": 12})
    registry.put("engine.0", b"engine.0.3", stats({"c_total": 2}, {"g": 1}))
    assert (registry.counters(), registry.gauges()) == ({"c_total": 16}, {"g": 4})


def test_a_process_that_was_only_silent_is_not_counted_twice() -> None:
    registry = Registry()
    registry.put("engine.0", b"engine.0.1", stats({"c_total": 5}, {"g": 2}))
    registry.drop(b"engine.0.1")
    registry.put("engine.0", b"engine.0.1", stats({"c_total": 6}, {"g": 1}))
    assert (registry.counters(), registry.gauges()) == ({"c_total": 6}, {"g": 1})


def test_histograms_are_summed_over_processes_and_starts() -> None:
    registry = Registry()

    def put(identity: bytes, counts: list[int], total: float) -> bool:
        name = identity.decode().rpartition(".")[0]
        return registry.put(name, identity, Stats({}, {}, {"h_seconds": Histogram([1.0, 2.0], counts, total)}))

    assert put(b"frontend.0.1", [1, 0, 2], 9.0)
    assert put(b"frontend.1.1", [1, 1, 1], 5.0)
    assert registry.histograms() == {"h_seconds": Histogram([1.0, 2.0], [2, 1, 3], 14.0)}
    assert put(b"frontend.0.2", [1, 0, 0], 0.5)
    for _ in range(2):
        assert registry.histograms() == {"h_seconds": Histogram([1.0, 2.0], [3, 1, 3], 14.5)}
    assert not put(b"frontend.0.2", [1, 0], 0.5), "a count for each bucket"
    assert not registry.put("x", b"x", Stats({}, {}, {"h_seconds": Histogram([1.0, 3.0], [1, 0, 0], 0.5)}))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        "1a",
        "a b",
        "a{",
        'a{b="c"',
        'a{b="c"}x',
        'a{b="c"d"}',
        'a{b="c\n"}',
        "a\nb 1",
        'a{b="c"} 5\ndeepinfer:engine_inflight{engine="0"}',
    ],
)
def test_a_name_that_would_break_the_page_is_refused(name: str) -> None:
    registry = Registry()
    assert not registry.put("engine.0", b"e", stats({name: 1}))
    assert not registry.put("engine.0", b"e", stats({}, {name: 1}))
    assert not registry.put("engine.0", b"e", Stats({}, {}, {name: Histogram([], [1], 1.0)}))
    assert registry.counters() == registry.gauges() == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_refused(value: float) -> None:
    assert not Registry().put("engine.0", b"e", stats({"a": value}))
    assert not Registry().put("engine.0", b"e", stats({}, {"a": value}))


# --- the pages --------------------------------------------------------------------------------------------------------


def test_every_name_of_the_contract_has_help_and_type() -> None:
    with world() as found:
        _, types = read(found.page())
        for name in CONTRACT:
            assert f"deepinfer:{name}" in types, name
        for name in PEER:
            assert f"sglang:{name}" in types, name
        assert types["deepinfer:ttft_seconds"] == "histogram"
        assert types["deepinfer:engine_inflight"] == types["sglang:token_usage"] == "gauge"
        assert types["deepinfer:requests_aborted_total"] == types["sglang:prompt_tokens_total"] == "counter"


def test_numbers_of_all_processes_are_on_the_page() -> None:
    with world(ranks=2) as found:
        engines = found.engines()
        frontend = found.dial("frontend", 0)
        for number, engine in enumerate(engines):
            engine.send(stats({f'ipc_gaps_total{{process="engine.{number}"}}': number}, {"requests_running": 2}))
        histogram = Histogram([0.5, 1.0], [3, 0, 1], 4.25)
        frontend.send(Stats({"requests_aborted_total": 3}, {}, {"time_to_first_token_seconds": histogram}))
        found.settle()
        page = own(found)
        assert page["requests_running"] == 4
        assert page['ipc_gaps_total{process="engine.1"}'] == 1
        assert page['ipc_gaps_total{process="router.0"}'] == 0
        assert page['requests_aborted_total{reason="client"}'] == 3
        assert [page[f'ttft_seconds_bucket{{le="{le}"}}'] for le in ("0.5", "1.0", "+Inf")] == [3, 3, 4]
        assert (page["ttft_seconds_sum"], page["ttft_seconds_count"]) == (4.25, 4)
        assert page['engine_inflight{engine="0"}'] == page['engine_inflight{engine="1"}'] == 0


def test_4_an_abort_is_counted_once() -> None:
    """By the frontend when its client left; by the router for other reasons."""
    with world() as found:
        found.engines()
        frontend = found.dial("frontend", 0)
        sids = [found.running()[0] for _ in range(4)]
        frontend.send(stats({"requests_aborted_total": 1}))
        for sid, reason in zip(sids, ("client", "stop", "stall", "deadline"), strict=True):
            found.tokenizer.send(Abort([sid], reason))
        found.settle()
        aborted = {name: value for name, value in own(found).items() if name.startswith("requests_aborted_total")}
        assert aborted == {
            f'requests_aborted_total{{reason="{reason}"}}': 1 for reason in ("client", "stall", "deadline")
        }


def test_the_family_that_other_tools_read_is_filled() -> None:
    with world() as found:
        (engine,) = found.engines(pool_tokens=12_800)
        sid, _ = found.running()
        pages = {"gpu_pages_total": 100, "gpu_pages_free": 50, "gpu_pages_cached": 25}
        host = {"host_pages_total": 10, "host_pages_free": 4}
        engine.send(stats({"preemptions_total": 2}, {"requests_running": 1, "requests_waiting": 3, **pages, **host}))
        engine.step((sid, 3, [2]), finished=[Finished(sid, 0, "stop", 4, Usage(400, 300, 200, 100), stop_id=2)])
        found.until(lambda: found.ends_of(sid), "its end")
        samples, _ = read(found.page())
        expected = {
            "prompt_tokens_total": 400,
            "generation_tokens_total": 4,
            'cached_tokens_total{cache_source="device"}': 200,
            'cached_tokens_total{cache_source="host"}': 100,
            "cache_hit_rate": 0.75,
            "num_running_reqs": 1,
            "num_queue_reqs": 3,
            "token_usage": 0.25,
            "max_total_num_tokens": 12_800,
            "num_retracted_reqs_total": 2,
            "hicache_host_used_tokens": 6 * 128,
            "hicache_host_total_tokens": 10 * 128,
            'realtime_tokens_total{mode="prefill_compute"}': 100,
        }
        for name, value in expected.items():
            assert samples[f"sglang:{name}"] == value, name


def test_gauges_of_a_lost_engine_are_gone_and_its_counters_stay() -> None:
    with world() as found:
        (engine,) = found.engines()
        engine.send(stats({"steps_total": 10}, {"requests_running": 5}))
        found.settle()
        assert own(found)["requests_running"] == 5
        engine.close()
        found.router.lost(Control("lost", role="engine", index=0, generation=engine.generation))
        page = own(found)
        assert (page["requests_running"], page["steps_total"]) == (0, 10)
        again = found.dial("engine", 0, engine_info())
        again.send(stats({"steps_total": 1}, {"requests_running": 1}))
        found.settle()
        page = own(found)
        assert (page["requests_running"], page["steps_total"]) == (1, 11)


def test_a_page_is_not_broken_by_what_a_process_says() -> None:
    with world() as found:
        (engine,) = found.engines()
        engine.send(stats({'a{b="c"} 5\ndeepinfer:engine_inflight{engine="0"}': 1}))
        found.until(lambda: found.router.listener.counters.bad_messages == 1, "it is counted")
        assert own(found)['ipc_bad_messages_total{process="router.0"}'] == 1


def test_the_json_page_has_one_key_a_line_and_all_numbers_of_a_rank() -> None:
    with world(ranks=2) as found:
        found.engines()
        found.dial("tokenizer", 1)
        sid, engine = found.running(tokens=300, max_tokens=50)
        engine.send(Stats({"steps_total": 3}, {"hicache_pages_used": 7}, {}, {"hicache_backend": "memcpy"}))
        found.settle()
        page = found.page("json")
        parsed = json.loads(page)
        rank = parsed["ranks"][str(engine.index)]
        assert rank["ready"] is True
        assert rank["inflight"] == 1
        assert rank["load_tokens"] == 47
        assert (rank["steps_total"], rank["hicache_pages_used"], rank["hicache_backend"]) == (3, 7, "memcpy")
        assert rank["engine"]["pool_tokens"] == 65_536
        assert parsed["state"]["state"] == "ok"
        assert parsed["service"]["block_tokens"] == 128
        assert parsed["processes"]["router.0"]["journal_bytes"] == 300 * 4 + 64 + 3 * 4
        for line in page.splitlines():
            assert line.count('":') <= 1, line
        assert sum('"hicache_pages_used"' in line for line in page.splitlines()) == 1
        assert sid in found.router.live.journal.sequences
