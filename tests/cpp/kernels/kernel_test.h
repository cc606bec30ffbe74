// Code shared by the tests of CPU kernels: arrays of every dtype, and the fixture that runs a test
// for each instruction set of this machine and each dtype.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/kernels/cpu.h"

namespace transformer_ops::cpu {

inline const double kInf = std::numeric_limits<double>::infinity();
inline const double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- element types ----

// Digits and exponents of the 16-bit types, and of the formats in general.
struct Format {
  int bytes, mantissa, min_exponent;
  double epsilon() const { return std::ldexp(1.0, -mantissa); }
};

inline Format format(DType dtype) {
  switch (dtype) {
    case DType::Float32:
      return {4, 23, -126};
    case DType::Float64:
      return {8, 52, -1022};
    case DType::Float16:
      return {2, 10, -14};
    case DType::BFloat16:
      return {2, 7, -126};
  }
  return {};
}

inline double decode16(uint16_t bits, DType dtype) {
  const Format f = format(dtype);
  const int exponent_bits = 15 - f.mantissa;
  const int exponent = (bits >> f.mantissa) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << f.mantissa) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? kNan : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(fraction, f.min_exponent - f.mantissa);
  const int significand = fraction | (1 << f.mantissa);
  return sign * std::ldexp(significand, exponent - 1 + f.min_exponent - f.mantissa);
}

// The nearest number of the format, ties to even.
inline double round_to(double x, DType dtype) {
  if (dtype == DType::Float64 || x == 0 || !std::isfinite(x)) return x;
  if (dtype == DType::Float32) return static_cast<float>(x);
  const Format f = format(dtype);
  const int exponent = std::max(std::ilogb(x), f.min_exponent) - f.mantissa;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
  const double largest = decode16(dtype == DType::Float16 ? 0x7bff : 0x7f7f, dtype);
  return std::abs(rounded) > largest ? std::copysign(kInf, x) : rounded;
}

inline uint16_t encode16(double x, DType dtype) {
  const Format f = format(dtype);
  const uint16_t infinity = dtype == DType::Float16 ? 0x7c00 : 0x7f80;
  if (std::isnan(x)) return infinity | 1;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::abs(round_to(x, dtype));
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), f.min_exponent);
  const auto significand = static_cast<int>(std::ldexp(magnitude, f.mantissa - exponent));
  const int biased = exponent - f.min_exponent;  // the leading 1 adds one more
  return static_cast<uint16_t>(sign | ((biased << f.mantissa) + significand));
}

// n elements of a dtype, in memory of exactly that size, which is not aligned to a vector.
class Array {
 public:
  Array(DType dtype, int64_t n, double fill = 0.0)
      : dtype_(dtype), n_(n), bytes_(format(dtype).bytes), memory_(new char[(n + 1) * bytes_]) {
    for (int64_t i = 0; i < n; ++i) set(i, fill);
  }
  Array(DType dtype, const std::vector<double>& values)
      : Array(dtype, static_cast<int64_t>(values.size())) {
    for (int64_t i = 0; i < n_; ++i) set(i, values[i]);
  }

  void* data() { return memory_.get() + bytes_; }
  int64_t size() const { return n_; }

  double operator[](int64_t i) const {
    const char* p = memory_.get() + (i + 1) * bytes_;
    if (dtype_ == DType::Float64) return read<double>(p);
    if (dtype_ == DType::Float32) return read<float>(p);
    return decode16(read<uint16_t>(p), dtype_);
  }

  void set(int64_t i, double x) {
    char* p = memory_.get() + (i + 1) * bytes_;
    if (dtype_ == DType::Float64) return write(p, x);
    if (dtype_ == DType::Float32) return write(p, static_cast<float>(x));
    write(p, encode16(x, dtype_));
  }

 private:
  template <class T>
  static T read(const char* p) {
    T x;
    std::memcpy(&x, p, sizeof(T));
    return x;
  }
  template <class T>
  static void write(char* p, T x) {
    std::memcpy(p, &x, sizeof(T));
  }

  DType dtype_;
  int64_t n_;
  int bytes_;
  std::unique_ptr<char[]> memory_;
};

inline DType acc_of(DType dtype) {
  return dtype == DType::Float64 ? DType::Float64 : DType::Float32;
}

// ---- the tests run for each instruction set and dtype ----

struct Case {
  const char* isa;
  DType dtype;
};

inline std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* isa : {"default", "avx2", "avx512"}) {
    if (!has_isa(isa)) continue;
    for (DType d : {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16}) {
      all.push_back({isa, d});
    }
  }
  return all;
}

inline std::string case_name(const testing::TestParamInfo<Case>& info) {
  const char* names[] = {"Float32", "Float64", "Float16", "BFloat16"};
  return std::string(info.param.isa) + "_" + names[static_cast<int>(info.param.dtype)];
}

class KernelTest : public testing::TestWithParam<Case> {
 protected:
  // The kernel of a slot for this test's instruction set.
  template <class Slot>
  typename Slot::Pointer on(const Slot& slot) const {
    return slot.function_of(find_for(GetParam().isa, slot.name()));
  }

  const DType dtype = GetParam().dtype;
  const DType acc = acc_of(dtype);

  Array random(int64_t n, double scale = 3.0) {
    std::normal_distribution<double> normal(0.0, scale);
    Array array(dtype, n);
    for (int64_t i = 0; i < n; ++i) array.set(i, normal(generator_));
    return array;
  }
  Array random_acc(int64_t n, double shift = 0.0) {
    std::normal_distribution<double> normal(shift, 1.0);
    Array array(acc, n);
    for (int64_t i = 0; i < n; ++i) array.set(i, normal(generator_));
    return array;
  }

  // Allows one rounding to the dtype, and `slack` roundings of numbers of that size in the compute
  // type.
  void expect_near(double actual, double expected, double slack, const char* what, int64_t i) {
    const double rounded = round_to(expected, dtype);
    if (std::isnan(rounded) || std::isinf(rounded)) {
      EXPECT_EQ(std::isnan(actual), std::isnan(rounded)) << what << " " << i << " " << actual;
      if (std::isinf(rounded)) {
        EXPECT_EQ(actual, rounded) << what << " " << i;
      }
      return;
    }
    const Format f = format(dtype);
    const double smallest = std::ldexp(1.0, f.min_exponent);
    const double own = dtype == acc ? 0.0 : f.epsilon() * std::max(std::abs(expected), smallest);
    // The last term is for subnormal intermediate results, which may be flushed, and because
    // std::exp and the numeric derivatives of this test are not exact in Float64.
    const double tolerance = own + slack * compute_epsilon() + 1e-36;
    EXPECT_LE(std::abs(actual - expected), tolerance) << what << " " << i << " want " << expected;
  }

  double compute_epsilon() const { return dtype == DType::Float64 ? 1e-10 : 6e-8; }

 private:
  std::mt19937 generator_{1234};
};

inline const int64_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 33, 255, 511, 512, 513, 1500};

inline const Activation kActivations[] = {Activation::GELU,  Activation::ExactGELU,
                                          Activation::QGELU, Activation::ReLU,
                                          Activation::SReLU, Activation::SiLU};

// Its tests name members where a lambda uses them: clang before 16 captures no structured bindings.
struct RowShape {
  int64_t rows, h;
};
inline const RowShape kRowShapes[] = {{0, 8},  {1, 1},   {3, 2},    {5, 7},     {70, 16},
                                      {2, 65}, {3, 513}, {2, 2048}, {130, 300}, {1, 5000}};

}  // namespace transformer_ops::cpu
