"""Line: whole messages over a socket between two processes of one machine."""

import socket
import struct

_LENGTH = struct.Struct("<I")


class Line:
    """One end of a connection.

    Args:
        end: A connected stream socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._file = end.makefile("rb")

    def send(self, message: bytes) -> None:
        """Write a message; waits only where the other end is far behind.

        Raises:
            OSError: If the other end is gone.
        """
        self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """Wait for a message and return it; ``None``: the other end is gone."""
        head = self._file.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        message = self._file.read(length)
        return message if len(message) == length else None

    def close(self) -> None:
        """Close this end."""
        self._file.close()
        self._socket.close()
