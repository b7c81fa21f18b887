// Ranks that exchange tensors: the collectives of one group, whatever carries the bytes. All ranks of a group call the
// same collectives in the same order. Every result has the same bits on all carriers.
#pragma once

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

// Copies bytes [begin, end) of a rank's contribution to their places in the result; `from` points to byte `begin`.
void scatter(const char* from, int64_t begin, int64_t end, const GatherPart& part, char* out);
// out = the sum of `count` elements of all sources, in their order, in fp32 and rounded once; `out` may be a source.
void sum_in_rank_order(const std::vector<const char*>& sources, int64_t count, DType dtype, char* out);

class Group {
 public:
  virtual ~Group() = default;

  virtual WaitStatus barrier(double timeout_s, bool (*interrupted)()) = 0;
  // parts[r] describes the data of rank r; `local` is this rank's data, contiguous.
  virtual WaitStatus all_gather(const void* local, const std::vector<GatherPart>& parts, void* out, double timeout_s,
                                bool (*interrupted)()) = 0;
  // Gathers rows of row_bytes[r] bytes from every rank r, as many at a time as there is room for. `local` has this
  // rank's rows. Calls take(first_row, num_rows, pieces); pieces[r] points to the rows of rank r until take returns.
  using TakeRows = std::function<void(int64_t, int64_t, const std::vector<const char*>&)>;
  virtual WaitStatus gather_rows(const void* local, int64_t num_rows, const std::vector<int64_t>& row_bytes,
                                 const TakeRows& take, double timeout_s, bool (*interrupted)()) = 0;
  // Sends rows of `row_bytes` from every rank to every other: counts[from * size + to], the same on all ranks. `local`
  // has the rows for each rank, one rank after another; `out` gets the rows from each rank.
  virtual WaitStatus all_to_all_rows(const void* local, const int64_t* counts, int64_t row_bytes, void* out,
                                     double timeout_s, bool (*interrupted)()) = 0;
  // x becomes the sum over ranks, added in the order of ranks in fp32 and rounded once.
  virtual WaitStatus all_reduce_sum(void* x, int64_t count, DType dtype, double timeout_s, bool (*interrupted)()) = 0;

  virtual void abort() = 0;
  virtual uint32_t aborted() const = 0;          // 0, or 2 + the rank that gave up
  virtual std::vector<int> missing() const = 0;  // ranks that have not arrived where this one waits
  virtual std::string name_ranks(const std::vector<int>& ranks) const;

  int rank() const { return rank_; }
  int size() const { return size_; }
  uint64_t epoch() const { return epoch_; }

 protected:
  Group(int rank, int size, int spin_iterations) : rank_(rank), size_(size), spin_(spin_iterations) {}

  WaitLimits limits(double timeout_s, bool (*interrupted)()) {
    return {deadline_after(timeout_s), &spin_, interrupted};
  }

  const int rank_, size_;
  Spin spin_;
  uint64_t epoch_ = 0;  // exchanges that this rank has begun
};

}  // namespace shardline
