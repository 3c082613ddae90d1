"""Block keys: the chained SHA-256 names of blocks, equal in every process and at every start."""

from __future__ import annotations

import hashlib
import hmac

KEY_BYTES = 32


def root_key(secret: bytes, model_digest: str, cache_format: str, tenant: str) -> bytes:
    """HMAC-SHA-256 of (model digest, cache format, tenant) under the server's secret: 32 bytes.

    Fields are length-prefixed, so no two different triples give the same bytes.
    """
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for field in (model_digest, cache_format, tenant):
        raw = field.encode()
        mac.update(len(raw).to_bytes(4, "little") + raw)
    return mac.digest()


def block_keys(parent: bytes, ids: bytes | memoryview, block_tokens: int, key_bits: int = 256) -> list[bytes]:
    """Keys of all full blocks of `ids` (int32 little-endian): key[i] = SHA-256(key[i-1] + ids of block i).

    `parent` is the root, or the key of the block before. `key_bits` < 256 is a test hook: only that many bits
    of each key differ from zero, so that collisions are frequent.
    """
    ids = memoryview(ids).cast("B")
    step = 4 * block_tokens
    keys = []
    for start in range(0, len(ids) - step + 1, step):
        digest = hashlib.sha256(parent)
        digest.update(ids[start : start + step])
        parent = digest.digest()
        if key_bits < 256:
            value = int.from_bytes(parent, "little") & ((1 << key_bits) - 1)
            parent = value.to_bytes(KEY_BYTES, "little")
        keys.append(parent)
    return keys
