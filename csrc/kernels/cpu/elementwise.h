// Activations and conversions.
#pragma once

#include "../math.h"
#include "bits.h"

namespace transformer_ops::cpu {
namespace {

template <class F>
void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::GELU:
      return f(math::GELU());
    case Activation::QGELU:
      return f(math::QGELU());
    case Activation::ReLU:
      return f(math::ReLU());
    case Activation::SReLU:
      return f(math::SReLU());
    case Activation::SiLU:
      return f(math::SiLU());
  }
}

void activation_forward(Activation activation, DType dtype, const void* x, void* y, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_activation(activation, [&](auto op) {
      map(as<T>(x), as<T>(y), n, [=](Acc<T> v) { return op.forward(v); });
    });
  });
}

void activation_backward(Activation activation, DType dtype, const void* grad_y, const void* x,
                         void* grad_x, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_activation(activation, [&](auto op) {
      map(as<T>(grad_y), as<T>(x), as<T>(grad_x), n,
          [=](Acc<T> g, Acc<T> v) { return op.backward(g, v); });
    });
  });
}

void activation_backward_from_output(Activation activation, DType dtype, const void* grad_y,
                                     const void* y, void* grad_x, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    const auto run = [&](auto op) {
      map(as<T>(grad_y), as<T>(y), as<T>(grad_x), n,
          [=](Acc<T> g, Acc<T> v) { return op.backward_from_output(g, v); });
    };
    if (activation == Activation::ReLU) return run(math::ReLU());
    if (activation == Activation::SReLU) return run(math::SReLU());
  });
}

void relu_forward(DType dtype, const void* x, void* y, uint8_t* mask, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    alignas(64) Acc<T> buffer[kBlock];
    alignas(64) uint8_t flags[kBlock];
    for (int64_t start = 0; start < n; start += kBlock) {
      const int64_t count = smaller(kBlock, n - start);
      T* out = as<T>(y) + start;
      const Acc<T>* in = load(as<T>(x) + start, buffer, count);
      Acc<T>* staged = staging(out, buffer);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) flags[i] = in[i] <= Acc<T>(0) ? 0 : 1;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) staged[i] = math::ReLU().forward(in[i]);
      pack_bits(flags, mask + start / 8, count);
      store(staged, out, count);
    }
  });
}

// out = in * scale where the mask has a bit, else 0.
template <class T>
void scale_masked(const T* in, const uint8_t* mask, T* out, Acc<T> scale, int64_t n) {
  alignas(64) Acc<T> buffer[kBlock];
  alignas(64) uint8_t flags[kBlock];
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t count = smaller(kBlock, n - start);
    const Acc<T>* g = load(in + start, buffer, count);
    Acc<T>* staged = staging(out + start, buffer);
    unpack_bits(mask + start / 8, flags, count);
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) staged[i] = flags[i] == 0 ? Acc<T>(0) : g[i] * scale;
    store(staged, out + start, count);
  }
}

void relu_backward(DType dtype, const void* grad_y, const uint8_t* mask, void* grad_x, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    scale_masked(as<T>(grad_y), mask, as<T>(grad_x), Acc<T>(1), n);
  });
}

void convert_from_acc(DType dtype, const void* acc, void* out, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    if constexpr (kIsAcc<T>) {
      map(as<T>(acc), as<T>(out), n, [](T x) { return x; });
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
