// Ranks that share memory: a barrier, and the collectives that are built on it.
//
// Several processes may map the memory, or threads of one process may share it. It must start filled with zeros. It
// holds a header, one line per rank, and a data area in two halves that alternate from barrier to barrier. A rank
// writes into a half again only after a barrier that all readers of the half have reached. So one barrier per
// collective is enough.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/types.h"
#include "runtime/wait.h"

namespace shardline {

// Where one rank's contribution belongs in the result: `rows` rows of `row_bytes`, `stride_bytes` apart.
struct GatherPart {
  int64_t rows, row_bytes, offset_bytes, stride_bytes;
  int64_t total_bytes() const { return rows * row_bytes; }
};

class SharedGroup {
 public:
  static constexpr int kObserver = -1;  // may look and abort, but takes no part in collectives

  static size_t required_bytes(int size, size_t data_bytes);

  // Throws std::invalid_argument if the memory cannot hold the group, or if a group of another shape uses it.
  SharedGroup(void* memory, size_t num_bytes, int rank, int size, int spin_iterations);

  WaitStatus barrier(double timeout_s, bool (*interrupted)());
  // parts[r] describes the data of rank r; `local` is this rank's data, contiguous.
  WaitStatus all_gather(const void* local, const std::vector<GatherPart>& parts, void* out, double timeout_s,
                        bool (*interrupted)());
  // Gathers rows of row_bytes[r] bytes from every rank r, as many at a time as there is room for. `local` has this
  // rank's rows. Calls take(first_row, num_rows, pieces); pieces[r] points to the rows of rank r until take returns.
  using TakeRows = std::function<void(int64_t, int64_t, const std::vector<const char*>&)>;
  WaitStatus gather_rows(const void* local, int64_t num_rows, const std::vector<int64_t>& row_bytes,
                         const TakeRows& take, double timeout_s, bool (*interrupted)());
  // Sends rows of `row_bytes` from every rank to every other: counts[from * size + to], the same on all ranks. `local`
  // has the rows for each rank, one rank after another; `out` gets the rows from each rank.
  WaitStatus all_to_all_rows(const void* local, const int64_t* counts, int64_t row_bytes, void* out, double timeout_s,
                             bool (*interrupted)());
  // x becomes the sum over ranks, added in the order of ranks in fp32 and rounded once.
  WaitStatus all_reduce_sum(void* x, int64_t count, DType dtype, double timeout_s, bool (*interrupted)());

  void abort() { abort_waiters(cell_, rank_); }
  uint32_t aborted() const { return cell_->aborted.load(); }
  std::vector<uint64_t> arrived() const;
  std::vector<int> missing() const;  // ranks that have not reached the barrier at which this one waits

  int rank() const { return rank_; }
  int size() const { return size_; }
  uint64_t epoch() const { return epoch_; }

 private:
  struct Header;
  struct RankLine;

  WaitStatus arrive_and_wait(const WaitLimits& limits);
  WaitLimits limits(double timeout_s, bool (*interrupted)());
  char* slab(int rank) const;
  void announce(int64_t bytes);
  void check_announced(int rank, int64_t bytes) const;

  Header* header_;
  WaitCell* cell_;
  RankLine* lines_;
  char* data_;
  int64_t slab_bytes_;
  int rank_, size_;
  Spin spin_;
  uint64_t epoch_ = 0;
};

}  // namespace shardline
