// Ranks that share no memory: every two of them have a TCP connection. A collective is one frame from each rank to each
// other rank, so the ranks also meet in it, as at a barrier.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "exchange/group.h"
#include "exchange/socket_peer.h"

namespace shardline {

class SocketGroup final : public Group {
 public:
  // fds[r] is a socket that is connected to rank r, and names[r] the name of that rank in errors; this rank's own are
  // ignored. The group takes over the sockets.
  SocketGroup(const std::vector<int>& fds, int rank, const std::vector<std::string>& names, int spin_iterations);

  WaitStatus barrier(double timeout_s, bool (*interrupted)()) override;
  WaitStatus all_gather(const void* local, const std::vector<GatherPart>& parts, void* out, double timeout_s,
                        bool (*interrupted)()) override;
  WaitStatus gather_rows(const void* local, int64_t num_rows, const std::vector<int64_t>& row_bytes,
                         const TakeRows& take, double timeout_s, bool (*interrupted)()) override;
  WaitStatus all_to_all_rows(const void* local, const int64_t* counts, int64_t row_bytes, void* out, double timeout_s,
                             bool (*interrupted)()) override;
  WaitStatus all_reduce_sum(void* x, int64_t count, DType dtype, double timeout_s, bool (*interrupted)()) override;

  // Ends the exchange that runs, on this rank and, since the sockets are shut down, on its peers. Any thread may call
  // it.
  void abort() override;
  uint32_t aborted() const override { return aborted_.load(); }
  std::vector<int> missing() const override;
  std::string name_ranks(const std::vector<int>& ranks) const override;

 private:
  // Runs the frames that were started. After a failure the ranks are out of step, so the sockets are shut down.
  WaitStatus finish(const WaitLimits& limits);
  void begin();
  char* inbox(int rank, int64_t num_bytes);

  std::vector<std::unique_ptr<SocketPeer>> peers_;  // by rank; null for this rank
  std::vector<SocketPeer*> others_;
  std::vector<std::vector<char>> inboxes_;  // by rank
  std::atomic<uint32_t> aborted_{0};
  bool is_broken_ = false;
};

}  // namespace shardline
