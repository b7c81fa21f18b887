// RMSNorm and LayerNorm over rows, with or without adding to the residual stream first, and that addition alone. A norm
// before a quantized product quantizes its rows while they are in the cache.
#include "dispatch/variant.h"
#include "rowwise/quantize_row.h"
#include "runtime/thread_pool.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kSmallWork = 1 << 14;

// Sums function(chunk, valid lanes, sum so far) over a row. The order depends on the width alone: chunk c goes to sum c
// % 4, then the four sums are added, then the lanes.
template <class T, class Function>
inline float reduce_row(const T* row, int64_t width, const Function& function) {
  F32 sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) sum[c] = function(load(row + i + c * kLanes), kLanes, sum[c]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const int64_t n = width - i - c * kLanes;
    if (n > 0) sum[c] = function(load_n(row + i + c * kLanes, n), n, sum[c]);
  }
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

inline float root(float x) { return __builtin_sqrtf(x); }

// Two vectors at a time, since one instruction rounds two to bf16.
template <class T>
void add_row(const T* x, const T* residual, T* summed, int64_t width) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    store_two(summed + i, load(x + i) + load(residual + i), load(x + i + kLanes) + load(residual + i + kLanes));
  }
  for (; i < width; i += kLanes) {
    store_n(summed + i, load_n(x + i, width - i) + load_n(residual + i, width - i), width - i);
  }
}

template <class T>
void rms_norm_row(const T* x, const T* weight, T* out, int64_t width, float eps, float weight_offset) {
  const float square_sum = reduce_row(x, width, [](F32 v, int64_t, F32 sum) { return fma(v, v, sum); });
  const F32 scale = broadcast(1.0f / root(square_sum / static_cast<float>(width) + eps));
  // Llama rounds before it multiplies by the weight; Gemma multiplies by 1 + weight in fp32.
  const bool rounds_first = weight_offset == 0.0f;
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    F32 first = load(x + i) * scale, second = load(x + i + kLanes) * scale;
    const F32 w_first = load(weight + i), w_second = load(weight + i + kLanes);
    if (rounds_first) {
      round_two_to<T>(first, second);
      store_two(out + i, first * w_first, second * w_second);
    } else {
      store_two(out + i, first * (w_first + weight_offset), second * (w_second + weight_offset));
    }
  }
  for (; i < width; i += kLanes) {
    const int64_t n = width - i;
    const F32 normed = load_n(x + i, n) * scale, w = load_n(weight + i, n);
    store_n(out + i, rounds_first ? rounded_to<T>(normed) * w : normed * (w + weight_offset), n);
  }
}

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, T* out, int64_t width, float eps) {
  const float count = static_cast<float>(width);
  const F32 mean = broadcast(reduce_row(x, width, [](F32 v, int64_t, F32 sum) { return sum + v; }) / count);
  const float square_sum = reduce_row(x, width, [&](F32 v, int64_t n, F32 sum) {
    const F32 centred = v - mean;
    if (n >= kLanes) return fma(centred, centred, sum);
    F32 inside = centred;
    for (int64_t lane = n; lane < kLanes; ++lane) inside[lane] = 0.0f;
    return fma(inside, inside, sum);
  });
  const F32 scale = broadcast(1.0f / root(square_sum / count + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    const int64_t n = width - i;
    const F32 y = (load_n(x + i, n) - mean) * scale * load_n(weight + i, n);
    store_n(out + i, bias == nullptr ? y : y + load_n(bias + i, n), n);
  }
}

template <class T, class NormRow>
void for_each_row(const NormArgs& args, const NormRow& norm_row) {
  parallel_for_if(args.num_rows * args.width > kSmallWork, args.num_rows, [&](int64_t row) {
    const int64_t token = row / args.rows_per_token, head = row % args.rows_per_token;
    const T* x = static_cast<const T*>(args.x) + token * args.x_stride + head * args.head_stride;
    if (args.residual != nullptr) {
      T* summed = static_cast<T*>(args.summed) + row * args.width;
      add_row(x, static_cast<const T*>(args.residual) + row * args.residual_stride, summed, args.width);
      x = summed;
    }
    const bool quantized = args.out == nullptr;
    T* out = quantized ? static_cast<T*>(thread_scratch(static_cast<size_t>(args.width) * sizeof(T)))
                       : static_cast<T*>(args.out) + row * args.width;
    norm_row(x, out);
    if (quantized) quantize_row(out, args.width, row, args.values, args.scales, args.sums);
  });
}

template <class T>
void rms_norm_rows(const NormArgs& args) {
  for_each_row<T>(args, [&](const T* x, T* out) {
    rms_norm_row(x, static_cast<const T*>(args.weight), out, args.width, args.eps, args.weight_offset);
  });
}

template <class T>
void layer_norm_rows(const NormArgs& args) {
  for_each_row<T>(args, [&](const T* x, T* out) {
    layer_norm_row(x, static_cast<const T*>(args.weight), static_cast<const T*>(args.bias), out, args.width, args.eps);
  });
}

}  // namespace

void rms_norm(const NormArgs& args) {
  args.dtype == DType::kFloat32 ? rms_norm_rows<float>(args) : rms_norm_rows<bf16>(args);
}

void layer_norm(const NormArgs& args) {
  args.dtype == DType::kFloat32 ? layer_norm_rows<float>(args) : layer_norm_rows<bf16>(args);
}

void add(const AddArgs& args) {
  if (args.dtype == DType::kFloat32) {
    add_row(static_cast<const float*>(args.x), static_cast<const float*>(args.y), static_cast<float*>(args.out),
            args.count);
  } else {
    add_row(static_cast<const bf16*>(args.x), static_cast<const bf16*>(args.y), static_cast<bf16*>(args.out),
            args.count);
  }
}

}  // namespace shardline::SHARDLINE_ISA
