"""Bytes that a process has sent over its TCP sockets, as the kernel counts them."""

import os
import socket
import struct

BYTES_ACKED = 120  # place of tcpi_bytes_acked, u64, in the kernel's struct tcp_info


def sent_bytes() -> int:
    """Bytes that other processes have received over the open sockets of this one, without headers
    of TCP."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and os.readlink(path).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if (
                    copy.family in (socket.AF_INET, socket.AF_INET6)
                    and copy.type == socket.SOCK_STREAM
                ):
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, BYTES_ACKED)[0]
    return total
