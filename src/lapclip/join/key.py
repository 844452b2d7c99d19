"""The key that a host shows and guests type. It signs messages and never travels."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets

from lapclip.errors import JoinError

KEY_LETTERS = 16  # of five bits each: too many to guess, even for somebody who listens


def new_key() -> str:
    """Return a key for one session of a host, so that recorded requests are useless in the next."""
    return base64.b32encode(secrets.token_bytes(KEY_LETTERS * 5 // 8)).decode()


def format_key(key: str) -> str:
    """Return a key in groups of four letters."""
    return " ".join(re.findall("....", key))


def parse_key(text: str) -> str:
    """Return the key in what somebody typed, with or without spaces, in small or large letters."""
    key = re.sub(r"[\s-]", "", text).upper()
    if not re.fullmatch(rf"[A-Z2-7]{{{KEY_LETTERS}}}", key):
        raise JoinError(
            f"This is not a key. A key has {KEY_LETTERS} letters and digits.",
            hint="the key that the host shows",
        )
    return key


def sign(key: str, purpose: str, *parts: str | bytes) -> str:
    """Return an HMAC of a message for one purpose. Each part counts with its length."""
    secret = hashlib.sha256(f"lapclip {purpose} {key}".encode()).digest()
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        content = part.encode("utf-8", "replace") if isinstance(part, str) else part
        mac.update(len(content).to_bytes(8, "big") + content)
    return mac.hexdigest()


def is_signed(signature: str, key: str, purpose: str, *parts: str | bytes) -> bool:
    """Return whether a signature is the one that `sign` returns."""
    expected = sign(key, purpose, *parts)
    return hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace"))
