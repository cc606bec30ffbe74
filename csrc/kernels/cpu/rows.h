// Passes over the rows of a matrix: sums along a row, and writing a row.
#pragma once

#include "loops.h"
#include "scratch.h"

namespace transformer_ops::cpu {
namespace {

// Sums in double, lane by lane.
template <class V>
class LaneSum {
 public:
  TRANSFORMER_OPS_INLINE void add(V x) {
    low_.add(x.low);
    high_.add(x.high);
  }
  TRANSFORMER_OPS_INLINE double total() const { return low_.total() + high_.total(); }

 private:
  LaneSum<decltype(V::low)> low_, high_;
};

template <class T>
class LaneSum<Vec<T>> {
 public:
  TRANSFORMER_OPS_INLINE void add(Vec<T> x) { lanes_ += __builtin_convertvector(x.native, Lanes); }
  TRANSFORMER_OPS_INLINE double total() const {
    double parts[kLanes];
    memcpy(parts, &lanes_, sizeof(parts));
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
    }
    return parts[0];
  }

 private:
  static constexpr int kLanes = Vec<T>::kLanes;
  using Lanes = typename VectorsOf<Acc<T>>::Wide;
  Lanes lanes_ = {};
};

// Products of 16-bit numbers are exact in float, so that blocks of them may be added in float;
// those of float are not, and go on in double at once.
template <class T>
constexpr bool kSumsInAcc = sizeof(T) == 2;
template <class T>
constexpr int64_t kSumBlock = kSumsInAcc<T> ? kBlock : Wide<T>::kLanes;

// Sum of f(i, lanes) over the vectors of a row; f gives zero in lanes outside of the row.
template <class T, class F>
TRANSFORMER_OPS_INLINE double row_sum(int64_t h, F f) {
  constexpr int64_t kLanes = Vec<T>::kLanes, kWide = Wide<T>::kLanes;
  LaneSum<Wide<T>> total;
  LaneSum<Vec<T>> rest;
  int64_t i = 0;
  while (i + kWide <= h) {
    Wide<T> sum = f(i, WideLanes());
    const int64_t end = smaller(i + kSumBlock<T>, h);
    for (i += kWide; i + kWide <= end; i += kWide) sum = sum + f(i, WideLanes());
    if constexpr (kSumsInAcc<T>) {
      rest.add(fold(sum));
    } else {
      total.add(sum);
    }
  }
  for (; i < h; i += kLanes) rest.add(f(i, FirstLanes{smaller(kLanes, h - i)}));
  return total.total() + rest.total();
}

// Two sums at once: f(i, lanes, first, second) sets both summands.
struct TwoSums {
  double first, second;
};

template <class T, class F>
TRANSFORMER_OPS_INLINE TwoSums row_two_sums(int64_t h, F f) {
  constexpr int64_t kLanes = Vec<T>::kLanes, kWide = Wide<T>::kLanes;
  LaneSum<Wide<T>> first, second;
  LaneSum<Vec<T>> rest_a, rest_b;
  int64_t i = 0;
  while (i + kWide <= h) {
    Wide<T> a, b;
    f(i, WideLanes(), a, b);
    const int64_t end = smaller(i + kSumBlock<T>, h);
    for (i += kWide; i + kWide <= end; i += kWide) {
      Wide<T> more_a, more_b;
      f(i, WideLanes(), more_a, more_b);
      a = a + more_a;
      b = b + more_b;
    }
    if constexpr (kSumsInAcc<T>) {
      rest_a.add(fold(a));
      rest_b.add(fold(b));
    } else {
      first.add(a);
      second.add(b);
    }
  }
  for (; i < h; i += kLanes) {
    Vec<T> a, b;
    f(i, FirstLanes{smaller(kLanes, h - i)}, a, b);
    rest_a.add(a);
    rest_b.add(b);
  }
  return {first.total() + rest_a.total(), second.total() + rest_b.total()};
}

template <int64_t kCount, class T>
TRANSFORMER_OPS_INLINE void prefetch(const T* p) {
  const auto* bytes = reinterpret_cast<const char*>(p);
  for (int64_t i = 0; i < kCount * static_cast<int64_t>(sizeof(T)); i += 64) {
    __builtin_prefetch(bytes + i);
  }
}

// y[i] = f(i, lanes). Meanwhile the next rows of the inputs, which follow these, are fetched:
// without it, a kernel that goes over a row several times would alternate between waiting for
// memory and computing. Past the last row the fetch does nothing useful.
template <class T, class F, class... In>
TRANSFORMER_OPS_INLINE void write_row(T* y, int64_t h, bool stream, F f, const In*... inputs) {
  constexpr int64_t kLanes = Vec<T>::kLanes, kWide = Wide<T>::kLanes;
  int64_t i = 0;
  for (; i + kWide <= h; i += kWide) {
    (prefetch<kWide>(inputs + h + i), ...);
    store(y + i, f(i, WideLanes()), WideLanes(), stream);
  }
  for (; i < h; i += kLanes) {
    const FirstLanes lanes{smaller(kLanes, h - i)};
    store(y + i, f(i, lanes), lanes);
  }
}

// A choice made when compiling, as an argument.
template <bool value>
struct Bool {
  static constexpr bool kValue = value;
};

// f(whether rows of h of `out` are streamed)
template <class T, class F>
TRANSFORMER_OPS_INLINE void with_streaming(const T* out, int64_t rows, int64_t h, F f) {
  const int64_t row_bytes = h * static_cast<int64_t>(sizeof(T));
  const bool stream = streams(out, rows * row_bytes, row_bytes);
  f(stream);
  if (stream) finish_streaming();
}

}  // namespace
}  // namespace transformer_ops::cpu
