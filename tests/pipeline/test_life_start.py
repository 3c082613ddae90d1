"""81: a child that fails while starting ends the start with one line. Bad input is named the same way, before that."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.harness import TINY, model_copy
from tests.pipeline.life import MOCK, TORCH, Launch, launch
from tests.pipeline.web import Client, poll

FAIL_SECONDS = 15.0
RANDOM = ("--engine", "torch", "--load-format", "random", "--port", "0", "--device-blocks", "64")


def one_line(tested: Launch, code: int, *parts: str) -> None:
    """It ends with this code and one line that holds all parts; nothing is left running."""
    assert tested.end(60) == code
    assert len(tested.lines()) == 1, tested.said()
    for part in parts:
        assert part in tested.lines()[0], tested.lines()
    assert "Traceback" not in tested.said()
    assert not tested.port_file.exists()


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_missing_model_is_named_with_what_is_accepted(folder: Path) -> None:
    with launch(folder, "--model", "/no/such/folder", "--port", "0") as tested:
        one_line(tested, 1, "'/no/such/folder'", "smollm2-135m-instruct", ".gguf", "config.json")


@pytest.mark.parametrize(
    ("file", "text", "parts"),
    [
        ("config.json", None, ["config.json"]),
        ("config.json", "{", ["config.json", "not JSON"]),
        ("config.json", "{}", ["config.json", "architectures"]),
        ("tokenizer.json", None, ["tokenizer.json"]),
        ("tokenizer.json", "{", ["tokenizer.json"]),
        ("generation_config.json", "[", ["generation_config.json", "not JSON"]),
    ],
)
def test_a_broken_model_folder_is_named(folder: Path, file: str, text: str | None, parts: list[str]) -> None:
    model = shutil.copytree(TINY, folder / "model")
    if text is None:
        (model / file).unlink()
    else:
        (model / file).write_text(text)
    with launch(folder, *MOCK, "--model", str(model)) as tested:
        one_line(tested, 1, *parts)


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    with launch(folder, "--model", str(TINY), "--port", "0") as tested:
        one_line(tested, 1, "*.safetensors", str(TINY))


def test_broken_weights_are_named(folder: Path) -> None:
    model = shutil.copytree(TINY, folder / "model")
    (model / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with launch(folder, "--model", str(model), "--port", "0") as tested:
        one_line(tested, 1, "engine.0", "model.safetensors")


def test_an_unknown_architecture_is_named_with_those_served(folder: Path) -> None:
    model = model_copy(folder / "model", architectures=["MambaForCausalLM"])
    with launch(folder, *RANDOM, "--model", str(model)) as tested:
        one_line(tested, 1, "MambaForCausalLM", "LlamaForCausalLM")


def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with launch(folder, *MOCK, "--port", str(port)) as tested:
            one_line(tested, 1, f"--port {port}", "in use")


def test_too_little_memory_is_named(folder: Path) -> None:
    with launch(folder, *RANDOM, "--model", str(TINY), "--device-blocks", str(10**9)) as tested:
        one_line(tested, 1, "engine.0", "--device-blocks")


def test_a_context_above_the_pool_is_named_with_both_numbers(folder: Path) -> None:
    with launch(folder, *MOCK, "--device-blocks", "8", "--context-length", "4096") as tested:
        one_line(tested, 1, "4096", "1024", "--context-length")


@pytest.mark.parametrize(
    ("flags", "code", "parts"),
    [
        (["--dp", "none"], 2, ["--dp", "from 1 to"]),
        (["--engine", "onnx"], 2, ["--engine", "torch", "mock"]),
        (["--device", "tpu"], 2, ["--device", "cpu", "cuda"]),
        (["--no-such-flag"], 2, ["--no-such-flag", "--help"]),
        (["--test-hooks", "--host", "0.0.0.0"], 1, ["--test-hooks", "--host 0.0.0.0", "loopback"]),
        (["--host", "192.0.2.7"], 1, ["--host 192.0.2.7"]),
        (["--api-key-file", "/no/such/file"], 1, ["--api-key-file /no/such/file"]),
        (["--chat-template", "/no/such/file"], 1, ["--chat-template /no/such/file"]),
        (["--cluster-secret-file", "/no/such/file"], 1, ["--cluster-secret-file /no/such/file"]),
        (["--port-file", "/no/such/folder/port"], 1, ["--port-file /no/such/folder/port"]),
    ],
)
def test_a_bad_option_is_named(folder: Path, flags: list[str], code: int, parts: list[str]) -> None:
    with launch(folder, *MOCK, *flags) as tested:
        one_line(tested, code, *parts)


def test_a_template_with_a_syntax_error_is_named(folder: Path) -> None:
    folder.mkdir()
    (folder / "t.jinja").write_text("{% for x %}")
    with launch(folder, *MOCK, "--chat-template", str(folder / "t.jinja")) as tested:
        one_line(tested, 1, "tokenizer.0", "--chat-template")


# --- 81 ---------------------------------------------------------------------------------------------------------------


def loading(tested: Launch, role: str) -> int:
    """The process id of a child that is not ready yet."""
    poll(f"{role} is started", lambda: role in tested.roles(), 20)
    return int(tested.roles()[role].pid)


@pytest.mark.parametrize("role", ["engine", "tokenizer", "router", "frontend"])
def test_81_a_child_killed_in_its_start_ends_the_start(folder: Path, role: str) -> None:
    with launch(folder, *TORCH) as tested:
        tested.port()
        pid = loading(tested, role)
        tested.roles()[role].send_signal(signal.SIGKILL)
        assert pid
        one_line(tested, 1, f"{role}.0", "SIGKILL")


@pytest.mark.parametrize("role", ["engine", "tokenizer"])
def test_81_a_child_that_hangs_ends_the_start_at_the_limit(folder: Path, role: str) -> None:
    with launch(folder, *TORCH, "--start-timeout-seconds", "4") as tested:
        tested.port()
        loading(tested, role)
        tested.roles()[role].send_signal(signal.SIGSTOP)
        one_line(tested, 1, f"{role}.0", "--start-timeout-seconds")


# --- a good start -----------------------------------------------------------------------------------------------------


def test_live_is_answered_and_health_says_loading_while_engines_load(folder: Path) -> None:
    with launch(folder, *TORCH) as tested:
        client = Client("127.0.0.1", tested.port())
        loading(tested, "engine")
        engine = tested.roles()["engine"]
        engine.send_signal(signal.SIGSTOP)
        poll("the frontend answers", answers(client, "/live", 200), 30)
        assert client.get("/health").status == 503
        assert client.get("/health").error["code"] == "engine_unavailable"
        engine.send_signal(signal.SIGCONT)
        tested.wait_ready()
        assert client.get("/health").status == 200


def answers(client: Client, path: str, status: int) -> Callable[[], bool]:
    def probe() -> bool:
        try:
            return client.get(path, timeout=2).status == status
        except OSError:
            return False

    return probe


def test_ready_says_where_and_what_to_type_next(folder: Path) -> None:
    with launch(folder, *MOCK) as tested:
        port = tested.wait_ready()
        out = tested.out.read_text()
        assert f"http://127.0.0.1:{port}/v1 serves tiny" in out
        assert "prefix cache: shared by all clients, as there are no API keys" in out
        assert f"curl -N http://127.0.0.1:{port}/v1/chat/completions" in out
        body = json.loads(out.partition(" -d '")[2].partition("'\n")[0])
        assert Client("127.0.0.1", port).stream("/v1/chat/completions", {**body, "max_tokens": 3}).read().text()
        tested.process.send_signal(signal.SIGTERM)
        assert tested.end(15) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_loading_ends_it_cleanly(folder: Path, number: signal.Signals) -> None:
    with launch(folder, *TORCH) as tested:
        tested.port()
        loading(tested, "engine")
        tested.process.send_signal(number)
        assert tested.end(10) == 0
        assert not tested.lines()
