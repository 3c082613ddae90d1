"""80: whatever kills the launcher, nothing of it is left after 5 s. 82: starts at the same moment do not collide."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.pipeline.harness import Service, role_of, service
from tests.pipeline.life import MOCK, TORCH, Launch, launch, port_is_free
from tests.pipeline.web import Client, poll

KILL_SECONDS = 5.0  # not stretched: this time is promised
CHAT = "/v1/chat/completions"


@pytest.fixture
def place() -> Iterator[Path]:
    """Where the launcher makes its run folders in a test: a short path of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as found:
        yield Path(found)


def nothing_is_left(tested: Launch, port: int, place: Path) -> None:
    tested.gone(KILL_SECONDS)
    assert port_is_free(port)
    assert not list(place.iterdir()), "a run folder is left"


# --- 80 ---------------------------------------------------------------------------------------------------------------


def test_80_killed_while_idle_and_a_start_right_after(folder: Path, place: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(place)}
    with launch(folder / "first", *MOCK, env=env) as tested:
        port = tested.wait_ready()
        assert len(tested.roles()) == 4
        tested.process.kill()
        nothing_is_left(tested, port, place)
        with launch(folder / "second", *MOCK, "--port", str(port), env=env) as again:
            assert again.wait_ready() == port


def test_80_killed_under_load(folder: Path, place: Path) -> None:
    flags = ("--dp", "2", "--tokenizers", "2", "--frontends", "2", "--test-hooks")
    with launch(folder, *MOCK, *flags, env={"XDG_RUNTIME_DIR": str(place)}) as tested:
        port = tested.wait_ready()
        client = Client("127.0.0.1", port)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4000}
        streams = [client.stream(CHAT, {**body, "metadata": {"deepinfer_hooks": {"step_ms": 5}}}) for _ in range(8)]
        for stream in streams:
            stream.first_token()
        tested.process.kill()
        nothing_is_left(tested, port, place)
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("flags", [MOCK, TORCH], ids=["mock", "torch"])
@pytest.mark.parametrize("delay", [0.0, 0.4, 1.2])
def test_80_killed_during_the_start(folder: Path, place: Path, flags: tuple[str, ...], delay: float) -> None:
    """Interpreters that start, torch that is imported, weights that are made."""
    with launch(folder, *flags, env={"XDG_RUNTIME_DIR": str(place)}) as tested:
        port = tested.port()
        poll("an engine is started", lambda: "engine" in tested.roles() or tested.process.poll() is not None, 10)
        time.sleep(delay)  # the moment is what is tested, nothing is awaited
        tested.process.kill()
        tested.gone(KILL_SECONDS)
        assert port_is_free(port)
        with launch(folder / "again", *MOCK, env={"XDG_RUNTIME_DIR": str(place)}) as again:
            again.wait_ready()
            assert len(list(place.iterdir())) == 1, "the next start sweeps what a killed one left"


def test_80_processes_of_others_are_not_touched(folder: Path, place: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(place)}
    with launch(folder / "other", *MOCK, env=env) as other:
        other_port = other.wait_ready()
        before = {process.pid for process in other.processes()}
        with launch(folder / "killed", *MOCK, env=env) as tested:
            tested.wait_ready()
            tested.process.kill()
            tested.gone(KILL_SECONDS)
        with launch(folder / "next", *MOCK, env=env) as following:
            following.wait_ready()
        assert {process.pid for process in other.processes()} == before
        assert Client("127.0.0.1", other_port).get("/health").status == 200


def test_the_whole_group_killed_leaves_only_what_the_next_start_sweeps(folder: Path, place: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(place)}
    with launch(folder / "killed", *MOCK, env=env) as tested:
        tested.wait_ready()
        os.killpg(tested.process.pid, signal.SIGKILL)
        tested.gone(KILL_SECONDS)
    with launch(folder / "next", *MOCK, env=env) as following:
        following.wait_ready()
        assert len(list(place.iterdir())) == 1


# --- 82 ---------------------------------------------------------------------------------------------------------------


def start_together(folder: Path, count: int) -> None:
    with ExitStack() as stack:
        found = [stack.enter_context(launch(folder / str(number), *MOCK)) for number in range(count)]
        with ThreadPoolExecutor(count) as pool:
            ports = list(pool.map(lambda tested: tested.wait_ready(300), found))
        assert len(set(ports)) == count
        for port in ports:
            assert Client("127.0.0.1", port).get("/health").status == 200
        for tested in found:
            tested.process.send_signal(signal.SIGTERM)
        for tested in found:
            assert tested.end(60) == 0


def test_82_starts_at_the_same_moment(folder: Path) -> None:
    start_together(folder, 4)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_82_sixteen_starts_twenty_times(folder: Path) -> None:
    for turn in range(20):
        start_together(folder / str(turn), 16)


# --- a dead child -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("life"), "--dp", "2", "--tokenizers", "2", "--frontends", "2") as found:
        yield found


@pytest.mark.parametrize("role", ["engine", "tokenizer", "router", "frontend"])
def test_79_a_killed_child_runs_again_and_the_service_serves(mortal: Service, role: str) -> None:
    """Live requests end as the contract says or are not touched; later ones are served as ever."""
    streams = [
        mortal.stream(CHAT, mortal.chat_body(f"hello {number}", hooks={"step_ms": 10}, max_tokens=300))
        for number in range(6)
    ]
    for stream in streams:
        stream.first_token()
    victim = mortal.children(role)[0]
    victim.kill()
    for stream in streams:
        if role == "frontend":
            stream.close()  # its clients are gone with it, the others' are not looked at
            continue
        stream.read()
        assert stream.error is None or stream.error["code"] == "engine_unavailable"
    if role == "router":
        assert all(stream.error for stream in streams)

    def back() -> bool:
        pids = {process.pid for process in mortal.children(role)}
        return len(pids) == (1 if role == "router" else 2) and victim.pid not in pids

    poll(f"the {role} runs again", back, 15)
    poll("the service is healthy", mortal.healthy, 15)

    def serves() -> bool:
        bodies = [mortal.chat_body(f"again {number}", max_tokens=5) for number in range(8)]
        return all(mortal.post(CHAT, body).status == 200 for body in bodies)

    poll("requests are served by every way through it", serves, 15)
    mortal.idle()


def test_every_child_is_in_the_launchers_process_group(mortal: Service) -> None:
    group = os.getpgid(mortal.process.pid)
    for child in mortal.children():
        assert os.getpgid(child.pid) == group, role_of(child)


def test_no_child_inherits_what_is_not_its_own(mortal: Service) -> None:
    """Only frontends hold the HTTP socket; nobody holds the launcher's lock or another child's pipes."""
    for child in mortal.children():
        held = {path.path for path in child.open_files()}
        assert not [path for path in held if path.endswith("/lock")], role_of(child)
        listens = [found for found in child.net_connections("inet") if found.status == psutil.CONN_LISTEN]
        assert bool(listens) == (role_of(child) == "frontend")
