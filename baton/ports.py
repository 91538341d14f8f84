"""Whether a TCP port of this machine can be listened on. Does not wait; any thread."""

from __future__ import annotations

import socket

from baton.errors import ClusterError


def check_free(port: int) -> None:
    """Raises: ClusterError when something listens on 127.0.0.1:port already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port in TIME_WAIT counts as free, one that is listened on does not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ClusterError(
                f"port {port} cannot be used ({error.strerror}); stop what listens there, or "
                "choose another with --port (0 takes a free one)"
            ) from None
