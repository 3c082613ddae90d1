"""API keys and secrets from options and files, checked; no error names a key."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from launcher.flags import Flags

SECRET_BYTES = 32
LEAST_SECRET_BYTES = 16
MOST_BYTES = 4 << 20
KEY = re.compile(r"[\x21-\x7e]{1,512}")
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY_TENANT = "default"  # of keys given with --api-key
KEY_RULE = "1 to 512 printable ASCII characters without spaces"


def api_keys(flags: Flags) -> dict[str, str]:
    """Key -> tenant; empty means that the service is open. ValueError names the option, the line and the syntax."""
    found: dict[str, str] = {}
    for key in flags.api_key:
        if not KEY.fullmatch(key):
            raise ValueError(f"argument --api-key: a key is {KEY_RULE}")
        found[key] = KEY_TENANT
    if flags.api_key_file is not None:
        lines = _read("--api-key-file", flags.api_key_file).decode("utf-8", "replace").splitlines()
        before = len(found)
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.startswith("#"):
                _add_line(found, line.strip(), f"--api-key-file {flags.api_key_file} line {number}")
        if len(found) == before:
            raise ValueError(f"--api-key-file {flags.api_key_file} holds no key; a line is `tenant:key`")
    return found


def _add_line(found: dict[str, str], line: str, place: str) -> None:
    tenant, colon, key = line.partition(":")
    if not colon or not TENANT.fullmatch(tenant) or not KEY.fullmatch(key):
        raise ValueError(f"{place}: not `tenant:key` (tenant: 1 to 64 of A-Z a-z 0-9 . _ -; key: {KEY_RULE})")
    if key in found:
        raise ValueError(f"{place}: this key was given before; each key belongs to one tenant")
    found[key] = tenant


def cache_secret(flags: Flags) -> bytes:
    """What block keys are made with: the cluster's secret, or a random one of this start."""
    if flags.cluster_secret_file is None:
        return secrets.token_bytes(SECRET_BYTES)
    found = _read("--cluster-secret-file", flags.cluster_secret_file).strip()
    if len(found) < LEAST_SECRET_BYTES:
        raise ValueError(
            f"--cluster-secret-file {flags.cluster_secret_file} holds {len(found)} bytes; a secret has at least "
            f"{LEAST_SECRET_BYTES}, better the {SECRET_BYTES} of `openssl rand -hex {SECRET_BYTES // 2}`"
        )
    return found


def readable_by_others(path: Path) -> bool:
    """Whether other users of this machine may read a file of secrets."""
    return bool(path.stat().st_mode & 0o077)


def _read(option: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror or error}") from None
    if len(found) > MOST_BYTES:
        raise ValueError(f"{option} {path} is larger than {MOST_BYTES} bytes")
    return found
