// Messages from one sender to one receiver, in order, through a ring of bytes in shared memory. A message longer than
// the ring streams through it. Two processes may map the memory, or two threads may share it. It must start filled with
// zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/wait.h"

namespace shardline {

class Mailbox {
 public:
  static size_t required_bytes(size_t capacity);

  Mailbox(void* memory, size_t num_bytes, int spin_iterations);

  WaitStatus send(const void* data, int64_t num_bytes, double timeout_s, bool (*interrupted)());
  // Waits for a message and returns its length, without taking the message.
  WaitStatus peek(int64_t* num_bytes, double timeout_s, bool (*interrupted)());
  // Takes the message that peek() announced; `out` must have room for its length.
  WaitStatus receive(void* out, int64_t num_bytes, double timeout_s, bool (*interrupted)());

  void abort() { abort_waiters(cell_, -1); }
  bool ready() const;
  int64_t capacity() const { return capacity_; }

 private:
  struct Header;

  WaitLimits limits(double timeout_s, bool (*interrupted)());
  WaitStatus write(const char* from, int64_t num_bytes, const WaitLimits& limits, bool started);
  WaitStatus read(char* to, int64_t num_bytes, const WaitLimits& limits);
  void copy_out(uint64_t position, char* to, int64_t num_bytes) const;
  WaitStatus broken(WaitStatus status);

  Header* header_;
  WaitCell* cell_;
  char* ring_;
  int64_t capacity_;
  Spin spin_;
};

}  // namespace shardline
