#include "runtime/program.h"

namespace shardline {
namespace { thread_local Program* recording_program = nullptr; }  // namespace

Program* Program::recording() { return recording_program; }

void Program::begin() { recording_program = this; }

void Program::end() { recording_program = nullptr; }

bool Program::replay() const {
  if (arena_->used_bytes() > 0) return false;
  for (const auto& call : calls_) call();
  return true;
}

}  // namespace shardline
