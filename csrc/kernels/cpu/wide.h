// Several vectors side by side.
//
// A chain of dependent operations waits for each result, so kernels process a few vectors in
// lockstep: every operator here processes all of them before the next one starts.
#pragma once

#include "lanes.h"

namespace transformer_ops::cpu {
namespace {

template <class M>
struct PairMask {
  M low, high;
};

template <class V>
struct Pair {
  using Element = typename V::Element;
  using One = typename V::One;
  static constexpr int64_t kLanes = 2 * V::kLanes;

  V low, high;

  Pair() = default;
  TRANSFORMER_OPS_INLINE Pair(V a, V b) : low(a), high(b) {}
  TRANSFORMER_OPS_INLINE Pair(One x) : low(x), high(x) {}
  TRANSFORMER_OPS_INLINE explicit Pair(Acc<Element> x) : low(x), high(x) {}

#define TRANSFORMER_OPS_OPERATOR(op)                               \
  friend TRANSFORMER_OPS_INLINE Pair operator op(Pair a, Pair b) { \
    return {a.low op b.low, a.high op b.high};                     \
  }
  TRANSFORMER_OPS_OPERATOR(+)
  TRANSFORMER_OPS_OPERATOR(-)
  TRANSFORMER_OPS_OPERATOR(*)
  TRANSFORMER_OPS_OPERATOR(/)
#undef TRANSFORMER_OPS_OPERATOR
  friend TRANSFORMER_OPS_INLINE Pair operator-(Pair a) { return {-a.low, -a.high}; }

  // Clang before 17 deduces no arguments of an aggregate.
#define TRANSFORMER_OPS_COMPARISON(op)                                           \
  friend TRANSFORMER_OPS_INLINE auto operator op(Pair a, Pair b) {               \
    return PairMask<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high}; \
  }
  TRANSFORMER_OPS_COMPARISON(<)
  TRANSFORMER_OPS_COMPARISON(<=)
  TRANSFORMER_OPS_COMPARISON(>)
  TRANSFORMER_OPS_COMPARISON(==)
#undef TRANSFORMER_OPS_COMPARISON

  template <class M>
  friend TRANSFORMER_OPS_INLINE Pair select(PairMask<M> mask, Pair a, Pair b) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  }
};

// The registers have room for this number of vectors.
#if defined(__AVX512F__)
template <class T>
using Wide = Pair<Pair<Vec<T>>>;
#else
template <class T>
using Wide = Pair<Vec<T>>;
#endif

struct WideLanes {};

// ---- on one vector, and thereby on all of them ----

template <class V>
constexpr bool kIsOne = __is_same(V, typename V::One);

template <class V>
TRANSFORMER_OPS_INLINE V load_lanes(const typename V::Element* p) {
  if constexpr (kIsOne<V>) {
    return load(p);
  } else {
    using Half = decltype(V::low);
    return {load_lanes<Half>(p), load_lanes<Half>(p + Half::kLanes)};
  }
}
template <class V>
TRANSFORMER_OPS_INLINE V load_acc_lanes(const Acc<typename V::Element>* p) {
  if constexpr (kIsOne<V>) {
    return load_acc<typename V::Element>(p);
  } else {
    using Half = decltype(V::low);
    return {load_acc_lanes<Half>(p), load_acc_lanes<Half>(p + Half::kLanes)};
  }
}

template <class T>
TRANSFORMER_OPS_INLINE Wide<T> load(const T* p, WideLanes) {
  return load_lanes<Wide<T>>(p);
}
template <class T>
TRANSFORMER_OPS_INLINE Wide<T> load_acc(const Acc<T>* p, WideLanes) {
  return load_acc_lanes<Wide<T>>(p);
}

template <class T>
TRANSFORMER_OPS_INLINE void store(T* p, Pair<Vec<T>> x, WideLanes, bool stream) {
  store_two(p, x.low, x.high, stream);
}
template <class T, class V>
TRANSFORMER_OPS_INLINE void store(T* p, Pair<Pair<V>> x, WideLanes lanes, bool stream) {
  store(p, x.low, lanes, stream);
  store(p + Pair<V>::kLanes, x.high, lanes, stream);
}
// Single vectors are few, so they are not streamed.
template <class T, class Lanes>
TRANSFORMER_OPS_INLINE void store(T* p, Vec<T> x, Lanes lanes, bool) {
  store(p, x, lanes);
}
template <class V>
TRANSFORMER_OPS_INLINE void store_acc(Acc<typename V::Element>* p, Pair<V> x, WideLanes lanes) {
  if constexpr (kIsOne<V>) {
    store_acc(p, x.low);
    store_acc(p + V::kLanes, x.high);
  } else {
    store_acc(p, x.low, lanes);
    store_acc(p + V::kLanes, x.high, lanes);
  }
}

// A wide vector whose lanes are in the order that is fastest to load and store. The order is the
// same for all vectors of a type. It is for elementwise functions, and for sums.
struct AnyOrder {};
TRANSFORMER_OPS_INLINE AnyOrder any_order(WideLanes) { return {}; }
TRANSFORMER_OPS_INLINE FirstLanes any_order(FirstLanes lanes) { return lanes; }

