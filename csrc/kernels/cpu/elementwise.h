// Activations and conversions.
#pragma once

#include "kernels/choose.h"
#include "loops.h"
#include "simd_math.h"

namespace transformer_ops::cpu {
namespace {

using kernel::with_activation;

void activation_forward(Activation activation, DType dtype, const void* x, void* y, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_activation(activation, [&](auto op) {
      const auto f = [=](auto v) __attribute__((always_inline)) { return op.forward(v); };
      map(as<T>(y), n, f, as<T>(x));
    });
  });
}

void activation_backward(Activation activation, DType dtype, const void* grad_y, const void* x,
                         void* grad_x, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_activation(activation, [&](auto op) {
      const auto f = [=](auto g, auto v) __attribute__((always_inline)) {
        return op.backward(g, v);
      };
      map(as<T>(grad_x), n, f, as<T>(grad_y), as<T>(x));
    });
  });
}

void activation_backward_from_output(Activation activation, DType dtype, const void* grad_y,
                                     const void* y, void* grad_x, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const auto run = [&](auto op) {
      const auto f = [=](auto g, auto v) __attribute__((always_inline)) {
        return op.backward_from_output(g, v);
      };
      map(as<T>(grad_x), n, f, as<T>(grad_y), as<T>(y));
    };
    if (activation == Activation::ReLU) return run(math::ReLU());
    if (activation == Activation::SReLU) return run(math::SReLU());
  });
}

void relu_forward(DType dtype, const void* x, void* y, uint8_t* mask, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const auto f = [](Vec<T> v, uint64_t & bits) __attribute__((always_inline)) {
      const auto blocked = v <= Vec<T>(0);
      bits = ~bits_of(blocked);
      return select(blocked, Vec<T>(0), v);
    };
    const auto none = [](int64_t, int64_t, BitBlock& block) { block = {}; };
    const auto write = [=](int64_t start, int64_t count, const BitBlock& block) {
      write_bits(mask, start, count, block);
    };
    map_bits(as<T>(y), n, f, none, write, as<T>(x));
  });
}

// out = in * scale where the mask has a bit, else 0.
template <class T>
void scale_masked(const T* in, const uint8_t* mask, T* out, Acc<T> scale, int64_t n) {
  const auto f = [=](Vec<T> v, uint64_t bits) __attribute__((always_inline)) {
    return where_bits(bits, v * Vec<T>(scale));
  };
  const auto read = [=](int64_t start, int64_t count, BitBlock& block) {
    read_bits(mask, start, count, block);
  };
  map_bits(
      out, n, f, read, [](int64_t, int64_t, const BitBlock&) {}, in);
}

void relu_backward(DType dtype, const void* grad_y, const uint8_t* mask, void* grad_x, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    scale_masked(as<T>(grad_y), mask, as<T>(grad_x), Acc<T>(1), n);
  });
}

void convert_from_acc(DType dtype, const void* acc, void* out, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    if constexpr (kIsAcc<T>) {
      if (acc != out) memcpy(out, acc, static_cast<size_t>(n) * sizeof(T));
    } else {
      from_acc(as<float>(acc), as<T>(out), n);
    }
  });
}

void convert_to_acc(DType dtype, const void* in, void* acc, double add, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    Acc<T>* out = as<Acc<T>>(acc);
    const Acc<T>* values = load(as<T>(in), out, n);
    const auto addend = static_cast<Acc<T>>(add);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = values[i] + addend;
  });
}

}  // namespace
}  // namespace transformer_ops::cpu
