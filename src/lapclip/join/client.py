"""Client of a guest: signed requests to its host, and checked answers."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from lapclip.errors import JoinError, NoAnswer, WrongKey, first_line
from lapclip.http import Answer, RequestFailed, post, server_url
from lapclip.join.key import is_signed, sign
from lapclip.join.server import ANSWER, NONCE, REQUEST, SIGNATURE, TIMEOUT_SECONDS
from lapclip.paths import parse_json

MAX_BYTES = 16 * 2**20  # of an answer


class HostClient:
    """A host, as a guest reaches it."""

    def __init__(self, address: str, port: int, key: str) -> None:
        self.address, self.port, self.key = address, port, key
        self.place = f"{address}:{port}"

    def get_json(self, path: str) -> dict[str, Any]:
        """Return an answer in JSON."""
        try:
            message = parse_json(self.request(path).decode())
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise JoinError(f"{self.place} sent an answer that is not valid.")
        return message

    def read(self, number: int, first: int, last: int) -> bytes:
        """Return a range of a file."""
        return self.request(f"/files/{number}/{first}/{last}")

    def request(self, path: str) -> bytes:
        """Return the content of an answer whose sender knows the key."""
        nonce = secrets.token_hex(16)
        headers = {NONCE: nonce, SIGNATURE: sign(self.key, REQUEST, path, nonce)}
        try:
            answer = asyncio.run(self._post(path, headers))
        except (RequestFailed, TimeoutError) as error:
            reason = first_line(error).rstrip(".")
            raise NoAnswer(
                f"{self.place} does not answer: {reason}.",
                hint="the line that the host shows; a firewall there",
            ) from None
        if answer.status == 403:
            raise WrongKey(f"{self.place} has another key.", hint="the key that the host shows")
        signature = answer.headers.get(SIGNATURE, "")
        if answer.status != 200 or not is_signed(
            signature, self.key, ANSWER, nonce, answer.content
        ):
            raise JoinError(
                f"{self.place} is not the host, or has another version of lapclip.",
                hint="the line that the host shows; the same version on both",
            )
        return answer.content

    async def _post(self, path: str, headers: dict[str, str]) -> Answer:
        url = server_url(f"http://{self.place}{path}")
        assert url is not None
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await post(url, b"", headers, max_bytes=MAX_BYTES)
