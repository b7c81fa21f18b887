#include "attention/choose_keys_args.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"
#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kKeysOfTask = 512;
constexpr int64_t kKeys = 4;  // that share what is loaded of the queries
constexpr int kVectors = 4;   // of heads


// Adds to sums[k] the scores of kNum vectors of heads for kKeys keys [kKeys][dim]; query is [dim][stride].
template <int kNum>
void add_heads(const float* query, int64_t stride, const float* keys, const float* weights, int64_t dim, F32* sums) {
  F32 dots[kKeys][kNum] = {};
  for (int64_t d = 0; d < dim; ++d) {
    F32 heads[kNum];
    for (int v = 0; v < kNum; ++v) heads[v] = load(query + d * stride + v * kLanes);
    for (int64_t k = 0; k < kKeys; ++k) {
      const F32 element = broadcast(keys[k * dim + d]);
      for (int v = 0; v < kNum; ++v) dots[k][v] = fma(heads[v], element, dots[k][v]);
    }
  }
  for (int64_t k = 0; k < kKeys; ++k) {
    for (int v = 0; v < kNum; ++v) {
      const F32 positive = dots[k][v] > 0 ? dots[k][v] : broadcast(0);
      sums[k] = fma(positive, load(weights + v * kLanes), sums[k]);
    }
  }
}

template <class T>
void score_task(const ScoreKeysArgs& args, int64_t row, int64_t first, int64_t last) {
  const int64_t dim = args.dim, stride = ceil_div(args.num_heads, kLanes) * kLanes;
  float* query = static_cast<float*>(thread_scratch(sizeof(float) * (stride * (dim + 1) + kKeys * dim)));
  float* weights = query + stride * dim;
  float* keys = weights + stride;
  for (int64_t h = 0; h < stride; ++h) {
    const bool is_head = h < args.num_heads;
    const T* head = static_cast<const T*>(args.query) + row * args.query_stride + h * args.head_stride;
    for (int64_t d = 0; d < dim; ++d) query[d * stride + h] = is_head ? to_float(head[d]) : 0;
    weights[h] = is_head ? args.weights[row * args.weights_stride + h] : 0;
  }
  const int32_t* blocks = args.block_tables + args.sequences[row] * args.table_stride;
  float* scores = args.scores + row * args.scores_stride;
  for (int64_t token = first; token < last; token += kKeys) {
    const int64_t count = min64(kKeys, last - token);
    for (int64_t k = 0; k < kKeys; ++k) {  // the last key stands for those behind the end
      const int64_t place = token + min64(k, count - 1);
      const int64_t slot = blocks[place / args.block_size] * args.block_size + place % args.block_size;
      const T* key = static_cast<const T*>(args.keys) + slot * dim;
      for (int64_t d = 0; d < dim; ++d) keys[k * dim + d] = to_float(key[d]);
    }
    F32 sums[kKeys] = {};
    int64_t h = 0;
    for (; h + kVectors * kLanes <= stride; h += kVectors * kLanes) {
      add_heads<kVectors>(query + h, stride, keys, weights + h, dim, sums);
    }
    for (; h < stride; h += kLanes) add_heads<1>(query + h, stride, keys, weights + h, dim, sums);
    for (int64_t k = 0; k < count; ++k) {
      float total = 0;
      for (int lane = 0; lane < kLanes; ++lane) total += sums[k][lane];
      scores[token + k] = total;
    }
  }
}

}  // namespace

void score_keys(const ScoreKeysArgs& args) {
  const int64_t tasks_of_row = ceil_div(args.most_keys, kKeysOfTask);
  parallel_for(args.num_rows * tasks_of_row, [&](int64_t task) {
    const int64_t row = task / tasks_of_row, first = task % tasks_of_row * kKeysOfTask;
    const int64_t last = min64(args.contexts[row], first + kKeysOfTask);
    if (first >= last) return;
    args.dtype == DType::kFloat32 ? score_task<float>(args, row, first, last)
                                  : score_task<bf16>(args, row, first, last);
  });
}

}  // namespace shardline::SHARDLINE_ISA
