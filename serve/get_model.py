#!/usr/bin/env python3
"""Prints the folder of a model, fetched and converted if need be: `python serve/get_model.py NAME|FILE.gguf|list`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_proc.checkpoint import embedded, folder

_WIDTH = 30
_REDRAW_SECONDS = 0.1


class Bar:
    """One line on stderr, redrawn in place on a terminal; elsewhere one line for each phase."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._phase = ""
        self._drawn = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        begins = what != self._phase
        if begins:
            self.end()
        ends = 0 < total <= done
        if not begins and (not self._live or (time.monotonic() - self._drawn < _REDRAW_SECONDS and not ends)):
            return
        self._phase, self._drawn = what, time.monotonic()
        sys.stderr.write(f"\r\033[K{self._text(what, done, total)}" if self._live else f"{what} ...\n")
        sys.stderr.flush()

    def _text(self, what: str, done: int, total: int) -> str:
        if what == "wait":
            return "waiting for another process that makes the same folder"
        if what == "unpack":
            return "unpack"
        if total == 0:
            return f"{what:10} {done / 1e6:.1f} MB"
        filled = _WIDTH * done // total
        return f"{what:10} [{'#' * filled}{' ' * (_WIDTH - filled)}] {done / 1e6:.1f} of {total / 1e6:.1f} MB"

    def end(self) -> None:
        """Leaves the line."""
        if self._live and self._phase:
            sys.stderr.write("\n")
        self._phase = ""


def main() -> int:
    """The exit status: 0, or 1 after one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="an embedded model's name, a model folder, a .gguf file, or `list`")
    parser.add_argument("--cache-dir", type=Path, help="default: deepinfer/models in XDG_CACHE_HOME or ~/.cache")
    arguments = parser.parse_args()
    if arguments.model == "list":
        for name, model in embedded.MODELS.items():
            default = " (default)" if name == embedded.DEFAULT else ""
            print(f"{name}{default}: {', '.join(requirement for requirement, _ in model.parts)}")
        return 0
    cache_dir = arguments.cache_dir or folder.default_cache_dir(os.environ, Path.home())
    bar = Bar()
    try:
        found = folder.resolve(arguments.model, cache_dir.expanduser().absolute(), bar)
    except ValueError as error:
        bar.end()
        print(f"get_model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        bar.end()
        return 130
    bar.end()
    print(found.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
