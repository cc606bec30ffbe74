// Numbers of any dtype in one of the two types for which rounding and encoding are compiled:
// bfloat16 as they are, all others as floats, which 16 bits become exactly, and 64 as encoding.h
// has it.
#pragma once

#include "kernels/encoding.h"
#include "scratch.h"

namespace transformer_ops::cpu {
namespace {

struct BFloat16s {
  using Number = BFloat16;
  const BFloat16* x;
  int64_t room(int64_t) const { return 0; }
  const BFloat16* read(int64_t first, int64_t, float*) const { return x + first; }
};

struct AsFloats {
  using Number = float;
  DType dtype;
  const void* x;
  int64_t room(int64_t n) const { return dtype == DType::Float32 ? 0 : n; }
  __attribute__((noinline)) const float* read(int64_t first, int64_t n, float* buffer) const {
    if (dtype == DType::Float32) return as<float>(x) + first;
    if (dtype == DType::Float16) {
      to_acc(as<Half>(x) + first, buffer, n);
    } else if (dtype == DType::BFloat16) {
      to_acc(as<BFloat16>(x) + first, buffer, n);
    } else {
      const double* const from = as<double>(x) + first;
      for (int64_t i = 0; i < n; ++i) buffer[i] = encoding::to_odd(from[i]);
    }
    return buffer;
  }
};

// Reads at most `most` numbers at a time; they stay until the next call.
template <class Source>
class Reader {
 public:
  Reader(const Source& source, int64_t most) : source_(source), buffer_(source.room(most)) {}
  auto operator()(int64_t first, int64_t n) { return source_.read(first, n, buffer_.data()); }

 private:
  Source source_;
  Scratch<float> buffer_;
};

// Calls f(numbers, first, count) for pieces of n numbers.
template <class Source, class F>
TRANSFORMER_OPS_INLINE void for_pieces(const Source& source, int64_t n, F f) {
  constexpr int64_t kPiece = 4096;  // stays in the first cache
  Reader<Source> read(source, smaller(n, kPiece));
  for (int64_t i = 0; i < n; i += kPiece) {
    const int64_t count = smaller(kPiece, n - i);
    f(read(i, count), i, count);
  }
}

template <class F>
void with_numbers(DType dtype, const void* x, F f) {
  if (dtype == DType::BFloat16) return f(BFloat16s{as<BFloat16>(x)});
  f(AsFloats{dtype, x});
}

}  // namespace
}  // namespace transformer_ops::cpu
