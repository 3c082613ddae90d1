"""The law (behaviour 84): nothing in the source can turn received bytes into code; (65) no key is a built-in hash."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {".venv", ".git", "tests", "build", "dist"}
SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if not OUTSIDE & set(path.relative_to(ROOT).parts)]
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__", "hash"}


def faults(source: str) -> list[str]:
    """What a source file must not hold."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module and node.module.partition(".")[0] in MODULES else []
        elif isinstance(node, ast.Attribute) and node.attr.endswith("_pyobj"):
            found.append(node.attr)
        elif isinstance(node, ast.Call):
            found += _call_faults(node)
    return found


def _call_faults(node: ast.Call) -> list[str]:
    called = ast.unparse(node.func)
    words = {word.arg: ast.unparse(word.value) for word in node.keywords}
    found = [called] if called in CALLS or called.removeprefix("builtins.") in CALLS else []
    if words.get("allow_pickle", "False") != "False":
        found.append("allow_pickle")
    if called == "torch.load" and words.get("weights_only") != "True":
        found.append("torch.load without weights_only=True")
    if words.get("shell", "False") != "False":
        found.append("shell")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_84_no_source_loads_code_from_data(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import dill.source",
        "from marshal import loads",
        "socket.recv_pyobj()",
        "x = socket.send_pyobj",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "eval('1')",
        "builtins.exec(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "key = hash(ids)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_the_scan_finds(source: str) -> None:
    assert faults(source)


def test_the_scan_lets_pass() -> None:
    assert not faults("import re\nre.compile('a')\ntorch.load(f, weights_only=True)\nnp.load(f, allow_pickle=False)")
    assert len(SOURCES) > 20
