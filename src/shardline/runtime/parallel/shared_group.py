"""Synchronisation and data exchange between ranks of one host, through shared memory.

The memory must be zero-filled and 64-byte aligned: POSIX shared memory mapped by several processes, or any writable
buffer if the ranks are threads of one process. Waiters spin for a while, then sleep in the kernel; the GIL is released,
and Ctrl-C is noticed within 100 ms. After a TimeoutError the ranks are out of step: abort the group and build another.

`SharedGroup(buffer, rank, size, spin_iterations=None)`: barrier, all_gather_columns, all_gather_quantized,
all_gather_rows, all_to_all_rows, all_reduce_sum, abort, arrived. Rank -1 is an observer: it may read the state and
abort, but it takes no part in exchanges. A TimeoutError has the attribute `missing_ranks`.

`Mailbox(buffer, spin_iterations=None)`: send, recv, recv_into, next_size, ready, abort; one sender and one receiver;
messages of any length arrive in order. A send or receive that times out before it moves a byte may be tried again. A
time-out inside a message aborts the mailbox.
"""

from __future__ import annotations

from shardline._cpu import CollectiveAborted, Mailbox, SharedGroup

__all__ = ["CollectiveAborted", "Mailbox", "SharedGroup"]
