"""Encrypts the frames of a connection between hosts; `handshake.py` agrees on its key."""

from __future__ import annotations

import struct

SEAL_BYTES = 16
"""Bytes that a seal adds to a frame."""


class Seal:
    """AES-256-GCM over numbered frames, so a frame that is altered, repeated, missing or out of order is noticed.

    Each direction has its own count. A key is good for one connection, because numbers begin at 0.
    """

    _NONCE = struct.Struct("<IQ")

    def __init__(self, key: bytes, *, is_listener: bool) -> None:
        """`key`: 32 bytes. `is_listener`: whether this is the end that accepted the connection."""
        # Processes of one host need no seals, and the import takes memory and time.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        assert len(key) == 32
        self._cipher = AESGCM(key)
        self._invalid = InvalidTag
        self._own, self._other = int(is_listener), int(not is_listener)
        self._sealed = self._opened = 0

    def seal(self, body: bytes) -> bytes:
        """The next frame to send."""
        nonce = self._NONCE.pack(self._own, self._sealed)
        self._sealed += 1
        return self._cipher.encrypt(nonce, body, None)

    def open(self, frame: bytes | bytearray) -> bytes:
        """The body of the next frame that has come.

        Raises:
            EOFError: it is not the frame that the other end has sent as its next one.
        """
        nonce = self._NONCE.pack(self._other, self._opened)
        self._opened += 1
        try:
            return self._cipher.decrypt(nonce, frame, None)
        except self._invalid:
            raise EOFError("a frame was altered on its way, or is not the next one") from None