// The type whose wide vectors are loaded in another order than that of memory.
#if defined(__AVX512F__)
template <class T>
constexpr bool kReorders = __is_same(T, BFloat16);
#else
template <class T>
constexpr bool kReorders = false;
#endif

// The position of number i of n, if all whole wide vectors are in that order.
template <class T>
struct AnyOrderOf {
  static int64_t place(int64_t i, int64_t n) {
    if (!kReorders<T> || i >= n / Wide<T>::kLanes * Wide<T>::kLanes) return i;
    return i / 32 * 32 + i % 2 * 16 + i % 32 / 2;
  }
};

template <class T>
TRANSFORMER_OPS_INLINE Wide<T> load(const T* p, AnyOrder) {
  return load(p, WideLanes());
}
template <class T, class V>
TRANSFORMER_OPS_INLINE void store(T* p, V x, AnyOrder, bool stream) {
  store(p, x, WideLanes(), stream);
}

template <class T>
TRANSFORMER_OPS_INLINE Wide<T> load_acc(const Acc<T>* p, AnyOrder) {
  return load_acc<T>(p, WideLanes());
}
template <class V>
TRANSFORMER_OPS_INLINE void store_acc(Acc<typename V::Element>* p, V x, AnyOrder) {
  store_acc(p, x, WideLanes());
}

#if defined(__AVX512F__)
// Every second number of 32 is already in place, except for its neighbour's bits below.
TRANSFORMER_OPS_INLINE Pair<Vec<BFloat16>> load_alternating(const BFloat16* p) {
  const Ints both = load_unaligned<Ints>(p);
  return {Vec<BFloat16>((Floats)(both << 16)),
          Vec<BFloat16>((Floats)(both & static_cast<int32_t>(0xffff0000)))};
}
TRANSFORMER_OPS_INLINE void store_alternating(BFloat16* p, Pair<Vec<BFloat16>> x, bool stream) {
  store_native(p, round_to_bfloat16<Order::Alternating>(x.low.native, x.high.native), stream);
}

TRANSFORMER_OPS_INLINE Wide<BFloat16> load(const BFloat16* p, AnyOrder) {
  return {load_alternating(p), load_alternating(p + 32)};
}
TRANSFORMER_OPS_INLINE void store(BFloat16* p, Wide<BFloat16> x, AnyOrder, bool stream) {
  store_alternating(p, x.low, stream);
  store_alternating(p + 32, x.high, stream);
}

// Sixteen of the numbers of two vectors, or the remaining ones:
//   in turn       a0 b0 a1 b1 ... a7 b7     rest  a8 b8 ... a15 b15
//   every second  a0 a2 ... b0 b2 ... b14   rest  a1 a3 ... b1 b3 ... b15
TRANSFORMER_OPS_INLINE Floats in_turn(Floats a, Floats b, bool rest) {
  const int from = rest ? 8 : 0;
  Ints index;
  for (int i = 0; i < 16; ++i) index[i] = from + i / 2 + i % 2 * 16;
  return (Floats)_mm512_permutex2var_ps((__m512)a, (__m512i)index, (__m512)b);
}
TRANSFORMER_OPS_INLINE Floats every_second(Floats a, Floats b, bool rest) {
  Ints index;
  for (int i = 0; i < 16; ++i) index[i] = 2 * i + (rest ? 1 : 0);
  return (Floats)_mm512_permutex2var_ps((__m512)a, (__m512i)index, (__m512)b);
}
TRANSFORMER_OPS_INLINE Pair<Vec<BFloat16>> load_acc_alternating(const float* p) {
  const auto a = load_unaligned<Floats>(p), b = load_unaligned<Floats>(p + 16);
  return {Vec<BFloat16>(every_second(a, b, false)), Vec<BFloat16>(every_second(a, b, true))};
}
TRANSFORMER_OPS_INLINE void store_acc_alternating(float* p, Pair<Vec<BFloat16>> x) {
  store_acc(p, Vec<BFloat16>(in_turn(x.low.native, x.high.native, false)));
  store_acc(p + 16, Vec<BFloat16>(in_turn(x.low.native, x.high.native, true)));
}
template <>
TRANSFORMER_OPS_INLINE Wide<BFloat16> load_acc<BFloat16>(const float* p, AnyOrder) {
  return {load_acc_alternating(p), load_acc_alternating(p + 32)};
}
TRANSFORMER_OPS_INLINE void store_acc(float* p, Wide<BFloat16> x, AnyOrder) {
  store_acc_alternating(p, x.low);
  store_acc_alternating(p + 32, x.high);
}
#endif

template <class V>
TRANSFORMER_OPS_INLINE Pair<V> inside(Pair<V> x, WideLanes) {
  return x;
}

// The sum of the vectors.
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> fold(Vec<T> x) {
  return x;
}
template <class V>
TRANSFORMER_OPS_INLINE typename V::One fold(Pair<V> x) {
  return fold(x.low + x.high);
}

template <class V>
TRANSFORMER_OPS_INLINE Pair<V> where_bits(uint64_t bits, Pair<V> x) {
  return {where_bits(bits, x.low), where_bits(bits >> V::kLanes, x.high)};
}

}  // namespace
}  // namespace transformer_ops::cpu
