#include "exchange/socket_group.h"

#include <algorithm>
#include <cstring>

namespace shardline {
namespace {

// The most bytes from one rank that are kept until all ranks have sent theirs.
constexpr int64_t kInboxBytes = 4 << 20;

GatherPart whole(int64_t num_bytes) { return {1, num_bytes, 0, 0}; }

}  // namespace

SocketGroup::SocketGroup(const std::vector<int>& fds, int rank, const std::vector<std::string>& names,
                         int spin_iterations)
    : Group(rank, static_cast<int>(fds.size()), spin_iterations), inboxes_(fds.size()) {
  if (rank < 0 || rank >= size_) throw std::invalid_argument("rank must be in [0, size)");
  if (names.size() != fds.size()) throw std::invalid_argument("one name per rank is needed");
  for (size_t r = 0; r < fds.size(); ++r) {
    peers_.push_back(static_cast<int>(r) == rank ? nullptr : std::make_unique<SocketPeer>(fds[r], names[r]));
    if (peers_[r] != nullptr) others_.push_back(peers_[r].get());
  }
}

void SocketGroup::begin() {
  if (is_broken_) throw PeerLost("an earlier exchange of this group has failed");
  ++epoch_;
}

WaitStatus SocketGroup::finish(const WaitLimits& limits) {
  is_broken_ = true;  // until all frames are over
  WaitStatus status = WaitStatus::kAborted;
  try {
    status = finish_frames(others_, aborted_, limits);
  } catch (const std::runtime_error&) {
    // An abort shuts the sockets down, which then looks like a lost peer.
    if (aborted_.load() != 0) return WaitStatus::kAborted;
    for (SocketPeer* peer : others_) peer->shut_down();
    throw;
  }
  is_broken_ = status != WaitStatus::kDone;
  if (is_broken_) {
    for (SocketPeer* peer : others_) peer->shut_down();
  }
  return status;
}

WaitStatus SocketGroup::barrier(double timeout_s, bool (*interrupted)()) {
  begin();
  for (SocketPeer* peer : others_) {
    peer->start_send(epoch_, nullptr, 0);
    peer->start_receive(epoch_, whole(0), nullptr);
  }
  return finish(limits(timeout_s, interrupted));
}

WaitStatus SocketGroup::all_gather(const void* local, const std::vector<GatherPart>& parts, void* out, double timeout_s,
                                   bool (*interrupted)()) {
  begin();
  const GatherPart& own = parts[static_cast<size_t>(rank_)];
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    SocketPeer& peer = *peers_[static_cast<size_t>(r)];
    peer.start_receive(epoch_, parts[static_cast<size_t>(r)], out);
    peer.start_send(epoch_, local, own.total_bytes());
  }
  scatter(static_cast<const char*>(local), 0, own.total_bytes(), own, static_cast<char*>(out));
  return finish(limits(timeout_s, interrupted));
}

char* SocketGroup::inbox(int rank, int64_t num_bytes) {
  std::vector<char>& bytes = inboxes_[static_cast<size_t>(rank)];
  if (static_cast<int64_t>(bytes.size()) < num_bytes) bytes.resize(static_cast<size_t>(num_bytes));
  return bytes.data();
}

WaitStatus SocketGroup::gather_rows(const void* local, int64_t num_rows, const std::vector<int64_t>& row_bytes,
                                    const TakeRows& take, double timeout_s, bool (*interrupted)()) {
  const WaitLimits limits = this->limits(timeout_s, interrupted);
  const int64_t longest = *std::max_element(row_bytes.begin(), row_bytes.end());
  const int64_t room = longest == 0 ? std::max<int64_t>(num_rows, 1) : std::max<int64_t>(kInboxBytes / longest, 1);
  const int64_t own_bytes = row_bytes[static_cast<size_t>(rank_)];
  for (int64_t first = 0; first < num_rows || first == 0; first += room) {
    const int64_t count = std::min(room, num_rows - first);
    const char* own = static_cast<const char*>(local) + first * own_bytes;
    std::vector<const char*> pieces(static_cast<size_t>(size_), own);
    begin();
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const int64_t num_bytes = count * row_bytes[static_cast<size_t>(r)];
      char* to = inbox(r, num_bytes);
      pieces[static_cast<size_t>(r)] = to;
      peers_[static_cast<size_t>(r)]->start_receive(epoch_, whole(num_bytes), to);
      peers_[static_cast<size_t>(r)]->start_send(epoch_, own, count * own_bytes);
    }
    const WaitStatus status = finish(limits);
    if (status != WaitStatus::kDone) return status;
    take(first, count, pieces);
  }
  return WaitStatus::kDone;
}

WaitStatus SocketGroup::all_to_all_rows(const void* local, const int64_t* counts, int64_t row_bytes, void* out,
                                        double timeout_s, bool (*interrupted)()) {
  begin();
  const char* from = static_cast<const char*>(local);
  char* to = static_cast<char*>(out);
  for (int r = 0; r < size_; ++r) {
    const int64_t leaving = counts[rank_ * size_ + r] * row_bytes, arriving = counts[r * size_ + rank_] * row_bytes;
    if (r == rank_) {
      if (leaving > 0) std::memcpy(to, from, static_cast<size_t>(leaving));
    } else {
      peers_[static_cast<size_t>(r)]->start_send(epoch_, from, leaving);
      peers_[static_cast<size_t>(r)]->start_receive(epoch_, whole(arriving), to);
    }
    from += leaving;
    to += arriving;
  }
  return finish(limits(timeout_s, interrupted));
}

WaitStatus SocketGroup::all_reduce_sum(void* x, int64_t count, DType dtype, double timeout_s, bool (*interrupted)()) {
  const WaitLimits limits = this->limits(timeout_s, interrupted);
  const int64_t item = static_cast<int64_t>(element_size(dtype)), total = count * item;
  for (int64_t begin_byte = 0; begin_byte < total; begin_byte += kInboxBytes) {
    const int64_t bytes = std::min(kInboxBytes, total - begin_byte);
    char* own = static_cast<char*>(x) + begin_byte;
    std::vector<const char*> sources(static_cast<size_t>(size_), own);
    begin();
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      char* to = inbox(r, bytes);
      sources[static_cast<size_t>(r)] = to;
      peers_[static_cast<size_t>(r)]->start_send(epoch_, own, bytes);
      peers_[static_cast<size_t>(r)]->start_receive(epoch_, whole(bytes), to);
    }
    const WaitStatus status = finish(limits);
    if (status != WaitStatus::kDone) return status;
    sum_in_rank_order(sources, bytes / item, dtype, own);
  }
  return WaitStatus::kDone;
}

void SocketGroup::abort() {
  uint32_t not_aborted = 0;
  aborted_.compare_exchange_strong(not_aborted, static_cast<uint32_t>(rank_ + 2));
  for (SocketPeer* peer : others_) peer->shut_down();
}

std::vector<int> SocketGroup::missing() const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r) {
    if (r != rank_ && peers_[static_cast<size_t>(r)]->is_receiving()) ranks.push_back(r);
  }
  return ranks;
}

std::string SocketGroup::name_ranks(const std::vector<int>& ranks) const {
  std::string names;
  for (int rank : ranks) names += (names.empty() ? "" : ", ") + peers_[static_cast<size_t>(rank)]->name();
  return names;
}

}  // namespace shardline
