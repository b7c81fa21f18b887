// Activations, alone or gating: act(gate) * up. In fp32; a gated bf16 result is rounded after the activation and again
// after the product, as eager torch does.
#include "activations.h"
#include "gemm_finish.h"
#include "thread_pool.h"
#include "variant.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int64_t kTaskElements = 1 << 13;

template <class T, class Act>
void activate_row(Act act, const T* x, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) store_n(out + i, activated(act, load_n(x + i, width - i)), width - i);
}

template <class T, class Act>
void gate_row(Act act, const T* gate, const T* up, T* out, int64_t width) {
  int64_t i = 0;
  for (; i + 2 * kPair <= width; i += 2 * kPair) {
    gate_pairs<2>(act, {gate + i, gate + i + kPair}, {up + i, up + i + kPair}, {out + i, out + i + kPair});
  }
  for (; i < width; i += kLanes) {
    gate_n(act, load_n(gate + i, width - i), load_n(up + i, width - i), out + i, width - i);
  }
}

template <class T, class Act>
void gate_sums(Act act, const GatedSums& tile) {
  const auto out_of = [&](int64_t row) { return static_cast<T*>(tile.out) + row * tile.out_stride; };
  if (tile.columns < kGatedColumns) {
    for (int64_t r = 0; r < tile.rows; ++r) {
      const float* gate = tile.values + r * kPanelColumns;
      for (int64_t c = 0; c < tile.columns; c += kLanes) {
        gate_n(act, load(gate + c), load(gate + kGatedColumns + c), out_of(r) + c, tile.columns - c);
      }
    }
    return;
  }
  constexpr int64_t kRowPairs = kGatedColumns / kPair;
  const auto gate = [&](int64_t p) { return tile.values + p / kRowPairs * kPanelColumns + p % kRowPairs * kPair; };
  const auto up = [&](int64_t p) { return gate(p) + kGatedColumns; };
  const auto out = [&](int64_t p) { return out_of(p / kRowPairs) + p % kRowPairs * kPair; };
  int64_t p = 0;
  for (; p + 2 <= tile.rows * kRowPairs; p += 2) {
    gate_pairs<2>(act, {gate(p), gate(p + 1)}, {up(p), up(p + 1)}, {out(p), out(p + 1)});
  }
  if (p < tile.rows * kRowPairs) gate_pairs<1>(act, {gate(p)}, {up(p)}, {out(p)});
}

template <class T, class Act>
void activate(Act act, const ActivationArgs& args) {
  const int64_t chunks = ceil_div(args.width, kTaskElements);
  const bool parallel = args.num_rows * args.width > kTaskElements;
  parallel_for_if(parallel, args.num_rows * chunks, [&](int64_t task) {
    const int64_t row = task / chunks;
    const int64_t begin = task % chunks * kTaskElements;
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride + begin;
    T* out = static_cast<T*>(args.out) + row * args.width + begin;
    const int64_t width = min64(args.width - begin, kTaskElements);
    args.gated ? gate_row(act, x, x + args.width, out, width) : activate_row(act, x, out, width);
  });
}

}  // namespace

void activation(const ActivationArgs& args) {
  with_activation(args.activation, [&](auto act) {
    args.dtype == DType::kFloat32 ? activate<float>(act, args) : activate<bf16>(act, args);
  });
}

void gate(Activation activation, DType dtype, const GatedSums& tile) {
  with_activation(activation, [&](auto act) {
    dtype == DType::kFloat32 ? gate_sums<float>(act, tile) : gate_sums<bf16>(act, tile);
  });
}

}  // namespace shardline::SHARDLINE_ISA
