"""Synchronisation and hand-off between ranks of one host, through memory that they share.

The memory must be zero-filled and 64-byte aligned: POSIX shared memory mapped by several processes, or any writable
buffer if the ranks are threads of one process. Waiters spin for a while, then sleep in the kernel; the GIL is released,
and Ctrl-C is noticed within 100 ms. After a TimeoutError the ranks are out of step: abort the group and build another.

`SharedGroup(buffer, rank, size, spin_iterations=None)`: barrier, all_gather_columns, all_gather_quantized,
all_gather_rows, all_to_all_rows, all_reduce_sum, abort, arrived. Rank -1 observes: it may look and abort, but takes no
part. A TimeoutError has `missing_ranks`.

`Mailbox(buffer, spin_iterations=None)`: send, recv, recv_into, next_size, ready, abort; one sender, one receiver, in
order, any length. A send or receive that finds nothing to do in time may be tried again; one that stops inside a
message aborts the mailbox.
"""

from __future__ import annotations

from shardline._cpu import CollectiveAborted, Mailbox, SharedGroup

__all__ = ["CollectiveAborted", "Mailbox", "SharedGroup"]
