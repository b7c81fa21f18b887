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
void activate_row(const T* x, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += kLanes) store_n(out + i, Act::of(load_n(x + i, width - i)), width - i);
}

template <class T, class Act>
void gate_row(Act act, const T* gate, const T* up, T* out, int64_t width) {
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    gate_two(act, load(gate + i), load(gate + i + kLanes), load(up + i), load(up + i + kLanes), out + i);
  }
  for (; i < width; i += kLanes) gate_n(act, load_n(gate + i, width - i), load_n(up + i, width - i), out + i, width - i);
}

// As gate_row, for a panel's sums.
template <class T, class Act>
void gate_sums(Act act, const GatedSums& tile) {
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float* gate = tile.values + r * kPanelColumns;
    const float* up = gate + kGatedColumns;
    T* out = static_cast<T*>(tile.out) + r * tile.out_stride;
    int64_t c = 0;
    for (; c + 2 * kLanes <= tile.columns; c += 2 * kLanes) {
      F32 gates[2] = {load(gate + c), load(gate + c + kLanes)}, ups[2] = {load(up + c), load(up + c + kLanes)};
      round_two_to<T>(gates[0], gates[1]);
      round_two_to<T>(ups[0], ups[1]);
      gate_two(act, gates[0], gates[1], ups[0], ups[1], out + c);
    }
    for (; c < tile.columns; c += kLanes) {
      gate_n(act, rounded_to<T>(load(gate + c)), rounded_to<T>(load(up + c)), out + c, tile.columns - c);
    }
  }
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
    args.gated ? gate_row(act, x, x + args.width, out, width) : activate_row<T, Act>(x, out, width);
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
