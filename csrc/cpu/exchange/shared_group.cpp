#include "exchange/shared_group.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace shardline {
namespace {

constexpr size_t kLine = 128;  // two cache lines, since the hardware fetches adjacent ones together
constexpr size_t kPage = 4096;

}  // namespace

struct SharedGroup::Header {
  alignas(kLine) std::atomic<uint64_t> shape;  // size and data bytes, to detect a group of another shape
  alignas(kLine) WaitCell cell;
};

struct SharedGroup::RankLine {
  alignas(kLine) std::atomic<uint64_t> epoch;  // barriers that this rank has reached
  std::atomic<int64_t> announced_bytes[2];     // the size of its contribution, by the barrier's parity
};

size_t SharedGroup::required_bytes(int size, size_t data_bytes) {
  const size_t control = sizeof(Header) + static_cast<size_t>(size) * sizeof(RankLine);
  return (control + kPage - 1) / kPage * kPage + data_bytes;
}

SharedGroup::SharedGroup(void* memory, size_t num_bytes, int rank, int size, int spin_iterations)
    : Group(rank, size, spin_iterations) {
  if (size < 1 || rank < kObserver || rank >= size) throw std::invalid_argument("rank must be in [0, size), or -1");
  const size_t control = required_bytes(size, 0);
  const size_t smallest = control + 2 * static_cast<size_t>(size) * 64;
  if (num_bytes < smallest) {
    throw std::invalid_argument("a group of " + std::to_string(size) + " needs at least " + std::to_string(smallest) +
                                " bytes, the buffer has " + std::to_string(num_bytes));
  }
  if (reinterpret_cast<uintptr_t>(memory) % 64 != 0) throw std::invalid_argument("the buffer must be 64-byte aligned");
  header_ = static_cast<Header*>(memory);
  cell_ = &header_->cell;
  lines_ = reinterpret_cast<RankLine*>(header_ + 1);
  data_ = static_cast<char*>(memory) + control;
  slab_bytes_ = static_cast<int64_t>((num_bytes - control) / 2 / static_cast<size_t>(size) / 64 * 64);
  const uint64_t shape = static_cast<uint64_t>(slab_bytes_) << 16 | static_cast<uint64_t>(size);
  uint64_t found = 0;
  if (!header_->shape.compare_exchange_strong(found, shape) && found != shape) {
    throw std::invalid_argument("the buffer holds a group of another size, or was not zero-filled");
  }
  if (rank != kObserver) epoch_ = lines_[rank].epoch.load();
}

WaitStatus SharedGroup::arrive_and_wait(const WaitLimits& limits) {
  if (rank_ == kObserver) throw std::invalid_argument("an observer takes no part in collectives");
  const uint64_t goal = ++epoch_;
  lines_[rank_].epoch.store(goal);
  int next = 0;  // all ranks before this one have arrived
  const auto all_arrived = [&] {
    while (next < size_ && lines_[next].epoch.load() >= goal) ++next;
    return next == size_;
  };
  if (all_arrived()) {  // the last rank to arrive wakes the others
    notify(cell_);
    return cell_->aborted.load() != 0 ? WaitStatus::kAborted : WaitStatus::kDone;
  }
  return wait_until(cell_, limits, all_arrived);
}

WaitStatus SharedGroup::barrier(double timeout_s, bool (*interrupted)()) {
  return arrive_and_wait(limits(timeout_s, interrupted));
}

// The half of the data area that belongs to the next barrier.
char* SharedGroup::slab(int rank) const {
  const int64_t half = static_cast<int64_t>(epoch_ & 1);
  return data_ + (half * size_ + rank) * slab_bytes_;
}

void SharedGroup::announce(int64_t bytes) { lines_[rank_].announced_bytes[epoch_ & 1].store(bytes); }

