"""Starts the service: `python launch.py`. `python launch.py --help` is the reference of all options."""

from __future__ import annotations

import sys

from launcher.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
