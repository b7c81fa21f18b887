#include "exchange/mailbox.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace shardline {
namespace {

constexpr size_t kLine = 128;
constexpr int64_t kLengthBytes = 8;  // the length before each message

}  // namespace

struct Mailbox::Header {
  alignas(kLine) std::atomic<uint64_t> shape;
  alignas(kLine) std::atomic<uint64_t> written;  // total bytes; only the sender changes it
  alignas(kLine) std::atomic<uint64_t> taken;    // total bytes; only the receiver changes it
  alignas(kLine) WaitCell cell;
};

size_t Mailbox::required_bytes(size_t capacity) { return sizeof(Header) + (capacity + 63) / 64 * 64; }

Mailbox::Mailbox(void* memory, size_t num_bytes, int spin_iterations) : spin_(spin_iterations) {
  if (num_bytes < required_bytes(64)) throw std::invalid_argument("the buffer is too small for a mailbox");
  if (reinterpret_cast<uintptr_t>(memory) % 64 != 0) throw std::invalid_argument("the buffer must be 64-byte aligned");
  header_ = static_cast<Header*>(memory);
  cell_ = &header_->cell;
  ring_ = static_cast<char*>(memory) + sizeof(Header);
  capacity_ = static_cast<int64_t>((num_bytes - sizeof(Header)) / 64 * 64);
  uint64_t found = 0;
  const uint64_t shape = static_cast<uint64_t>(capacity_);
  if (!header_->shape.compare_exchange_strong(found, shape) && found != shape) {
    throw std::invalid_argument("the buffer holds a mailbox of another capacity, or was not zero-filled");
  }
}

WaitLimits Mailbox::limits(double timeout_s, bool (*interrupted)()) {
  return {deadline_after(timeout_s), &spin_, interrupted};
}

// A wait that ends inside a message leaves half of the message in the ring, so nobody may use the mailbox any more.
WaitStatus Mailbox::broken(WaitStatus status) {
  if (status != WaitStatus::kAborted) abort();
  return status;
}

WaitStatus Mailbox::write(const char* from, int64_t num_bytes, const WaitLimits& limits, bool started) {
  uint64_t written = header_->written.load();
  while (num_bytes > 0) {
    const auto room = [&] { return capacity_ - static_cast<int64_t>(written - header_->taken.load()); };
    // The length is written whole or not at all, so that a send that found no room can be tried again.
    const int64_t needed = started ? 1 : num_bytes;
    const WaitStatus status = wait_until(cell_, limits, [&] { return room() >= needed; });
    if (status != WaitStatus::kDone) return started ? broken(status) : status;
    const int64_t place = static_cast<int64_t>(written % static_cast<uint64_t>(capacity_));
    const int64_t run = std::min({num_bytes, room(), capacity_ - place});
    std::memcpy(ring_ + place, from, static_cast<size_t>(run));
    from += run;
    num_bytes -= run;
    written += static_cast<uint64_t>(run);
    started = true;
    header_->written.store(written);
    notify(cell_);
  }
  return WaitStatus::kDone;
}

void Mailbox::copy_out(uint64_t position, char* to, int64_t num_bytes) const {
  const int64_t place = static_cast<int64_t>(position % static_cast<uint64_t>(capacity_));
  const int64_t run = std::min(num_bytes, capacity_ - place);
  std::memcpy(to, ring_ + place, static_cast<size_t>(run));
  std::memcpy(to + run, ring_, static_cast<size_t>(num_bytes - run));
}

WaitStatus Mailbox::read(char* to, int64_t num_bytes, const WaitLimits& limits) {
  uint64_t taken = header_->taken.load();
  while (num_bytes > 0) {
    const auto available = [&] { return static_cast<int64_t>(header_->written.load() - taken); };
    const WaitStatus status = wait_until(cell_, limits, [&] { return available() > 0; });
    if (status != WaitStatus::kDone) return broken(status);
    const int64_t run = std::min(num_bytes, available());
    copy_out(taken, to, run);
    to += run;
    num_bytes -= run;
    taken += static_cast<uint64_t>(run);
    header_->taken.store(taken);
    notify(cell_);
  }
  return WaitStatus::kDone;
}

WaitStatus Mailbox::send(const void* data, int64_t num_bytes, double timeout_s, bool (*interrupted)()) {
  const WaitLimits limits = this->limits(timeout_s, interrupted);
  char length[kLengthBytes];
  std::memcpy(length, &num_bytes, sizeof length);
  const WaitStatus status = write(length, kLengthBytes, limits, false);
  return status == WaitStatus::kDone ? write(static_cast<const char*>(data), num_bytes, limits, true) : status;
}

bool Mailbox::ready() const {
  return static_cast<int64_t>(header_->written.load() - header_->taken.load()) >= kLengthBytes;
}

WaitStatus Mailbox::peek(int64_t* num_bytes, double timeout_s, bool (*interrupted)()) {
  const WaitStatus status = wait_until(cell_, limits(timeout_s, interrupted), [&] { return ready(); });
  if (status == WaitStatus::kDone) copy_out(header_->taken.load(), reinterpret_cast<char*>(num_bytes), kLengthBytes);
  return status;
}

WaitStatus Mailbox::receive(void* out, int64_t num_bytes, double timeout_s, bool (*interrupted)()) {
  const WaitLimits limits = this->limits(timeout_s, interrupted);
  char length[kLengthBytes];
  const WaitStatus status = read(length, kLengthBytes, limits);
  return status == WaitStatus::kDone ? read(static_cast<char*>(out), num_bytes, limits) : status;
}

}  // namespace shardline
