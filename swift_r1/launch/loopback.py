"""How the ranks of one machine find each other: by a store that listens on the loopback address alone.

torch's own store listens on all addresses of a machine, without a key, and its `c10d` rendezvous unpickles what is in
there: whoever reaches the port could run code.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not exported to mypy
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

BACKEND = "swift-r1-loopback"
_HOST = "127.0.0.1"


def loopback_store(timeout: timedelta) -> TCPStore:
    """Makes a store with a port that the system picks."""
    with socket.create_server((_HOST, 0)) as listener:
        port = listener.getsockname()[1]
        more: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
        return TCPStore(
            _HOST, port, None, timeout=timeout, master_listen_fd=listener.detach(), **more
        )


class Loopback(StaticTCPRendezvous):
    """All workers are of this process, which has the store."""

    def __init__(self, run_id: str, timeout_s: int) -> None:
        store = loopback_store(timedelta(seconds=timeout_s))
        super().__init__(_HOST, store.port, 0, 1, run_id, timeout_s)
        self._store = store

    def get_backend(self) -> str:
        return BACKEND


def _handler(params: RendezvousParameters) -> RendezvousHandler:
    return Loopback(params.run_id, int(params.get("timeout")))


def register() -> None:
    """Makes this the `rdzv_backend=BACKEND` of torch's launcher."""
    rendezvous_handler_registry.register(BACKEND, _handler)
