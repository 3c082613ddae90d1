"""The engine process for models in PyTorch: `python -m engine_proc.main`, started by the launcher."""

from __future__ import annotations

from engine_proc import assembly
from engine_proc.assembly import Loaded
from engine_proc.config import EngineConfig
from wire.child import Child


def load(child: Child, config: EngineConfig) -> Loaded:
    """See `torch_engine.load`."""
    # PyTorch takes seconds to import: the process knows its launcher, and is known to the router, before that.
    child.phase("importing PyTorch")
    from engine_proc import torch_engine  # noqa: PLC0415  as said

    return torch_engine.load(child, config)


if __name__ == "__main__":
    assembly.run(Child.start(), load)
