// Code shared by the tests of norms: the formulas in double, over one matrix and its parameters.
#pragma once

#include "device_test.h"
#include "kernels/norm.h"

namespace transformer_ops::cuda {

// Memory that also knows its values.
class Array : public Buffer {
 public:
  Array(DType dtype, int64_t n, int shift) : Buffer(dtype, n, shift), dtype_(dtype), n_(n) {}

  DType dtype() const { return dtype_; }
  std::vector<double> values() const {
    std::vector<double> values(n_);
    for (int64_t i = 0; i < n_; ++i) values[i] = (*this)[i];
    return values;
  }
  Vector vector(double add = 0.0) const { return {data(), dtype_, add}; }
  Gradient gradient() const { return {data(), dtype_}; }

 private:
  DType dtype_;
  int64_t n_;
};

struct RowStatistics {
  double mean = 0, rstd = 0;
};

inline RowStatistics statistics(Norm norm, const double* row, int64_t h, double eps) {
  RowStatistics s;
  const auto size = static_cast<double>(h);
  double squares = 0;
  if (norm == Norm::LayerNorm) {
    for (int64_t i = 0; i < h; ++i) s.mean += row[i];
    s.mean /= size;
  }
  for (int64_t i = 0; i < h; ++i) squares += (row[i] - s.mean) * (row[i] - s.mean);
  s.rstd = 1 / std::sqrt(squares / (norm == Norm::L2 ? 1.0 : size) + eps);
  return s;
}

class NormTest : public DeviceTest {
 protected:
  // The allowed error of forward and backward, for numbers of size 1.
  const double error = dtype == DType::Float64 ? 1e-13 : 2e-6;

  Array make(int64_t n) const { return make(dtype, n); }
  Array make(DType type, int64_t n) const { return {type, n, GetParam().shift}; }
  Array random(int64_t n) { return random(dtype, n); }
  Array random(DType type, int64_t n) {
    std::normal_distribution<double> normal(0.0, 2.0);
    Array array = make(type, n);
    for (int64_t i = 0; i < n; ++i) array.set(i, normal(generator_));
    return array;
  }

  // Allows one rounding to the array's own dtype, and `scale` errors.
  void expect_value(const Array& actual, int64_t i, double expected, double scale,
                    const char* what) const {
    const double own = cpu::format(actual.dtype()).epsilon();
    const double tiny = actual.dtype() == DType::Float16 ? std::ldexp(1.0, -24) : 1e-38;
    ASSERT_LE(std::abs(actual[i] - expected), own * std::abs(expected) + error * scale + tiny)
        << what << " " << i << ": " << actual[i] << ", want " << expected;
  }
};

constexpr Norm kNorms[] = {Norm::LayerNorm, Norm::RMSNorm, Norm::L2};

}  // namespace transformer_ops::cuda
