"""Synchronisation and data exchange between ranks, as `shardline._cpu` offers it.

Waiters spin for a while, then sleep in the kernel; the GIL is released, and Ctrl-C is noticed within 100 ms. After any
failure the ranks are out of step, so make new groups and links.

A `Group` has barrier, all_gather_columns, all_gather_quantized, all_gather_rows, all_to_all_rows, all_reduce_sum and
abort. A TimeoutError has the attribute `missing_ranks`, and after an abort exchanges raise CollectiveAborted.

- `SharedGroup(buffer, rank, size)` is for ranks of one host. The memory must be zero-filled and 64-byte aligned: POSIX
  shared memory mapped by several processes, or any writable buffer if the ranks are threads of one process. Rank -1 is
  an observer: it may read the state (`arrived`) and abort, but it takes no part in exchanges.
- `SocketGroup(fds, rank, names)` is for ranks of several hosts. It takes over one connected TCP socket per other rank
  (`rendezvous.py` makes them). A peer that ends raises a ConnectionError that names it.

A link has one sender and one receiver. Messages arrive in order.

- `Mailbox(buffer)`: send, recv, recv_into, next_size, ready, abort, for messages of any length. A send or receive that
  times out before it moves a byte may be tried again. A time-out inside a message aborts the mailbox.
- `SocketLink(fd, name)`: send, recv_into, abort. The receiver knows the length of each message.
"""

from __future__ import annotations

from shardline._cpu import CollectiveAborted, Group, Mailbox, SharedGroup, SocketGroup, SocketLink

__all__ = ["CollectiveAborted", "Group", "Mailbox", "SharedGroup", "SocketGroup", "SocketLink"]
