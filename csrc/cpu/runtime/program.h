// The kernel calls of a step, recorded once and replayed in one call: the CPU's counterpart of a CUDA graph.
//
// While a program records, every call that goes through `perform` is run and kept, with its pointers and sizes. A
// replay is correct while all of them stay valid. So inputs lie in buffers that do not move, intermediate results lie
// in the thread's arena, whose memory is never returned, and no other activation lies in that arena during the replay.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/arena.h"

namespace shardline {

class Program {
 public:
  static Program* recording();  // the calling thread's program, or null

  Program() : arena_(Arena::of_this_thread()) {}

  void begin();
  void end();
  void add(std::function<void()> call) { calls_.push_back(std::move(call)); }
  // Runs the calls in order. Does nothing and returns false if other activations are alive: they could be overwritten.
  bool replay() const;

 private:
  std::shared_ptr<Arena> arena_;
  std::vector<std::function<void()>> calls_;
};

// Runs `call` without the GIL, and keeps it if the thread is recording.
template <class Call>
void perform(Call call) {
  if (Program* program = Program::recording()) program->add(call);
  nanobind::gil_scoped_release release;
  call();
}

}  // namespace shardline
