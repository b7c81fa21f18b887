// Tile registers of AMX (Sapphire Rapids and later): eight tiles, each of 16 rows of 64 bytes.
#pragma once

#if defined(__AMX_TILE__)

#include <immintrin.h>

#include "simd/vec.h"

namespace shardline::SHARDLINE_ISA {

constexpr int64_t kAmxRows = 16, kAmxRowBytes = 64;

// Compilers do not know that tile loads read memory. This makes what was written to `memory`, and elsewhere, visible.
inline void finish_stores(const void* memory) { __asm__ volatile("" ::"r"(memory) : "memory"); }

// Tiles 0 and 1 are sums of the first 16 rows, 2 and 3 of the others; 4 and 5 are their factors, and 6 and 7 are two
// blocks of 16 columns. With at most 16 rows, tiles 0 to 3 are their sums, 4 has their factors, and 5 to 7 are columns.
inline void configure_tiles(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const bool two = rows > kAmxRows;
  const auto upper = static_cast<uint8_t>(two ? kAmxRows : rows);
  const auto lower = static_cast<uint8_t>(two ? rows - kAmxRows : rows);
  const uint8_t whole = kAmxRows;
  const uint8_t counts[8] = {upper, upper, lower, lower, upper, two ? lower : whole, whole, whole};
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = kAmxRowBytes;
    config.rows[i] = counts[i];
  }
  finish_stores(&config);
  _tile_loadconfig(&config);
}

}  // namespace shardline::SHARDLINE_ISA

#endif
