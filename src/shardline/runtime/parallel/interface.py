"""The network interface that has an address; gloo and NCCL are told interfaces, not addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """The name of the interface of this host whose first address is `address`.

    Raises:
        ValueError: there is none.
    """
    wanted = ipaddress.ip_address(address)
    found = _ipv4_interfaces() if wanted.version == 4 else _ipv6_interfaces()
    if wanted not in found:
        raise ValueError(
            f"{address} is not the first address of any interface of this host; set GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME to the interface that joins the nodes, or SHARDLINE_HOST_IP to its first address"
        )
    return found[wanted]


def _ipv4_interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            found[ipaddress.IPv4Address(answer[20:24])] = name
    return found


def _ipv6_interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    rows = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
    return {ipaddress.IPv6Address(bytes.fromhex(row[0])): row[5] for row in rows}
