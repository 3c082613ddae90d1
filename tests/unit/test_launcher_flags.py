"""Every option does something, is explained, and is refused in one line that names it when its value is wrong."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher.children import Place, cores, specs
from launcher.flags import Flags, parse
from launcher.options import Help, make_parser

PLACE = Place(Path("/run/x"), Path("/models/m"), ["m"], 9, "127.0.0.1", 8888, {}, b"s" * 32)
# Options that the launcher itself uses; all others must change some process's configuration.
OWN = {
    "model",
    "served_model_name",
    "cache_dir",
    "host",
    "port",
    "port_file",
    "api_key",
    "api_key_file",
    "cluster_secret_file",
    "start_timeout_seconds",
    "drain_seconds",
    "log_level",
}


def processes(flags: Flags) -> list[Any]:
    """What all processes get, without what is random at each start."""
    found: list[Any] = []
    for spec in specs(flags, PLACE):
        config = msgspec.json.decode(spec.config)
        config.pop("secret")
        config.pop("created", None)
        found.append((spec.module, spec.name, spec.fds, config))
    return found


def other_value(name: str, value: Any) -> Any:
    others = {"engine": "mock", "device": "cuda", "dtype": "bf16", "load_format": "random", "routing": "least-loaded",
              "sampling_defaults": "openai", "mock_model": "echo", "chat_template": "/t.jinja",
              "template_kwargs": ("x",), "block_tokens": 16, "attention_backend": "paged"}  # fmt: skip
    if name in others:
        return others[name]
    return not value if isinstance(value, bool) else value + 1


@pytest.mark.parametrize("name", [field.name for field in fields(Flags) if field.name not in OWN])
def test_no_option_is_ignored(name: str) -> None:
    flags = parse([], {})
    changed = replace(flags, **{name: other_value(name, getattr(flags, name))})
    assert processes(changed) != processes(flags)


@pytest.mark.parametrize(
    "arguments", [["--gpu-memory-fraction", "0.5"], ["--attention-backend", "paged"]], ids=lambda part: part[0]
)
def test_options_of_a_gpu_are_refused_without_one(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([*arguments, "--device", "cuda"], {}).device == "cuda"
    with pytest.raises(SystemExit):
        parse(arguments, {})
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--model", "--chat-template"])
def test_an_empty_value_is_not_taken_for_none_given(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([option, ""], {})
    assert f"argument {option}: it must not be empty" in capsys.readouterr().err


def test_every_option_has_a_field_and_a_text() -> None:
    actions = [action for action in make_parser()._actions if action.dest != "help"]
    assert {action.dest for action in actions} == {field.name for field in fields(Flags)}
    assert all(action.help for action in actions)


def test_the_help_gives_every_default() -> None:
    parser = make_parser()
    for action in parser._actions:
        if action.default not in (None, False, True, "", [], "==SUPPRESS=="):
            text = Help(parser.prog)._expand_help(action)
            assert text.count("(default: ") == 1, text
            assert "%" not in text


def test_processes_are_as_many_as_asked_and_share_one_secret() -> None:
    flags = parse(["--dp", "3", "--tokenizers", "2", "--frontends", "2", "--engine", "mock"], {})
    found = specs(flags, PLACE)
    names = [spec.name for spec in found]
    assert names == [
        "router.0",
        "frontend.0",
        "frontend.1",
        "tokenizer.0",
        "tokenizer.1",
        *[f"engine.{i}" for i in range(3)],
    ]
    configs = [msgspec.json.decode(spec.config) for spec in found]
    assert len({config["secret"] for config in configs}) == 1
    again = msgspec.json.decode(specs(flags, PLACE)[0].config)
    assert again["secret"] != configs[0]["secret"], "a new one at each start"
    assert [config["rank"] for config in configs if "rank" in config] == [0, 1, 2]
    assert [spec.fds for spec in found if spec.fds] == [(9,), (9,)], "only frontends inherit the HTTP socket"
    for spec in found:
        assert bool(spec.environment) == (spec.role == "engine")


def test_engines_share_the_cores_and_do_not_spin() -> None:
    threads = max(1, (cores() - 1) // 2)
    for spec in specs(parse(["--dp", "2"], {}), PLACE):
        if spec.role == "engine":
            wanted = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
            assert spec.environment == wanted
            assert msgspec.json.decode(spec.config)["threads"] == threads


@pytest.mark.parametrize(("quota", "most"), [("max 100000", 1 << 20), ("150000 100000", 2), ("100000 100000", 1)])
def test_cores_obey_the_control_group(tmp_path: Path, quota: str, most: int) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert 1 <= cores(tmp_path / "cpu.max") <= most
    assert cores(tmp_path / "none") >= cores(tmp_path / "cpu.max")


def test_options_win_over_the_environment() -> None:
    environment = {"DEEPINFER_ACCELERATOR": "nvidia", "DEEPINFER_HF_MODEL_DIR": "/models/a"}
    assert (parse([], {}).device, parse([], {}).model) == ("cpu", "")
    assert (parse([], environment).device, parse([], environment).model) == ("cuda", "/models/a")
    flags = parse(["--device", "cpu", "--model", "b"], environment)
    assert (flags.device, flags.model) == ("cpu", "b")


WRONG = [
    (["--dp", "x"], ["--dp", "'x'", "from 1 to 256"]),
    (["--dp", "0"], ["--dp", "from 1 to 256"]),
    (["--port", "65536"], ["--port", "from 0 to 65535"]),
    (["--engine", "gguf"], ["--engine", "torch", "mock"]),
    (["--dtype", "fp8"], ["--dtype", "auto", "fp32", "bf16"]),
    (["--drain-seconds", "nan"], ["--drain-seconds", "a number from 0"]),
    (["--drain-seconds", "inf"], ["--drain-seconds", "a number from 0"]),
    (["--max-body-bytes", "4Q"], ["--max-body-bytes", "number of bytes from"]),
    (["--served-model-name", "a b"], ["--served-model-name", "A-Z"]),
    (["--key-bits", "8"], ["--key-bits", "--test-hooks"]),
    (["--mock-step-ms", "3"], ["--mock-step-ms", "--engine mock"]),
    (["--hicache-size-gb", "4"], ["--hicache-size-gb", "--help"]),
    (["--role", "pe"], ["--role", "--help"]),
    (["--drain-second", "3"], ["--drain-second", "--drain-seconds"]),
    (["model"], ["'model'", "--help"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "parts"), WRONG)
def test_a_wrong_option_is_one_line_and_code_2(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments, {})
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert all(part in said for part in parts), said


def test_a_wrong_environment_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([], {"DEEPINFER_ACCELERATOR": "amd"})
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "launch.py: environment DEEPINFER_ACCELERATOR: 'amd' is not one of nvidia, cpu\n"
    )


@pytest.mark.parametrize(("text", "value"), [("1048576", 1 << 20), ("4M", 4 << 20), ("4MiB", 4 << 20), ("1g", 1 << 30)])
def test_sizes_have_units(text: str, value: int) -> None:
    assert parse(["--max-body-bytes", text], {}).max_body_bytes == value
