"""The run folder is private, short enough, and swept only when it is ours and dead.

The port, the keys and the secrets are checked before anything starts, and what is wrong is named in one line.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import listen, rundir
from launcher.console import Console
from launcher.flags import Flags, parse
from launcher.secrets import api_keys, cache_secret

ROOT = Path(__file__).resolve().parents[2]


# --- run folder -------------------------------------------------------------------------------------------------------


@pytest.fixture
def base() -> Iterator[Path]:
    """A place whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as found:
        yield Path(found)


def names(base: Path) -> set[str]:
    return {path.name for path in base.iterdir()}


def test_the_folder_is_private_and_random(base: Path) -> None:
    first, second = (rundir.make({"XDG_RUNTIME_DIR": str(base)}) for _ in range(2))
    assert first.path.parent == second.path.parent == base
    assert first.path != second.path, "the second start did not take or sweep the first one's"
    for found in (first, second):
        assert stat.S_IMODE(found.path.stat().st_mode) == 0o700
        assert names(found.path) == {"lock"}
        found.remove()
    assert not names(base)


def test_a_dead_launchers_folder_is_swept_and_a_live_ones_is_not(base: Path) -> None:
    live = rundir.make({"XDG_RUNTIME_DIR": str(base)})
    (live.path / "router.sock").touch()
    program = (
        "import sys, os, pathlib; from launcher import rundir;"
        "made = rundir.make({'XDG_RUNTIME_DIR': sys.argv[1]}); (made.path / 'router.sock').touch(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, str(base)], cwd=ROOT, check=True, timeout=30)
    assert len(names(base)) == 2
    fresh = rundir.make({"XDG_RUNTIME_DIR": str(base)})
    assert names(base) == {live.path.name, fresh.path.name}
    assert (live.path / "router.sock").exists()
    live.remove()
    fresh.remove()


def test_what_is_not_ours_is_not_swept(base: Path) -> None:
    prefix = f"deepinfer-{os.getuid()}-"
    kept = base / "kept"
    (kept / "inside").mkdir(parents=True)
    (kept / "lock").touch()
    (base / f"{prefix}link").symlink_to(kept)
    (base / f"{prefix}file").touch()
    (base / "deepinfer-999999-other").mkdir()
    (base / "deepinfer-999999-other" / "lock").touch()
    (base / f"{prefix}young").mkdir()  # without its lock: another start is making it just now
    if os.getuid() == 0:  # only root can make a folder of another user
        (base / f"{prefix}theirs").mkdir()
        (base / f"{prefix}theirs" / "lock").touch()
        os.chown(base / f"{prefix}theirs", 65534, 65534)
    before = names(base)
    rundir.make({"XDG_RUNTIME_DIR": str(base)}).remove()
    assert names(base) == before
    assert names(kept) == {"inside", "lock"}
    old = time.time() - 3600
    os.utime(base / f"{prefix}young", (old, old))
    rundir.make({"XDG_RUNTIME_DIR": str(base)}).remove()
    assert names(base) == before - {f"{prefix}young"}


def test_the_lock_is_held_from_the_moment_it_is_there(base: Path) -> None:
    made = rundir.make({"XDG_RUNTIME_DIR": str(base)})
    with (made.path / "lock").open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.remove()


def test_a_long_or_closed_place_is_passed_over(base: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60) / ("y" * 60)
    deep.mkdir(parents=True)
    made = rundir.make({"XDG_RUNTIME_DIR": str(deep), "TMPDIR": str(base)})
    assert made.path.parent == base
    assert len(os.fsencode(made.path / rundir.LONGEST_SOCKET)) <= 107
    made.remove()
    made = rundir.make({"XDG_RUNTIME_DIR": str(tmp_path / "none"), "TMPDIR": "relative"})
    assert made.path.parent == Path("/tmp")
    made.remove()


# --- port -------------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named() -> None:
    taken = listen.bind("127.0.0.1", 0, hooks=True)
    port = taken.getsockname()[1]
    with pytest.raises(ValueError, match=f"^--port {port} on 127.0.0.1 is in use"):
        listen.bind("127.0.0.1", port, hooks=False)
    taken.close()
    listen.bind("127.0.0.1", port, hooks=False).close()


def test_the_socket_is_not_inherited_by_chance() -> None:
    bound = listen.bind("127.0.0.1", 0, hooks=False)
    assert not bound.get_inheritable()
    bound.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_hooks_are_refused_where_others_can_reach_them(host: str) -> None:
    with pytest.raises(ValueError, match="--test-hooks is refused with --host"):
        listen.bind(host, 0, hooks=True)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 300])