void SharedGroup::check_announced(int rank, int64_t bytes) const {
  const int64_t announced = lines_[rank].announced_bytes[(epoch_ - 1) & 1].load();
  if (announced != bytes) {
    throw std::runtime_error("rank " + std::to_string(rank) + " brought " + std::to_string(announced) +
                             " bytes to a collective for which rank " + std::to_string(rank_) + " expected " +
                             std::to_string(bytes) + ": the ranks have diverged");
  }
}

WaitStatus SharedGroup::all_gather(const void* local, const std::vector<GatherPart>& parts, void* out, double timeout_s,
                                   bool (*interrupted)()) {
  const WaitLimits limits = this->limits(timeout_s, interrupted);
  int64_t longest = 0;
  for (const GatherPart& part : parts) longest = std::max(longest, part.total_bytes());
  const char* own = static_cast<const char*>(local);
  const int64_t own_bytes = rank_ == kObserver ? 0 : parts[static_cast<size_t>(rank_)].total_bytes();
  for (int64_t begin = 0; begin < longest || begin == 0; begin += slab_bytes_) {
    const int64_t own_end = std::min(own_bytes, begin + slab_bytes_);
    if (begin < own_end) std::memcpy(slab(rank_), own + begin, static_cast<size_t>(own_end - begin));
    announce(own_bytes);
    std::vector<const char*> slabs;
    for (int r = 0; r < size_; ++r) slabs.push_back(slab(r));
    const WaitStatus status = arrive_and_wait(limits);
    if (status != WaitStatus::kDone) return status;
    for (int r = 0; r < size_; ++r) {
      const GatherPart& part = parts[static_cast<size_t>(r)];
      check_announced(r, part.total_bytes());
      const int64_t end = std::min(part.total_bytes(), begin + slab_bytes_);
      const char* from = r == rank_ ? own + begin : slabs[static_cast<size_t>(r)];
      if (begin < end) scatter(from, begin, end, part, static_cast<char*>(out));
    }
  }
  return WaitStatus::kDone;
}

WaitStatus SharedGroup::gather_rows(const void* local, int64_t num_rows, const std::vector<int64_t>& row_bytes,
                                    const TakeRows& take, double timeout_s, bool (*interrupted)()) {
  const WaitLimits limits = this->limits(timeout_s, interrupted);
  const int64_t longest = *std::max_element(row_bytes.begin(), row_bytes.end());
  const int64_t room = longest == 0 ? num_rows : slab_bytes_ / longest;
  if (room == 0 && num_rows > 0) {
    throw std::invalid_argument("the group's memory has no room for a row of " + std::to_string(longest) + " bytes");
  }
  const int64_t own_bytes = row_bytes[static_cast<size_t>(rank_)];
  for (int64_t first = 0; first < num_rows || first == 0; first += std::max<int64_t>(room, 1)) {
    const int64_t count = std::min(room, num_rows - first);
    const char* own = static_cast<const char*>(local) + first * own_bytes;
    if (count * own_bytes > 0) std::memcpy(slab(rank_), own, static_cast<size_t>(count * own_bytes));
    announce(num_rows * own_bytes);
    std::vector<const char*> pieces;
    for (int r = 0; r < size_; ++r) pieces.push_back(r == rank_ ? own : slab(r));
    const WaitStatus status = arrive_and_wait(limits);
    if (status != WaitStatus::kDone) return status;
    for (int r = 0; r < size_; ++r) check_announced(r, num_rows * row_bytes[static_cast<size_t>(r)]);
    take(first, count, pieces);
  }
  return WaitStatus::kDone;
}

