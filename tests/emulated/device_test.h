// Code shared by the tests of emulated kernels: memory that detects writes beside it, and the
// fixture that runs a test for each dtype, with aligned and with unaligned memory.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "../cpp/kernels/kernel_test.h"
#include "kernels/cuda.h"

namespace transformer_ops::cuda {

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kGuard = 0;  // the sanitizer is the guard
#else
constexpr int64_t kGuard = 64;
#endif

// n elements of a dtype, `shift` elements past an address that is a multiple of 64.
class Buffer {
 public:
  Buffer(DType dtype, int64_t n, int shift) : dtype_(dtype), n_(n), start_(shift * size()) {
    const int64_t all = start_ + n * size() + kGuard;
    if (posix_memalign(&memory_, 64, all) != 0) throw std::bad_alloc();
    std::memset(data(), 0xff, n * size());
    std::memset(bytes() - start_, kMark, start_);
    std::memset(bytes() + n * size(), kMark, kGuard);
  }
  Buffer(const Buffer& other) : Buffer(other.dtype_, other.n_, other.shift()) {
    std::memcpy(data(), other.data(), n_ * size());
  }
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    for (int64_t i = 0; i < start_; ++i) EXPECT_EQ(bytes()[i - start_], kMark) << "before";
    for (int64_t i = 0; i < kGuard; ++i) EXPECT_EQ(bytes()[n_ * size() + i], kMark) << "after";
    std::free(memory_);
  }

  void* data() const { return bytes(); }

  double operator[](int64_t i) const {
    if (dtype_ == DType::Float64) return read<double>(i);
    if (dtype_ == DType::Float32) return read<float>(i);
    return cpu::decode16(read<uint16_t>(i), dtype_);
  }
  void set(int64_t i, double x) const {
    if (dtype_ == DType::Float64) return write(i, x);
    if (dtype_ == DType::Float32) return write(i, static_cast<float>(x));
    write(i, cpu::encode16(x, dtype_));
  }
  // Compares bitwise.
  bool operator==(const Buffer& other) const {
    return n_ == other.n_ && std::memcmp(data(), other.data(), n_ * size()) == 0;
  }

 private:
  static constexpr unsigned char kMark = 0xa5;

  int64_t size() const { return cpu::format(dtype_).bytes; }
  int shift() const { return static_cast<int>(start_ / size()); }
  unsigned char* bytes() const { return static_cast<unsigned char*>(memory_) + start_; }

  template <class T>
  T read(int64_t i) const {
    T x;
    std::memcpy(&x, bytes() + i * size(), sizeof(T));
    return x;
  }
  template <class T>
  void write(int64_t i, T x) const {
    std::memcpy(bytes() + i * size(), &x, sizeof(T));
  }

  DType dtype_;
  int64_t n_, start_;
  void* memory_ = nullptr;
};

// Bits of n elements, with a guard.
class Mask {
 public:
  explicit Mask(int64_t n) : bytes_((n + 7) / 8 + 1, 0xa5), n_(n) {}
  ~Mask() { EXPECT_EQ(bytes_.back(), 0xa5) << "after the mask"; }

  uint8_t* data() { return bytes_.data(); }
  bool operator[](int64_t i) const { return (bytes_[i / 8] >> (i % 8) & 1) != 0; }
  bool operator==(const Mask&) const = default;
  void expect_padded() const {
    if (n_ % 8 != 0) {
      EXPECT_EQ(bytes_[n_ / 8] >> (n_ % 8), 0) << "padding";
    }
  }

 private:
  std::vector<uint8_t> bytes_;
  int64_t n_;
};

struct Case {
  DType dtype;
  int shift;  // 0: aligned
};

class DeviceTest : public testing::TestWithParam<Case> {
 protected:
  const DType dtype = GetParam().dtype;
  const DType acc = cpu::acc_of(dtype);
  // A dtype for a parameter, different from that of x.
  const DType other = dtype == DType::Float32 ? DType::BFloat16 : DType::Float32;

  Buffer make(int64_t n) { return make(dtype, n); }
  Buffer make(DType type, int64_t n) { return {type, n, GetParam().shift}; }
  Buffer random(int64_t n) { return random(dtype, n); }
  Buffer random(DType type, int64_t n) {
    std::normal_distribution<double> normal(0.0, 2.0);
    Buffer buffer = make(type, n);
    for (int64_t i = 0; i < n; ++i) buffer.set(i, normal(generator_));
    return buffer;
  }
  Mask random_mask(int64_t n) {
    Mask mask(n);
    for (int64_t i = 0; i < n; ++i) {
      if (i % 8 == 0) mask.data()[i / 8] = 0;
      mask.data()[i / 8] |= static_cast<uint8_t>((generator_() & 1) << (i % 8));
    }
    return mask;
  }

  // Allows one rounding to `type`, and a relative `error` of numbers of `size` in the compute type.
  void expect_near(DType type, double actual, double expected, double size, const char* what,
                   int64_t i) {
    const double rounded = cpu::round_to(expected, type);
    if (!std::isfinite(rounded)) {
      EXPECT_TRUE(std::isnan(rounded) ? std::isnan(actual) : actual == rounded)
          << what << " " << i << ": " << actual << ", want " << rounded;
      return;
    }
    const auto format = cpu::format(type);
    const double smallest = std::ldexp(1.0, format.min_exponent);
    const double own = format.epsilon() * std::max(std::abs(expected), smallest);
    const double error = dtype == DType::Float64 ? 1e-9 : 5e-7;
    EXPECT_LE(std::abs(actual - expected), own + error * size)
        << what << " " << i << ": " << actual << ", want " << expected;
  }

  std::mt19937 generator_{1234};
};

inline std::vector<Case> cases() {
  std::vector<Case> all;
  for (DType dtype : {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16}) {
    for (int shift : {0, 1}) all.push_back({dtype, shift});
  }
  return all;
}

inline std::string case_name(const testing::TestParamInfo<Case>& info) {
  const char* names[] = {"Float32", "Float64", "Float16", "BFloat16"};
  return std::string(names[static_cast<int>(info.param.dtype)]) +
         (info.param.shift == 0 ? "_aligned" : "_misaligned");
}

}  // namespace transformer_ops::cuda
