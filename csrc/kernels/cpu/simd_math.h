// exp, tanh, reciprocal and more on vectors. The formulas of math.h call these for a Vec or a Wide.
//
// float: within about 1 ulp on the whole range. BFloat16: results need 9 bits, so a shorter
// polynomial is good to 18. double: the C library, lane by lane.
#pragma once

#include "simd_ops.h"

namespace transformer_ops::cpu {
namespace {

// 1 / x for normal x whose reciprocal is normal.
template <class V>
TRANSFORMER_OPS_INLINE V reciprocal_of(V x) {
  const V one(1);
#if defined(__AVX512F__)
  if constexpr (!kDouble<V>) {
    const V r = near_reciprocal(x);
    return r + r * (one - x * r);
  }
#endif
  return one / x;
}
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> reciprocal(Vec<T> x) {
  return reciprocal_of(x);
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> reciprocal(Pair<V> x) {
  return reciprocal_of(x);
}

// sigmoid(x) and y sigmoid(x), from e = exp(-|x|). In float, fused operations recover what rounding
// 1 + e, its reciprocal and the product lose: the result is as accurate as a true quotient.
template <class V>
constexpr bool kCompensated =
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    __is_same(typename V::Element, float);
#else
    false;
#endif

template <class V>
TRANSFORMER_OPS_INLINE V rough_reciprocal(V x) {
#if defined(__AVX512F__)
  if constexpr (!kDouble<V>) return near_reciprocal(x);
#endif
  return V(1) / x;
}

// 1 / (1 + e) as an unevaluated sum.
template <class V>
struct SplitReciprocal {
  V high, low;
};
template <class V>
TRANSFORMER_OPS_INLINE SplitReciprocal<V> reciprocal_of_one_plus(V e) {
  const V one(1), r = rough_reciprocal(one + e);
  return {r, r * ((one - r) - e * r)};
}

template <class V>
TRANSFORMER_OPS_INLINE math::SigmoidParts<V> sigmoid_parts_of(V x, V e) {
  const V one(1);
  if constexpr (kCompensated<V>) {
    const auto [high, low] = reciprocal_of_one_plus(e);
    const V d = high + low, tail = fused(e, high, e * low);
    return {select_negative(x, tail, d), select_negative(x, d, tail)};
  } else if constexpr (kDouble<V>) {
    const V tail = e / (one + e), d = one - tail;
    return {select_negative(x, tail, d), select_negative(x, d, tail)};
  } else {
    const V d = reciprocal(one + e), tail = e * d;
    return {select_negative(x, tail, d), select_negative(x, d, tail)};
  }
}
template <class T>
TRANSFORMER_OPS_INLINE math::SigmoidParts<Vec<T>> sigmoid_parts(Vec<T> x, Vec<T> e) {
  return sigmoid_parts_of(x, e);
}
template <class V>
TRANSFORMER_OPS_INLINE math::SigmoidParts<Pair<V>> sigmoid_parts(Pair<V> x, Pair<V> e) {
  return sigmoid_parts_of(x, e);
}

template <class V>
TRANSFORMER_OPS_INLINE V times_sigmoid_of(V y, V x, V e) {
  const V one(1), factor = select_negative(x, e, one);
  if constexpr (kCompensated<V>) {
    const auto [high, low] = reciprocal_of_one_plus(e);
    // The bound prevents a product of infinity and a correction of zero.
    const V bounded = at_most(y, 1e30), product = bounded * factor;
    const V lost = bounded * factor - product;
    return fused(y * factor, high, fused(product, low, lost * high));
  } else if constexpr (kDouble<V>) {
    return y * factor / (one + e);
  } else {
    return y * factor * reciprocal(one + e);
  }
}
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> times_sigmoid(Vec<T> y, Vec<T> x, Vec<T> e) {
  return times_sigmoid_of(y, x, e);
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> times_sigmoid(Pair<V> y, Pair<V> x, Pair<V> e) {
  return times_sigmoid_of(y, x, e);
}

template <class V>
TRANSFORMER_OPS_INLINE V polynomial(V, float c) {
  return V(c);
}
// c0 + c1 x + c2 x^2 ...
template <class V, class... Rest>
TRANSFORMER_OPS_INLINE V polynomial(V x, float c, Rest... rest) {
  return polynomial(x, rest...) * x + V(c);
}

// The integer nearest to x, |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
template <class V>
TRANSFORMER_OPS_INLINE V nearest_integer(V x) {
  const V shifter(12582912.0f);
  return (x + shifter) - shifter;
}

// x = k ln 2 + r with |r| <= ln(2) / 2, for |k| < 2^14. ln 2 has the two parts of Cephes expf:
// products of the first one with k are exact.
template <class V>
struct ExpReduction {
  V k, r;
};
template <class V>
TRANSFORMER_OPS_INLINE ExpReduction<V> reduce_exp(V x) {
  const V k = nearest_integer(x * V(1.44269504f));
  const V r = x - k * V(0.693359375f);
  return {k, r - k * V(-2.12194440e-4f)};
}

// 2^f for |f| <= 1/2. The coefficients minimize the largest relative error: 1.6e-8, or 3e-6.
template <class V>
TRANSFORMER_OPS_INLINE V exp2_of_fraction(V f) {
  if constexpr (kShort<V>) {
    return polynomial(f, 1.0f, 0.69312418f, 0.24024101f, 0.05590674f, 0.00958282f);
  } else {
    return polynomial(f, 1.0f, 6.93147182e-01f, 2.40226477e-01f, 5.55033237e-02f, 9.61843785e-03f,
                      1.33989262e-03f, 1.53533198e-04f);
  }
}

// Results below the normal range are flushed to zero.
template <class V>
TRANSFORMER_OPS_INLINE V exp2_of_nonpositive(V t) {
  if constexpr (kDouble<V>) {
    return each_lane(t, [](double v) { return ::exp2(v); });
  } else {
    // The lowest bits of the sum are the exponent of 2^k; for k = -127 they are that of zero.
    const V shifter(12582912.0f + 127.0f);
    t = at_least(t, -127.0);
    const V shifted = t + shifter;
    return exp2_of_fraction(t - (shifted - shifter)) * power_from_low_bits(shifted);
  }
}

// The other coefficients minimize the error on |r| <= ln(2) / 2: 4e-9.
template <class V>
TRANSFORMER_OPS_INLINE V exp_of_nonpositive(V x) {
  if constexpr (kDouble<V>) {
    return each_lane(x, [](double v) { return ::exp(v); });
  } else if constexpr (kShort<V>) {
    const V t = at_least(x * V(1.44269504f), -151.0);
    const V k = nearest_integer(t);
    return scale_by_power(exp2_of_fraction(t - k), k);
  } else {
    const auto [k, r] = reduce_exp(at_least(x, -104.0));
    const V p =
        polynomial(r, 1.0f, 1.0f, 0.49999994f, 0.16666521f, 0.04166839f, 0.00836875f, 0.00138145f);
    return scale_by_power(p, k);
  }
}

// tanh |x| = u / (u + 2) with u = exp(2 |x|) - 1, which is accurate also for small x.
template <class V>
TRANSFORMER_OPS_INLINE V tanh_of(V x) {
  if constexpr (kDouble<V>) {
    return each_lane(x, [](double v) { return ::tanh(v); });
  } else {
    // Beyond 10 the result is 1.
    const auto [k, r] = reduce_exp(V(2.0f) * at_most(abs(x), 10.0));
    const V one(1.0f);
    const V p = polynomial(r, 0.49999994f, 0.16666521f, 0.04166839f, 0.00836875f, 0.00138145f);
    const V power = scale_by_power(one, k);
    const V u = (p * (r * r) + r) * power + (power - one);
    return copy_sign(u * reciprocal(u + V(2.0f)), x);
  }
}
template <class T>
TRANSFORMER_OPS_INLINE Vec<T> tanh(Vec<T> x) {
  return tanh_of(x);
}
template <class V>
TRANSFORMER_OPS_INLINE Pair<V> tanh(Pair<V> x) {
  return tanh_of(x);
}

// The share beyond t, divided by exp(-t^2 / 2), falls like 1 / (t + 3); the remaining factor is a
// polynomial of (t - 3) / (t + 3). The coefficients minimize the largest error relative to 1 + t^2
// / 4: 5e-9, or 6e-6. In float, a series around 1/2 loses less to rounding for small t.
template <class V>
TRANSFORMER_OPS_INLINE math::Normal<V> normal_of(V t) {
  if constexpr (kDouble<V>) {
    const V e = each_lane(V(-0.5) * (t * t), [](double v) { return ::exp(v); });
    return {V(0.3989422804014327) * e,
            each_lane(t, [](double v) { return math::share_beyond(v); })};
  } else {
    const V square = t * t, e = exp2_of_nonpositive(V(-0.72134752f) * square);
#if defined(__AVX512F__)
    // The bound prevents a product of an infinite sum and its reciprocal, zero.
    const V r = reciprocal(at_most(t, 3.0e38) + V(3.0f));
#else
    const V r = reciprocal(t + V(3.0f));
#endif
    const V q = V(1.0f) - V(6.0f) * r, density = V(0.39894228f) * e;
    if constexpr (kShort<V>) {
      const V p = polynomial(q, 0.729070514f, -0.509377059f, 0.230427143f, -0.0462074078f,
                             -0.0114238422f, 0.0036667237f);
      return {density, e * r * p};
    } else {
      const V p =
          polynomial(q, 0.72908368f, -0.509331925f, 0.230018751f, -0.0472631859f, -0.0104776296f,
                     0.00695868663f, 0.00108636148f, -0.000952445186f, -0.000300025869f);
      const V half(0.5f);
      const V series =
          polynomial(square, 0.398942277f, -0.0664899464f, 0.00996485636f, -0.00113117909f);
      return {density, select(t < half, fused(-t, series, half), e * r * p)};
    }
  }
}
template <class T>
TRANSFORMER_OPS_INLINE math::Normal<Vec<T>> normal(Vec<T> t) {
  return normal_of(t);
}
template <class V>
TRANSFORMER_OPS_INLINE math::Normal<Pair<V>> normal(Pair<V> t) {
  return normal_of(t);
}

#if defined(__AVX512F__)
// The sigmoids of BFloat16, which replace those of math.h. They compute 1 / (1 + 2^n) for n of
// either sign, which takes fewer instructions but would not be accurate enough for float.
template <class V>
TRANSFORMER_OPS_INLINE V reciprocal_of_one_plus_exp2(V n) {
  // 2^f for 0 <= f < 1, within 3e-6.
  const V f = fraction(n);
  const V power =
      polynomial(f, 1.00000262f, 0.693003833f, 0.241442755f, 0.0520114601f, 0.0135341678f);
  const V one(1), sum = one + scale_by_floor(power, n), r = near_reciprocal(sum);
  // The bound prevents a product of an infinite sum and its reciprocal, zero.
  return r + r * (one - at_most(sum, 3.402823466e38) * r);
}

template <class V>
requires kShort<V> TRANSFORMER_OPS_INLINE V times_sigmoid2(V y, V t) {
  return y * reciprocal_of_one_plus_exp2(-t);
}
template <class V>
requires kShort<V> TRANSFORMER_OPS_INLINE V times_sigmoid(V y, V x) {
  return y * reciprocal_of_one_plus_exp2(V(-1.44269504f) * x);
}
template <class V>
requires kShort<V> TRANSFORMER_OPS_INLINE math::SigmoidParts<V> sigmoid2(V t) {
  const V value = reciprocal_of_one_plus_exp2(-t);
  return {value, V(1) - value};
}
template <class V>
requires kShort<V> TRANSFORMER_OPS_INLINE math::SigmoidParts<V> sigmoid(V x) {
  const V value = reciprocal_of_one_plus_exp2(V(-1.44269504f) * x);
  return {value, V(1) - value};
}
// This is an even function: on this side, the difference from 1 loses nothing.
template <class V>
requires kShort<V> TRANSFORMER_OPS_INLINE V sigmoid_slope(V x) {
  const V value = reciprocal_of_one_plus_exp2(V(1.44269504f) * abs(x));
  return value * (V(1) - value);
}
#endif

}  // namespace
}  // namespace transformer_ops::cpu