WaitStatus SharedGroup::all_to_all_rows(const void* local, const int64_t* counts, int64_t row_bytes, void* out,
                                        double timeout_s, bool (*interrupted)()) {
  const WaitLimits limits = this->limits(timeout_s, interrupted);
  // A rank's rows for itself stay where they are: from `start` on, `skipped` of its bytes are not sent.
  struct Stream {
    int64_t bytes = 0;    // sent
    int64_t mine = 0;     // where those for this rank start
    int64_t start = 0;    // where its rows for itself start
    int64_t skipped = 0;  // bytes for itself
  };
  std::vector<Stream> streams(static_cast<size_t>(size_));
  int64_t longest = 0;
  for (int from = 0; from < size_; ++from) {
    Stream& stream = streams[static_cast<size_t>(from)];
    for (int to = 0; to < size_; ++to) {
      const int64_t bytes = counts[from * size_ + to] * row_bytes;
      if (to == rank_) stream.mine = stream.bytes;
      if (to == from) stream.start = stream.bytes;
      (to == from ? stream.skipped : stream.bytes) += bytes;
    }
    longest = std::max(longest, stream.bytes);
  }
  const Stream& own = streams[static_cast<size_t>(rank_)];
  const char* rows = static_cast<const char*>(local);
  for (int64_t begin = 0; begin < longest || begin == 0; begin += slab_bytes_) {
    const int64_t own_end = std::min(own.bytes, begin + slab_bytes_);
    const int64_t before = std::max(begin, std::min(own_end, own.start));
    if (begin < before) std::memcpy(slab(rank_), rows + begin, static_cast<size_t>(before - begin));
    if (before < own_end) {
      std::memcpy(slab(rank_) + (before - begin), rows + before + own.skipped, static_cast<size_t>(own_end - before));
    }
    announce(own.bytes);
    std::vector<const char*> slabs;
    for (int r = 0; r < size_; ++r) slabs.push_back(slab(r));
    const WaitStatus status = arrive_and_wait(limits);
    if (status != WaitStatus::kDone) return status;
    char* to = static_cast<char*>(out);
    for (int from = 0; from < size_; ++from) {
      const Stream& stream = streams[static_cast<size_t>(from)];
      const int64_t bytes = counts[from * size_ + rank_] * row_bytes;
      check_announced(from, stream.bytes);
      if (from == rank_) {
        if (begin == 0 && bytes > 0) std::memcpy(to, rows + own.start, static_cast<size_t>(bytes));
      } else {
        const int64_t first = std::max(begin, stream.mine), last = std::min(begin + slab_bytes_, stream.mine + bytes);
        if (first < last) {
          std::memcpy(to + (first - stream.mine), slabs[static_cast<size_t>(from)] + (first - begin),
                      static_cast<size_t>(last - first));
        }
      }
      to += bytes;
    }
  }
  return WaitStatus::kDone;
}

WaitStatus SharedGroup::all_reduce_sum(void* x, int64_t count, DType dtype, double timeout_s, bool (*interrupted)()) {
  const WaitLimits limits = this->limits(timeout_s, interrupted);
  const int64_t total = count * static_cast<int64_t>(element_size(dtype));
  for (int64_t begin = 0; begin < total; begin += slab_bytes_) {
    const int64_t bytes = std::min(slab_bytes_, total - begin);
    char* own = static_cast<char*>(x) + begin;
    std::memcpy(slab(rank_), own, static_cast<size_t>(bytes));
    announce(total);
    std::vector<const char*> slabs;
    for (int r = 0; r < size_; ++r) slabs.push_back(slab(r));
    const WaitStatus status = arrive_and_wait(limits);
    if (status != WaitStatus::kDone) return status;
    for (int r = 0; r < size_; ++r) check_announced(r, total);
    sum_in_rank_order(slabs, bytes / static_cast<int64_t>(element_size(dtype)), dtype, own);
  }
  return WaitStatus::kDone;
}

std::vector<uint64_t> SharedGroup::arrived() const {
  std::vector<uint64_t> epochs;
  for (int r = 0; r < size_; ++r) epochs.push_back(lines_[r].epoch.load());
  return epochs;
}

std::vector<int> SharedGroup::missing() const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r) {
    if (lines_[r].epoch.load() < epoch_) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace shardline
