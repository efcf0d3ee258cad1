"""A network between a browser and a server that a test can cut and mend."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

PIECE_BYTES = 2**16


class Network:
    """Owns a port that leads to a server's, and the connections over it. url: the server's, as seen from this side."""

    def __init__(self, server_url: str) -> None:
        target = urlsplit(server_url)
        self._target = (target.hostname, target.port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._is_cut = threading.Event()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="network", daemon=True).start()

    def cut(self) -> None:
        """Every connection breaks off, and no new one comes about."""
        self._is_cut.set()
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut.clear()

    def close(self) -> None:
        self.cut()
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                if self._is_cut.is_set():
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                with self._lock:
                    self._open |= {near, far}
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), name="network", daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        """Until one of the two ends."""
        with suppress(OSError):
            while piece := one.recv(PIECE_BYTES):
                other.sendall(piece)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def network(server_url: str) -> Iterator[Network]:
    between = Network(server_url)
    try:
        yield between
    finally:
        between.close()
