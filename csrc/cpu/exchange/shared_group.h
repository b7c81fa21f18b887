// Ranks that share memory: a barrier, and the collectives that are built on it.
//
// Several processes may map the memory, or threads of one process may share it. It must start filled with zeros. It
// holds a header, one line per rank, and a data area in two halves that alternate from barrier to barrier. A rank
// writes into a half again only after a barrier that all readers of the half have reached. So one barrier per
// collective is enough.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "exchange/group.h"

namespace shardline {

class SharedGroup final : public Group {
 public:
  static constexpr int kObserver = -1;  // may look and abort, but takes no part in collectives

  static size_t required_bytes(int size, size_t data_bytes);

  // Throws std::invalid_argument if the memory cannot hold the group, or if a group of another shape uses it.
  SharedGroup(void* memory, size_t num_bytes, int rank, int size, int spin_iterations);

  WaitStatus barrier(double timeout_s, bool (*interrupted)()) override;
  WaitStatus all_gather(const void* local, const std::vector<GatherPart>& parts, void* out, double timeout_s,
                        bool (*interrupted)()) override;
  // Throws std::invalid_argument if the memory has no room for a row.
  WaitStatus gather_rows(const void* local, int64_t num_rows, const std::vector<int64_t>& row_bytes,
                         const TakeRows& take, double timeout_s, bool (*interrupted)()) override;
  WaitStatus all_to_all_rows(const void* local, const int64_t* counts, int64_t row_bytes, void* out, double timeout_s,
                             bool (*interrupted)()) override;
  WaitStatus all_reduce_sum(void* x, int64_t count, DType dtype, double timeout_s, bool (*interrupted)()) override;

  void abort() override { abort_waiters(cell_, rank_); }
  uint32_t aborted() const override { return cell_->aborted.load(); }
  std::vector<uint64_t> arrived() const;
  std::vector<int> missing() const override;

 private:
  struct Header;
  struct RankLine;

  WaitStatus arrive_and_wait(const WaitLimits& limits);
  char* slab(int rank) const;
  void announce(int64_t bytes);
  void check_announced(int rank, int64_t bytes) const;

  Header* header_;
  WaitCell* cell_;
  RankLine* lines_;
  char* data_;
  int64_t slab_bytes_;
};

}  // namespace shardline
