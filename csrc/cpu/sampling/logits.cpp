// Passes over a row of logits, from which sampling and log-probabilities are made.
#include <cstring>

#include "dispatch/variant.h"
#include "runtime/thread_pool.h"
#include "simd/vec_math.h"

namespace shardline::SHARDLINE_ISA {

void softcap(float* logits, int64_t count, float cap) {
  constexpr int64_t kTaskElements = 1 << 13;
  parallel_for_if(count > kTaskElements, ceil_div(count, kTaskElements), [&](int64_t task) {
    const int64_t end = min64(count, (task + 1) * kTaskElements);
    for (int64_t i = task * kTaskElements; i < end; i += kLanes) {
      store_n(logits + i, tanh(load_n(logits + i, end - i) / cap) * cap, end - i);
    }
  });
}

void mask_logits(float* logits, int64_t count, const uint32_t* bits) {
  const I32 lane_bits = broadcast_int(1) << lane_numbers(AllLanes());
  const F32 banned = broadcast(-__builtin_inff());
  for (int64_t first = 0; first < count; first += 32) {
    const uint32_t word = bits[first / 32];
    if (word == ~uint32_t{0}) continue;
    const int64_t end = min64(count, first + 32);
    for (int64_t i = first; i < end; i += kLanes) {
      const I32 is_allowed = (broadcast_int(static_cast<int32_t>(word >> (i - first))) & lane_bits) != 0;
      store_n(logits + i, is_allowed ? load_n(logits + i, end - i) : banned, end - i);
    }
  }
}

uint64_t hash_row(const float* logits, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, logits + i, sizeof bits);
    uint64_t x = static_cast<uint64_t>(i) << 32 | bits;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    sum += x ^ x >> 31;
  }
  return sum;
}

void exp_shifted(const float* logits, int64_t count, float shift, float scale, float* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32 y = exp((load_n(logits + i, count - i) - shift) * scale);
    store_n(out + i, y == y ? y : F32{}, count - i);
  }
}

int64_t argmax(const float* logits, int64_t count) {
  const F32 lowest = broadcast(-__builtin_inff());
  F32 best[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    for (int v = 0; v < 4; ++v) {
      const F32 x = load(logits + i + v * kLanes);
      best[v] = x > best[v] ? x : best[v];
    }
  }
  float largest = max_lanes(maximum(maximum(best[0], best[1]), maximum(best[2], best[3])));
  for (; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
  for (int64_t id = 0; id < count; ++id) {
    if (logits[id] == largest) return id;
  }
  return 0;  // all are NaN
}

}  // namespace shardline::SHARDLINE_ISA
