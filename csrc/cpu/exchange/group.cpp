#include "exchange/group.h"

#include <algorithm>
#include <cstring>

namespace shardline {
namespace {

float widen(float x) { return x; }
float widen(bf16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
void narrow(float x, float* out) { *out = x; }
void narrow(float x, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  out->bits = static_cast<uint16_t>((x == x ? rounded : bits | 0x400000) >> 16);
}

template <class T>
void add_sources(const std::vector<const char*>& sources, int64_t count, char* out) {
  constexpr int64_t kBlock = 512;
  float total[kBlock];
  const auto element = [&](size_t r, int64_t i) { return widen(reinterpret_cast<const T*>(sources[r])[i]); };
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    for (int64_t i = 0; i < n; ++i) total[i] = element(0, begin + i);
    for (size_t r = 1; r < sources.size(); ++r) {
      for (int64_t i = 0; i < n; ++i) total[i] += element(r, begin + i);
    }
    for (int64_t i = 0; i < n; ++i) narrow(total[i], reinterpret_cast<T*>(out) + begin + i);
  }
}

}  // namespace

void scatter(const char* from, int64_t begin, int64_t end, const GatherPart& part, char* out) {
  while (begin < end) {
    const int64_t row = begin / part.row_bytes, column = begin % part.row_bytes;
    const int64_t run = std::min(part.row_bytes - column, end - begin);
    char* to = out + part.offset_bytes + row * part.stride_bytes + column;
    if (to != from) std::memcpy(to, from, static_cast<size_t>(run));
    from += run;
    begin += run;
  }
}

void sum_in_rank_order(const std::vector<const char*>& sources, int64_t count, DType dtype, char* out) {
  dtype == DType::kFloat32 ? add_sources<float>(sources, count, out) : add_sources<bf16>(sources, count, out);
}

std::string Group::name_ranks(const std::vector<int>& ranks) const {
  std::string names = "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) names += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return names;
}

}  // namespace shardline
