// Loops over arrays, a vector at a time, with streaming stores and prefetching.
#pragma once

#include "wide.h"

namespace transformer_ops::cpu {
namespace {

// Results of at least this size for one thread bypass the caches: they would be evicted before they
// are read, and an ordinary store first reads the memory that it overwrites.
constexpr int64_t kStreamBytes = int64_t{8} << 20;

TRANSFORMER_OPS_INLINE bool aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0;
}

// Should an output made of runs of `run_bytes` be streamed?
TRANSFORMER_OPS_INLINE bool streams(const void* out, int64_t bytes, int64_t run_bytes) {
  return bytes >= kStreamBytes && aligned(out) && run_bytes % kVectorBytes == 0;
}

// Streaming stores are weakly ordered, so this must be called before other threads may read.
TRANSFORMER_OPS_INLINE void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Prefetches kCount elements.
template <int64_t kCount, class T>
TRANSFORMER_OPS_INLINE void prefetch(const T* p) {
  const auto* bytes = reinterpret_cast<const char*>(p);
  for (int64_t i = 0; i < kCount * static_cast<int64_t>(sizeof(T)); i += 64) {
    __builtin_prefetch(bytes + i);
  }
}

// Calls f(i, lanes) for the consecutive vectors of an array of n elements.
template <class T, class F>
TRANSFORMER_OPS_INLINE void for_vectors(int64_t n, F f) {
  int64_t i = 0;
  for (; i + Vec<T>::kLanes <= n; i += Vec<T>::kLanes) f(i, AllLanes());
  if (i < n) f(i, FirstLanes{n - i});
}
// The same, with wide vectors as long as they fit.
template <class T, class F>
TRANSFORMER_OPS_INLINE void for_wide_vectors(int64_t n, F f) {
  int64_t i = 0;
  for (; i + Wide<T>::kLanes <= n; i += Wide<T>::kLanes) f(i, WideLanes());
  for (; i < n; i += Vec<T>::kLanes) f(i, FirstLanes{smaller(Vec<T>::kLanes, n - i)});
}

// ---- out[i] = f(in[i]...) ----

template <class T, class F, class... In>
__attribute__((noinline)) void map_rest(T* out, int64_t n, F f, const In*... in) {
  for_vectors<T>(
      n, [&](int64_t i, auto lanes)
             __attribute__((always_inline)) { store(out + i, f(load(in + i, lanes)...), lanes); });
}

// Processes whole wide vectors; returns the number of elements processed.
template <class T, class F, class... In>
TRANSFORMER_OPS_INLINE int64_t map_wide(T* out, int64_t n, bool stream, F f, const In*... in) {
  int64_t i = 0;
  for (; i + Wide<T>::kLanes <= n; i += Wide<T>::kLanes) {
    store(out + i, f(load(in + i, AnyOrder())...), AnyOrder(), stream);
  }
  return i;
}

template <class T, class F, class... In>
void map(T* out, int64_t n, F f, const In*... in) {
  const bool stream = n * static_cast<int64_t>(sizeof(T)) >= kStreamBytes;
  int64_t done = 0;
  if (stream) {
    const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out));
    done = (-address & (kVectorBytes - 1)) / static_cast<int64_t>(sizeof(T));
    map_rest(out, done, f, in...);
  }
  done += map_wide(out + done, n - done, stream, f, (in + done)...);
  map_rest(out + done, n - done, f, (in + done)...);
  if (stream) finish_streaming();
}

// ---- the same with one bit an element: out[i] = f(in[i]..., bit), where f may change the bit ----

// The bits of kBitBlock elements.
constexpr int64_t kBitBlock = 256;
struct BitBlock {
  uint64_t word[kBitBlock / 64];
};

// f processes a vector and its bits. before(start, count, block) provides the bits of the next
// `count` elements, and after(start, count, block) receives them.
template <class T, class F, class Before, class After, class... In>
void map_bits(T* out, int64_t n, F f, Before before, After after, const In*... in) {
  const bool stream = streams(out, n * static_cast<int64_t>(sizeof(T)), kVectorBytes);
  constexpr int64_t kLanes = Vec<T>::kLanes;
  constexpr uint64_t kLaneBits = (uint64_t{1} << kLanes) - 1;
  for (int64_t start = 0; start < n; start += kBitBlock) {
    const int64_t count = smaller(kBitBlock, n - start);
    BitBlock block;
    before(start, count, block);
    for (int64_t word = 0; 64 * word < count; ++word) {
      const int64_t first = start + 64 * word, length = smaller(64, n - first);
      const uint64_t given = block.word[word];
      uint64_t result = 0;
      const auto apply = [&](int64_t i, auto lanes) __attribute__((always_inline)) {
        uint64_t bits = given >> i & kLaneBits;
        const Vec<T> y = f(load(in + first + i, lanes)..., bits);
        result |= (bits & kLaneBits) << i;
        return y;
      };
      if (length == 64) {
        for (int64_t i = 0; i < 64; i += 2 * kLanes) {
          const Vec<T> low = apply(i, AllLanes());
          const Vec<T> high = apply(i + kLanes, AllLanes());
          store_two(out + first + i, low, high, stream);
        }
      } else {
        for_vectors<T>(
            length, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
              store(out + first + i, apply(i, lanes), lanes);
            });
      }
      block.word[word] = result;
    }
    after(start, count, block);
  }
  if (stream) finish_streaming();
}

// Reads the bits of a mask from `start` on, a multiple of 8.
TRANSFORMER_OPS_INLINE void read_bits(const uint8_t* mask, int64_t start, int64_t count,
                                      BitBlock& block) {
  if (count == kBitBlock) {
    memcpy(&block, mask + start / 8, sizeof(block));
  } else {
    memcpy(&block, mask + start / 8, static_cast<size_t>((count + 7) / 8));
  }
}

// Writes the bits of a mask; the last byte is padded with zeros.
TRANSFORMER_OPS_INLINE void write_bits(uint8_t* mask, int64_t start, int64_t count,
                                       const BitBlock& block) {
  if (count == kBitBlock) {
    memcpy(mask + start / 8, &block, sizeof(block));
    return;
  }
  memcpy(mask + start / 8, &block, static_cast<size_t>((count + 7) / 8));
  if (count % 8 != 0) mask[(start + count) / 8] &= static_cast<uint8_t>((1u << (count % 8)) - 1);
}

// Reads 64 bits from any bit on; it reads no byte beyond the last one.
TRANSFORMER_OPS_INLINE uint64_t bits_from(const uint8_t* mask, int64_t bit, int64_t last_byte) {
  const int64_t byte = bit / 8, shift = bit % 8;
  uint64_t bits = 0, next = 0;
  if (byte + 8 <= last_byte) {
    memcpy(&bits, mask + byte, 8);
    next = mask[byte + 8];
  } else {
    for (int64_t i = byte; i <= last_byte; ++i) {
      if (i < byte + 8) {
        bits |= static_cast<uint64_t>(mask[i]) << (8 * (i - byte));
      } else {
        next = mask[i];
      }
    }
  }
  return bits >> shift | (shift == 0 ? 0 : next << (64 - shift));
}

}  // namespace
}  // namespace transformer_ops::cpu
