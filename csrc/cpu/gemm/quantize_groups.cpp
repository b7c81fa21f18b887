// Dense weights to codes with scales for each 32 neighbours along K, as they are loaded. A row's numbers depend on that
// row only.
//
// 4 bits: code * scale - min, both of two levels: bytes, times a half that up to 8 groups share. Of the lines through a
// group that some steps give, the best one has the least squared error (as llama.cpp chooses those of Q4_K). Its two
// bytes are then the nearest ones, or those with which all weights are in range, whichever errs less.
// 8 bits: code - 128 times a scale in bf16.
#include "dispatch/kernels.h"
#include "dispatch/variant.h"
#include "runtime/thread_pool.h"
#include "simd/vec_bytes.h"

namespace shardline::SHARDLINE_ISA {
namespace {

constexpr int kVectors = kGroupDepth / kLanes;
constexpr float kLargestCode = 15.0f, kLargestInner = 127.0f;

struct Group {
  F32 values[kVectors];
};

// value = code * scale + low
struct Line {
  float scale, low;
};

// The group of a row that begins at k. What is missing of the last one is its last value.
template <class T>
inline Group load_group(const T* row, int64_t k, int64_t depth) {
  Group group;
  const F32 last = broadcast(to_float(row[depth - 1]));
  for (int i = 0; i < kVectors; ++i) {
    const int64_t n = max64(0, min64(kLanes, depth - k - i * kLanes));
    F32 values = n == 0 ? last : load_n(row + k + i * kLanes, n);
    for (int64_t lane = n; n > 0 && lane < kLanes; ++lane) values[lane] = last[0];
    group.values[i] = values;
  }
  return group;
}

inline bool is_finite(const Group& group) {
  F32 zeros = {};
  for (const F32& values : group.values) zeros = zeros + (values - values);
  return sum_lanes(zeros) == 0.0f;
}
inline float lowest(const Group& group) {
  F32 most = -group.values[0];
  for (const F32& values : group.values) most = maximum(most, -values);
  return -max_lanes(most);
}
inline float highest(const Group& group) {
  F32 most = group.values[0];
  for (const F32& values : group.values) most = maximum(most, values);
  return max_lanes(most);
}

// 0 for zero and for what is not finite, so that no code is NaN.
inline float inverse_of(float scale) {
  const float inverse = 1.0f / scale;
  return inverse - inverse == 0.0f ? inverse : 0.0f;
}

inline F32 codes_of(F32 values, const Line& line, float inverse) {
  const F32 place = (values - line.low) * inverse;
  return to_float(nearest(minimum(broadcast(kLargestCode), maximum(F32{}, place))));
}

inline float error_of(const Group& group, const Line& line) {
  const float inverse = inverse_of(line.scale);
  F32 error = {};
  for (const F32& values : group.values) {
    const F32 off = fma(codes_of(values, line, inverse), broadcast(line.scale), broadcast(line.low)) - values;
    error = fma(off, off, error);
  }
  return sum_lanes(error);
}

// The line that fits the codes of another one best.
inline Line refitted(const Group& group, const Line& line) {
  const float inverse = inverse_of(line.scale), count = static_cast<float>(kGroupDepth);
  F32 codes_sum = {}, values_sum = {}, squares = {}, products = {};
  for (const F32& values : group.values) {
    const F32 codes = codes_of(values, line, inverse), centred = values - line.low;
    codes_sum = codes_sum + codes;
    values_sum = values_sum + centred;
    squares = fma(codes, codes, squares);
    products = fma(codes, centred, products);
  }
  const float codes = sum_lanes(codes_sum), values = sum_lanes(values_sum);
  const float spread = count * sum_lanes(squares) - codes * codes;
  if (!(spread > 0.0f)) return line;
  const float scale = (count * sum_lanes(products) - codes * values) / spread;
  return {scale, line.low + (values - scale * codes) / count};
}

// The line of the least error, of those from the smallest value on with a step that leaves up to a code unused, or
// cuts the largest values, and of their fits.
Line best_line(const Group& group) {
  const float low = lowest(group), width = highest(group) - low;
  Line best = {width / kLargestCode, low};
  float least = error_of(group, best);
  constexpr float kSteps[] = {0.0f, -1.0f, -0.5f, 0.5f, 1.0f};
  for (const float step : kSteps) {
    const Line line = refitted(group, {width / (kLargestCode + step), low});
    const float error = error_of(group, line);
    if (error < least && line.scale > 0.0f) {
      least = error;
      best = line;
    }
  }
  return best;
}

constexpr uint16_t kNanHalf = 0x7e00;

// The nearest half of a value >= 0, to even on ties, as bits; NaN above the largest.
inline uint16_t to_half(float value) {
  if (!(value < 65504.0f)) return kNanHalf;
  const float small = value * 0x1p-112f;
  uint32_t bits;
  __builtin_memcpy(&bits, &small, sizeof bits);
  return static_cast<uint16_t>((bits + 0xfff + ((bits >> 13) & 1)) >> 13);
}
inline float from_half(uint16_t half) {
  if (half >= 0x7c00) return __builtin_nanf("");
  const uint32_t bits = uint32_t{half} << 13;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value * 0x1p112f;
}

inline float clamped(float value, float least, float most) {
  return value < least ? least : value > most ? most : value;
}

// A number as a multiple of its outer one: 0 if that is zero.
inline float in_levels(float number, float outer) { return number * inverse_of(outer); }

struct Levels {
  float scale, min;
};

inline float larger(float a, float b) { return a < b ? b : a; }

// Makes neighbouring groups of a row NaN.
void set_nan(const QuantizeNibblesArgs& args, int64_t n, int64_t run, int64_t first, int64_t count) {
  const int64_t place = n * ceil_div(args.depth, kGroupDepth) + first, begin = first * kGroupDepth;
  const int64_t size = min64(args.depth, begin + count * kGroupDepth) - begin;
  args.outer_scales[run] = args.outer_mins[run] = kNanHalf;
  __builtin_memset(args.scales + place, 1, static_cast<size_t>(count));
  __builtin_memset(args.mins + place, 1, static_cast<size_t>(count));
  __builtin_memset(args.codes + n * args.depth + begin, 0, static_cast<size_t>(size));
}

// Sets the codes, and the inner numbers, of some neighbouring groups of a row, which share their outer numbers.
template <class T>
void quantize_run(const QuantizeNibblesArgs& args, const T* row, int64_t n, int64_t first, int64_t count) {
  const int64_t num_groups = ceil_div(args.depth, kGroupDepth), run = n * (num_groups / count) + first / count;
  Line lines[kMostOuterGroups];
  float scale_most = 0.0f, min_most = 0.0f;
  bool finite = true;
  for (int64_t g = 0; g < count; ++g) {
    const Group group = load_group(row, (first + g) * kGroupDepth, args.depth);
    finite = finite && is_finite(group);
    lines[g] = best_line(group);
    scale_most = larger(scale_most, lines[g].scale);
    min_most = larger(min_most, __builtin_fabsf(lines[g].low));
  }
  if (!finite) return set_nan(args, n, run, first, count);
  args.outer_scales[run] = to_half(scale_most / kLargestInner);
  args.outer_mins[run] = to_half(min_most / kLargestInner);
  const float outer_scale = from_half(args.outer_scales[run]), outer_min = from_half(args.outer_mins[run]);
  for (int64_t g = 0; g < count; ++g) {
    const int64_t k = (first + g) * kGroupDepth;
    const Group group = load_group(row, k, args.depth);
    const auto line_of = [&](const Levels& levels) {
      return Line{levels.scale * outer_scale, -(levels.min * outer_min)};
    };
    const float scale = in_levels(lines[g].scale, outer_scale), min = in_levels(-lines[g].low, outer_min);
    const Levels near = {clamped(__builtin_roundevenf(scale), 1.0f, kLargestInner),
                         clamped(__builtin_roundevenf(min), -kLargestInner, kLargestInner)};
    Levels wide = {1.0f, clamped(__builtin_ceilf(in_levels(-lowest(group), outer_min)), -kLargestInner, kLargestInner)};
    const float reach = (highest(group) + wide.min * outer_min) / kLargestCode;
    wide.scale = clamped(__builtin_ceilf(in_levels(reach, outer_scale)), 1.0f, kLargestInner);
    const Levels chosen = error_of(group, line_of(near)) <= error_of(group, line_of(wide)) ? near : wide;
    const int64_t place = n * num_groups + first + g;
    args.scales[place] = static_cast<int8_t>(chosen.scale);
    args.mins[place] = static_cast<int8_t>(chosen.min);
    const Line line = line_of(chosen);
    int8_t codes[kGroupDepth];
    for (int i = 0; i < kVectors; ++i) {
      const F32 values = codes_of(group.values[i], line, inverse_of(line.scale));
      store_bytes(codes + i * kLanes, nearest(values));
    }
    __builtin_memcpy(args.codes + n * args.depth + k, codes, static_cast<size_t>(min64(kGroupDepth, args.depth - k)));
  }
}

template <class T>
void quantize_nibble_row(const QuantizeNibblesArgs& args, int64_t n) {
  const T* row = static_cast<const T*>(args.weight) + n * args.weight_stride;
  const int64_t num_groups = ceil_div(args.depth, kGroupDepth);
  for (int64_t first = 0; first < num_groups; first += args.outer_groups) {
    quantize_run(args, row, n, first, args.outer_groups);
  }
}

inline float rounded_to_bf16(float value) { return rounded_to<bf16>(broadcast(value))[0]; }

template <class T>
void quantize_byte_row(const QuantizeBytesArgs& args, int64_t n) {
  constexpr int kZero = 128;
  const T* row = static_cast<const T*>(args.weight) + n * args.weight_stride;
  const int64_t num_groups = ceil_div(args.depth, kGroupDepth);
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t k = g * kGroupDepth, size = min64(kGroupDepth, args.depth - k);
    const float scale = rounded_to_bf16(largest_magnitude(row + k, size) / kLargestInner);
    store_n(args.scales + n * num_groups + g, broadcast(scale), 1);
    const F32 inverse = broadcast(inverse_of(scale)), most = broadcast(kLargestInner);
    int8_t codes[kGroupDepth];
    for (int64_t i = 0; i < kGroupDepth; i += kLanes) {
      const F32 levels = scaled(load_n(row + k + i, max64(0, size - i)), inverse);
      store_bytes(codes + i, nearest(minimum(most, maximum(-most, levels))));
    }
    uint8_t* to = args.codes + n * args.depth + k;
    for (int64_t i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(codes[i] + kZero);
  }
}

}  // namespace

void quantize_nibbles(const QuantizeNibblesArgs& args) {
  parallel_for(args.num_rows, [&](int64_t row) {
    args.dtype == DType::kFloat32 ? quantize_nibble_row<float>(args, row) : quantize_nibble_row<bf16>(args, row);
  });
}

void quantize_bytes(const QuantizeBytesArgs& args) {
  parallel_for(args.num_rows, [&](int64_t row) {
    args.dtype == DType::kFloat32 ? quantize_byte_row<float>(args, row) : quantize_byte_row<bf16>(args, row);
  });
}

}  // namespace shardline::SHARDLINE_ISA
