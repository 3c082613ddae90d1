"""Imports go one way: a process imports `wire` and never another process, and who needs no torch cannot get it.

Found by parsing every module, so an import inside a function counts as well as one at the top.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "api",
    "engine_proc",
    "frontend",
    "hicache",
    "kvnet",
    "launcher",
    "router_proc",
    "tokenizer_proc",
    "wire",
)
# What the modules of each package may import of ours, besides their own package. A dotted name allows that module
# and what lies below it.
ALLOWED: dict[str, set[str]] = {
    "wire": set(),
    "api": {"wire"},
    "frontend": {"wire", "api"},
    "tokenizer_proc": {"wire", "api"},
    "router_proc": {"wire", "api.errors"},  # the one table of failure codes
    "hicache": set(),
    "kvnet": set(),
    "engine_proc": {"wire", "hicache", "kvnet"},
    "launcher": {
        "wire",
        "engine_proc.checkpoint",
        "engine_proc.config",
        "frontend.config",
        "router_proc.config",
        "tokenizer_proc.config",
    },
    "launch": {"launcher"},
    "serve": {"engine_proc.checkpoint", "wire"},
}
# Modules that run in processes without torch, or on the control side of the engine, and all they import of ours.
NO_TORCH = (
    "launch",
    "frontend.main",
    "router_proc.main",
    "tokenizer_proc.main",
    "engine_proc.mock_main",
    "engine_proc.plan",
    "engine_proc.scheduler",
    "engine_proc.blocks",
    "engine_proc.sequence",
)
TENSORS = {"torch", "triton", "flashinfer"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    """Module name -> file, of everything that is shipped."""
    found = [ROOT / "launch.py", *(ROOT / "serve").glob("*.py")]
    for package in PACKAGES:
        found += (ROOT / package).rglob("*.py")
    return {module_name(path): path for path in found}


SOURCES = sources()


def imported_by(name: str) -> set[str]:
    """Full names of what one module imports; of `from a import b` both `a` and, when it is a module, `a.b`."""
    return _imports(ast.parse(SOURCES[name].read_text()), name)


def _imports(tree: ast.AST, name: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively in line {node.lineno}"
            assert node.module
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}.{alias.name}" in SOURCES}
    return found


def top(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_imports_go_one_way(name: str) -> None:
    ours = {module for module in imported_by(name) if top(module) in {*PACKAGES, "tests", "bench", "serve", "launch"}}
    allowed = ALLOWED[top(name)]
    for module in ours:
        if top(module) == top(name):
            continue
        assert any(module == each or module.startswith(f"{each}.") for each in allowed), f"{name} imports {module}"


def test_every_package_has_its_rule() -> None:
    """A new top-level package must say here what it may import."""
    with_init = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert with_init - {"tests", "bench"} <= set(ALLOWED)
    assert {top(name) for name in SOURCES} <= set(ALLOWED)


@pytest.mark.parametrize("start", NO_TORCH)
def test_no_way_leads_to_torch(start: str) -> None:
    """Follow all imports of ours from a module that must not need a tensor library; lazy ones count too."""
    assert start in SOURCES, f"{start} is not there"
    way: dict[str, str] = {start: start}
    todo = [start]
    while todo:
        name = todo.pop()
        for module in imported_by(name) | set(parents(name)):
            assert top(module) not in TENSORS, f"{way[name]} -> {module}"
            if module in SOURCES and module not in way:
                way[module] = f"{way[name]} -> {module}"
                todo.append(module)


def parents(name: str) -> list[str]:
    """Packages that are imported together with a module."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def test_the_launcher_really_starts_without_torch() -> None:
    """What the parsing above cannot see: third-party modules that import torch themselves."""
    program = "import sys, launcher.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0


def test_a_forbidden_import_is_found() -> None:
    """The finder sees all forms of import, also inside functions."""
    text = "import torch.nn\ndef f():\n    from router_proc import config\n    import os as x\n"
    assert {"torch.nn", "router_proc", "router_proc.config", "os"} <= _imports(ast.parse(text), "example")
