// Passes over the rows of a matrix: sums along a row, and writing a row.
#pragma once

#include "loops.h"
#include "scratch.h"

namespace transformer_ops::cpu {
namespace {

template <int64_t bytes>
struct DoublesOf {
  typedef double type __attribute__((vector_size(bytes)));
};

// Adds by halves, because a loop over the lanes would wait for each addition.
template <int64_t bytes>
TRANSFORMER_OPS_INLINE double lane_sum(const typename DoublesOf<bytes>::type& lanes) {
  if constexpr (bytes == 16) {
    return lanes[0] + lanes[1];
  } else {
    typename DoublesOf<bytes / 2>::type low, high;
    memcpy(&low, &lanes, bytes / 2);
    memcpy(&high, reinterpret_cast<const char*>(&lanes) + bytes / 2, bytes / 2);
    return lane_sum<bytes / 2>(low + high);
  }
}

// Sums in double for each lane.
template <class T>
class LaneSums {
 public:
  TRANSFORMER_OPS_INLINE void add(Vec<T> x) { lanes_ += __builtin_convertvector(x.native, Lanes); }
  TRANSFORMER_OPS_INLINE double total() const { return lane_sum<sizeof(Lanes)>(lanes_); }

 private:
  using Lanes = typename VectorsOf<Acc<T>>::Wide;
  Lanes lanes_ = {};
};

// The number of elements that are added in acc before the sum continues in double. Products of
// 16-bit numbers are exact in float. For other types only a few are added in a lane: eight
// additions, averaged over the lanes, lose less than rounding the result to float.
template <class T>
constexpr int64_t kSumBlock = sizeof(T) == 2 ? kBlock : 8 * Wide<T>::kLanes;

// The sum of f(i, lanes) over the vectors of a row; f returns zero in lanes outside the row.
template <class T, class F>
TRANSFORMER_OPS_INLINE double row_sum(int64_t h, F f) {
  constexpr int64_t kLanes = Vec<T>::kLanes, kWide = Wide<T>::kLanes;
  LaneSums<T> sums;
  int64_t i = 0;
  while (i + kWide <= h) {
    Wide<T> sum = f(i, WideLanes());
    const int64_t end = smaller(i + kSumBlock<T>, h);
    for (i += kWide; i + kWide <= end; i += kWide) sum = sum + f(i, WideLanes());
    sums.add(fold(sum));
  }
  for (; i < h; i += kLanes) sums.add(f(i, FirstLanes{smaller(kLanes, h - i)}));
  return sums.total();
}

// Two sums at once: f(i, lanes, first, second) sets both summands.
struct TwoSums {
  double first, second;
};

template <class T, class F>
TRANSFORMER_OPS_INLINE TwoSums row_two_sums(int64_t h, F f) {
  constexpr int64_t kLanes = Vec<T>::kLanes, kWide = Wide<T>::kLanes;
  LaneSums<T> first, second;
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
    first.add(fold(a));
    second.add(fold(b));
  }
  for (; i < h; i += kLanes) {
    Vec<T> a, b;
    f(i, FirstLanes{smaller(kLanes, h - i)}, a, b);
    first.add(a);
    second.add(b);
  }
  return {first.total(), second.total()};
}

// Writes y[i] = f(i, lanes), and prefetches the following rows of the inputs. Without that, a
// kernel with several passes over a row would alternate between waiting for memory and computing.
// Past the last row the prefetch does nothing useful.
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

// Numbers of the columns, such as gamma, in AnyOrder.
template <class T>
class InAnyOrder {
 public:
  InAnyOrder(const Acc<T>* numbers, int64_t h)
      : numbers_(numbers), copy_(kReorders<T> && numbers != nullptr ? h : 0) {
    if constexpr (kReorders<T>) {
      if (numbers == nullptr) return;
      Acc<T>* copy = copy_.data();
      for_wide_vectors<T>(
          h, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
            store_acc(copy + i, load_acc<T>(numbers + i, any_order(lanes)), lanes);
          });
      numbers_ = copy;
    }
  }
  const Acc<T>* data() const { return numbers_; }

 private:
  const Acc<T>* numbers_;
  Scratch<Acc<T>> copy_;
};

// A compile-time choice as an argument.
template <bool value>
struct Bool {
  static constexpr bool kValue = value;
};

// Calls f(are rows of h elements of `out` streamed?).
template <class T, class F>
TRANSFORMER_OPS_INLINE void with_streaming(const T* out, int64_t rows, int64_t h, F f) {
  const int64_t row_bytes = h * static_cast<int64_t>(sizeof(T));
  const bool stream = streams(out, rows * row_bytes, row_bytes);
  f(stream);
  if (stream) finish_streaming();
}

}  // namespace
}  // namespace transformer_ops::cpu