def test_an_address_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ValueError, match=r"^--host .*(such as 127\.0\.0\.1|addresses of this machine)"):
        listen.bind(host, 0, hooks=False)


def test_urls() -> None:
    assert listen.url("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert listen.url("::1", 80) == "http://[::1]:80"
    assert listen.reachable("0.0.0.0") == "127.0.0.1"
    assert listen.is_loopback("127.9.9.9")
    assert not listen.is_loopback("10.0.0.1")
    assert listen.bind("localhost", 0, hooks=True).family in (socket.AF_INET, socket.AF_INET6)


# --- keys and secrets -------------------------------------------------------------------------------------------------


def with_key_file(tmp_path: Path, text: str) -> Flags:
    path = tmp_path / "keys"
    path.write_text(text)
    return replace(parse([], {}), api_key_file=path)


def test_keys_come_from_options_and_files(tmp_path: Path) -> None:
    flags = replace(with_key_file(tmp_path, "# who\n\nred:k1\nblue:k:2\nred:k3\n"), api_key=("k0",))
    assert api_keys(flags) == {"k0": "default", "k1": "red", "k:2": "blue", "k3": "red"}
    assert api_keys(parse([], {})) == {}


@pytest.mark.parametrize(
    "text",
    ["secretkey\n", "a:secret key\n", ":secretkey\n", "a b:secretkey\n", "a:secretkeyé\n", "a:\n", "# none\n", ""],
)
def test_a_wrong_key_file_is_named_and_no_key_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"--api-key-file .*keys .*`tenant:key`") as caught:
        api_keys(with_key_file(tmp_path, text))
    assert "secret" not in str(caught.value).replace("secrets", "")
    assert "\n" not in str(caught.value)


def test_a_key_of_two_tenants_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keys line 2: this key was given before"):
        api_keys(with_key_file(tmp_path, "a:secretkey\nb:secretkey\n"))


def test_the_clusters_secret_is_the_same_at_each_start(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    flags = replace(parse([], {}), cluster_secret_file=path)
    assert cache_secret(flags) == cache_secret(flags) == b"0123456789abcdef"
    random = parse([], {})
    assert cache_secret(random) != cache_secret(random)
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"--cluster-secret-file .* holds 5 bytes; a secret has at least 16"):
        cache_secret(flags)
    with pytest.raises(ValueError, match=r"--cluster-secret-file .* cannot be read"):
        cache_secret(replace(flags, cluster_secret_file=tmp_path / "none"))


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_off_a_terminal_each_phase_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    for done in range(0, 101, 10):
        console.phase("loading", done, 100)
    console.phase("warming up")
    console.line("ready")
    assert capsys.readouterr().out == "deepinfer: loading ...\ndeepinfer: warming up ...\ndeepinfer: ready\n"


def test_on_a_terminal_a_bar_moves() -> None:
    top, bottom = pty.openpty()
    program = (
        "from launcher.console import Console; import time; console = Console()\n"
        "for done in (0, 50, 100): console.phase('loading', done * 10**6, 10**8); time.sleep(0.12)\n"
        "console.line('ready')"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=bottom, check=True, timeout=30)
    os.close(bottom)
    said = b""
    while select.select([top], [], [], 0.2)[0]:
        try:
            said += os.read(top, 65536)
        except OSError:  # the other end is closed and all is read
            break
    os.close(top)
    assert said.count(b"\r\x1b[K") == 3, said
    assert b"[###############               ] 50.0 of 100.0 MB" in said
    assert said.endswith(b"100.0 of 100.0 MB\r\ndeepinfer: ready\r\n"), said
