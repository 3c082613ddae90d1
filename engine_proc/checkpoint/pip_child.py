"""Becomes `python -m pip ARGUMENTS`, which ends when the process that started it ends. Run as a file."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """First argument: the parent's process id. The others go to pip. The wish to die with it survives the exec."""
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it died before the wish was heard
    os.execv(sys.executable, [sys.executable, "-m", "pip", *sys.argv[2:]])


if __name__ == "__main__":
    main()
