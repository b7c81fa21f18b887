// Signs of life that another process reads from shared memory.
#pragma once

#include <cstdint>

namespace shardline {

// Counts a piece of finished work. The thread pool counts every round; GPU ranks count launches.
void note_work();

// Maps the page behind `fd` and writes to it, from a thread of its own until the process ends, every 100 ms: how often
// it did so (word 0) and the work that has been counted (word 1). No lock of Python can delay it.
void start_pulse(int fd);

}  // namespace shardline
