// Divides tiles into tasks for all threads, with one barrier: whichever thread completes the last part of a tile also
// merges the tile. Parts merge in index order, so it does not matter which thread that is.
#pragma once

#include "runtime/thread_pool.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

// Has arrays of its own: a file compiled for an ISA uses no containers of the standard library, see vec.h.
class SplitTasks {
 public:
  struct Task {
    int64_t group, tile, part;
    int64_t first_task;  // of the tile; those of its other parts follow at a distance of tiles_per_group
  };

  // Groups of tiles that have equally many parts each; parts_of(group) is at least 1.
  template <class PartsOf>
  SplitTasks(int64_t num_groups, int64_t tiles_per_group, const PartsOf& parts_of)
      : num_groups_(num_groups),
        tiles_(tiles_per_group),
        first_(new int64_t[num_groups + 1]),
        left_(new int32_t[num_groups * tiles_per_group]) {
    first_[0] = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t parts = parts_of(group);
      first_[group + 1] = first_[group] + parts * tiles_;
      for (int64_t tile = 0; tile < tiles_; ++tile) left_[group * tiles_ + tile] = static_cast<int32_t>(parts);
    }
  }
  ~SplitTasks() {
    delete[] first_;
    delete[] left_;
  }
  SplitTasks(const SplitTasks&) = delete;

  int64_t count() const { return first_[num_groups_]; }
  int64_t parts_of(int64_t group) const { return (first_[group + 1] - first_[group]) / tiles_; }

  // Calls compute(task) for every task, and merge(task) after the last part of a tile.
  template <class Compute, class Merge>
  void run(const Compute& compute, const Merge& merge) {
    // Late tiles of a prompt see the most keys. They go first, so that no thread is left with one at the end.
    parallel_for(count(), [&](int64_t reversed) {
      const Task task = at(count() - 1 - reversed);
      compute(task);
      if (__atomic_sub_fetch(&left_[task.group * tiles_ + task.tile], 1, __ATOMIC_ACQ_REL) == 0) merge(task);
    });
  }

 private:
  Task at(int64_t task) const {
    int64_t low = 0, high = num_groups_ - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (first_[middle] <= task) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t place = task - first_[low], tile = place % tiles_;
    return {low, tile, place / tiles_, first_[low] + tile};
  }

  const int64_t num_groups_, tiles_;
  int64_t* first_;
  int32_t* left_;
};

}  // namespace shardline::SHARDLINE_ISA
