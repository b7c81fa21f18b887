// bf16 weights in three quarters of their bytes, bit for bit: most of a model's weights have one of 15 exponents.
//
// What is stored of a piece of memory: a header, and behind it, at the end, for each 64 words a block of 96 bytes: 64
// codes of 4 bits of their exponents (first those of words 0 to 31), then 64 bytes with their signs and mantissas. Code
// c < 15 is the exponent `base` + c, and 15 is the exponent 0. The header has the base, and the words that have another
// exponent.
#pragma once

#include <cstddef>

namespace shardline {

constexpr size_t kBlockWords = 64;
constexpr size_t kBlockBytes = kBlockWords / 2 + kBlockWords;
// What is stored is a multiple of this, as direct reads need it.
constexpr size_t kStoredUnit = 4096;

// Writes what is stored of `size` bytes of memory, a multiple of kStoredUnit, and returns how many bytes that is; 0: it
// would be more than 7/8 of them.
size_t shorten_exponents(const unsigned char* memory, size_t size, unsigned char* stored);

// Restores `size` bytes of memory, at whose end lies what is stored of them. Returns false if it is not that.
bool restore_exponents(unsigned char* memory, size_t size, size_t stored_size);

}  // namespace shardline
