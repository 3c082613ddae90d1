"""Loading a model whose weights stay as they were stored, so that a test can look at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine_proc.models.linear import Linear


@contextmanager
def unpacked() -> Iterator[None]:
    """Within it, `finish` lays no weight out anew: `destinations` stay valid."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "pack", lambda self, share=False: None)
        yield
