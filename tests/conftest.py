"""Shared by all tests: services for the default flags, the check after each test, and what runs by default."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.pipeline.harness import LIVE, Service

settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), max_examples=40
)
settings.load_profile("suite")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without -m: the acceptance counts and what needs a CUDA device are left out."""
    if config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("long") or item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service with the default flags, the mock engine and test hooks, for the whole session."""
    found = Service(tmp_path_factory.mktemp("shared")).wait_ready()
    yield found
    found.stop()


@pytest.fixture
def server(shared_service: Service) -> Service:
    """The session's default service, alive."""
    assert shared_service.process.poll() is None, shared_service.log()[-3000:]
    return shared_service


@pytest.fixture(autouse=True)
def idle_after_each_test() -> Iterator[None]:
    """After each test the idle invariant holds in every service that still runs."""
    yield
    for running in list(LIVE):
        if running.process.poll() is None:
            running.idle()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fresh folder for a service of the test's own."""
    return tmp_path / "service"
