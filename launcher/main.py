"""From flags to a served model: what can be wrong is checked in order, then the processes are started and watched."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from pathlib import Path

from engine_proc.checkpoint.embedded import DEFAULT
from engine_proc.checkpoint.folder import ModelFolder, default_cache_dir, resolve
from launcher import listen, rundir
from launcher.children import Place, specs
from launcher.console import Console
from launcher.flags import Flags, parse
from launcher.probe import Probe
from launcher.secrets import api_keys, cache_secret, readable_by_others
from launcher.signals import Signals
from launcher.supervisor import Supervisor

FIRST_QUESTION = "What is the capital of France?"
PHASES = {
    "download": "downloading the model",
    "unpack": "unpacking the model",
    "convert": "converting the model",
    "wait": "waiting for another process that prepares the model",
}


class Ended(Exception):
    """The user asked to end while the model was being prepared."""


def main(arguments: list[str]) -> int:
    """The exit code: 0 after a drain, 1 when something failed, 2 for a wrong option."""
    flags = parse(arguments, os.environ)
    console, signals = Console(), Signals()
    began = time.monotonic()
    try:
        listener = listen.bind(flags.host, flags.port, flags.test_hooks)
    except ValueError as error:
        console.error(str(error))
        return 1
    try:
        return _serve(flags, listener, console, signals, began)
    except ValueError as error:
        console.error(str(error))
        return 1
    except Ended:
        console.line("ended before the model was there")
        return 0
    finally:
        listener.close()


def _serve(flags: Flags, listener: socket.socket, console: Console, signals: Signals, began: float) -> int:
    """Prepare the model, start everything, watch it to its end. ValueError in one line for what is wrong."""
    keys, secret = api_keys(flags), cache_secret(flags)
    for path in (flags.api_key_file, flags.cluster_secret_file):
        if path is not None and readable_by_others(path):
            console.error(f"{path} can be read by other users of this machine (chmod 600 {path})")
    if flags.chat_template and not Path(flags.chat_template).is_file():
        raise ValueError(
            f"--chat-template {flags.chat_template} is not a file; accepted is a file with a Jinja template"
        )
    if flags.port_file is not None:
        if not flags.port_file.parent.is_dir():
            raise ValueError(f"--port-file {flags.port_file} cannot be written: its folder is not there")
        flags.port_file.unlink(missing_ok=True)  # of a former start
    model = _model(flags, console, signals)
    run_dir = rundir.make(os.environ)
    try:
        address, port = listener.getsockname()[:2]
        place = Place(
            run_dir=run_dir.path,
            model_dir=model.path,
            served_models=list(dict.fromkeys(flags.served_model_name)) or [model.name],
            listen_fd=listener.fileno(),
            address=address,
            port=port,
            api_keys=keys,
            cache_secret=secret,
        )
        supervisor = Supervisor(
            specs(flags, place),
            run_dir.path,
            console,
            signals,
            Probe(listen.reachable(address), port, signals.wake),
            flags.log_level,
            flags.start_timeout_seconds,
            flags.drain_seconds,
            on_serving=lambda: _announce(flags, place, console, began),
            on_ending=listener.close,
        )
        console.line(_starting(flags, listen.url(address, port)))
        code = supervisor.run()
    finally:
        run_dir.remove()
    if code == 0:
        console.line("ended")
    return code


def _model(flags: Flags, console: Console, signals: Signals) -> ModelFolder:
    def progress(what: str, done: int, total: int) -> None:
        if signals.asked_to_end():
            raise Ended
        console.phase(PHASES.get(what, what), done, total)

    cache_dir = flags.cache_dir or default_cache_dir(os.environ, Path.home())
    name = flags.model or DEFAULT
    found = resolve(name, cache_dir.expanduser().absolute(), progress, weights=_needs_weights(flags))
    console.line(f"model {found.name}: {found.architecture}, context {found.context_length} tokens, in {found.path}")
    return found


def _needs_weights(flags: Flags) -> bool:
    return flags.engine == "torch" and flags.load_format != "random"


def _starting(flags: Flags, url: str) -> str:
    def count(number: int, what: str) -> str:
        return f"{number} {what}{'s' if number > 1 else ''}"

    engine = "mock" if flags.engine == "mock" else f"{flags.device}, {flags.dtype}"
    return (
        f"starting a router, {count(flags.frontends, 'frontend')} at {url}, {count(flags.tokenizers, 'tokenizer')}, "
        f"{count(flags.dp, 'engine')} ({engine})"
    )


def _announce(flags: Flags, place: Place, console: Console, began: float) -> None:
    url = listen.url(listen.reachable(place.address), place.port)
    if flags.port_file is not None:
        _write_port(flags.port_file, place.port)
    names = ", ".join(place.served_models)
    console.line(f"ready after {time.monotonic() - began:.1f} s: {url}/v1 serves {names}")
    console.line(f"prefix cache: {_sharing(flags, place)}")
    console.line(f"try it: {_first_command(place, url)}")


def _first_command(place: Place, url: str) -> str:
    """A command line to copy into a shell; a key is named, not shown."""
    body = {"model": place.served_models[0], "stream": True, "messages": [{"role": "user", "content": FIRST_QUESTION}]}
    words = ["curl", "-N", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    command = " ".join(shlex.quote(word) for word in words)
    if place.api_keys:
        command += ' -H "Authorization: Bearer $KEY"'
    return f"{command} -d {shlex.quote(json.dumps(body))}"


def _sharing(flags: Flags, place: Place) -> str:
    if not flags.prefix_cache:
        return "off"
    tenants = len(set(place.api_keys.values()))
    if not tenants:
        return "shared by all clients, as there are no API keys"
    if flags.share_prefix_cache and tenants > 1:
        return f"shared by all {tenants} tenants (--share-prefix-cache)"
    return f"{tenants} tenant{'s' if tenants > 1 else ''}, each with its own"


def _write_port(path: Path, port: int) -> None:
    """Readers see the whole file or none."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(f"{port}\n")
        fresh.replace(path)
    except OSError as error:
        raise ValueError(f"--port-file {path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
