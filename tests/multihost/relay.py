"""Carry packets between hosts with a rate, a delay and a loss: ``python relay.py RATE DELAY LOSS ADDRESS=PID ...``.

RATE is in bits/s, DELAY in seconds and LOSS a probability. The relay makes an interface ``eth0`` in the network
namespace of each process, prints a line when all are made, and runs until its standard input ends. It needs nothing of
the kernel but TUN devices: ``tc netem`` would do the work too, but many kernels are built without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import math
import os
import random
import select
import socket
import struct
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_DESTINATION = slice(16, 20)  # of the header of an IPv4 packet


def open_interface(pid: int) -> int:
    """Make ``eth0`` in the network namespace of a process, and return the file that holds its packets."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to process {pid}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    return file


def relay(files: dict[bytes, int], rate: float, delay: float, loss: float) -> None:
    """Move packets until standard input ends. A sender's packets queue without limit while its line is busy."""
    line_is_free = dict.fromkeys(files.values(), 0.0)
    queue: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        timeout = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready, _, _ = select.select([sys.stdin, *line_is_free], [], [], timeout)
        if sys.stdin in ready:
            return
        for sender in [each for each in line_is_free if each in ready]:
            try:
                packet = os.read(sender, 1 << 16)
            except OSError:  # the host is gone
                del line_is_free[sender]
                continue
            receiver = files.get(packet[_DESTINATION])
            if receiver is None or random.random() < loss:
                continue
            line_is_free[sender] = max(line_is_free[sender], time.monotonic()) + 8 * len(packet) / rate
            count += 1  # packets that are due at one time leave in their order
            heapq.heappush(queue, (line_is_free[sender] + delay, count, receiver, packet))
        while queue and queue[0][0] <= time.monotonic():
            _, _, receiver, packet = heapq.heappop(queue)
            with contextlib.suppress(OSError):  # its interface is down
                os.write(receiver, packet)


def main() -> None:
    """Make the interfaces and relay."""
    rate, delay, loss = (float(word) for word in sys.argv[1:4])
    pairs = [word.split("=") for word in sys.argv[4:]]
    files = {socket.inet_aton(address): open_interface(int(pid)) for address, pid in pairs}
    print("ready", flush=True)
    relay(files, rate or math.inf, delay, loss)


if __name__ == "__main__":
    main()
