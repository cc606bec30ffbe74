// Activations.
#include "kernels/activation.h"

#include "kernels/choose.h"
#include "masked.h"
#include "rows.h"
#include "simd_math.h"

namespace transformer_ops::cpu {
namespace {

using kernel::with_activation;

template <bool kSums, class T, class Op>
void value_and_backward_rows(Op op, T* buffer, const T* x, T* grad_x, void* grad_bias, int64_t rows,
                             int64_t n, int64_t stride) {
  ColumnSums<Acc<T>, AnyOrderOf<T>> sums(grad_bias, kSums ? n : 0);
  Acc<T>* sum = sums.group();
  for (int64_t r = 0; r < rows; ++r) {
    T* both = buffer + r * n;
    const T* in = x + r * stride;
    T* out = grad_x + r * stride;
    for_wide_vectors<T>(
        n, [=](int64_t i, auto lanes) __attribute__((always_inline)) {
          const auto grad = load(static_cast<const T*>(both) + i, any_order(lanes));
          const auto value = load(in + i, any_order(lanes));
          const auto result = op.backward(grad, value);
          store(both + i, op.forward(value), any_order(lanes), false);
          store(out + i, result, any_order(lanes), false);
          if constexpr (kSums) store_acc(sum + i, load_acc<T>(sum + i, lanes) + result, lanes);
        });
    if constexpr (kSums) sums.end_row();
  }
}

namespace entry {

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

void relu_backward(DType dtype, const void* grad_y, const uint8_t* mask, void* grad_x, int64_t n) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    scale_masked(as<T>(grad_y), mask, as<T>(grad_x), Acc<T>(1), n);
  });
}

void activation_value_and_backward(Activation activation, DType dtype, void* buffer, const void* x,
                                   void* grad_x, void* grad_bias, int64_t rows, int64_t n,
                                   int64_t stride) {
  with_dtype(dtype, [&]<class T>(Tag<T>) {
    with_activation(activation, [&](auto op) {
      const auto pass = grad_bias != nullptr ? value_and_backward_rows<true, T, decltype(op)>
                                             : value_and_backward_rows<false, T, decltype(op)>;
      pass(op, as<T>(buffer), as<T>(x), as<T>(grad_x), grad_bias, rows, n, stride);
    });
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(activation_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(activation_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(activation_backward_from_output, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(relu_forward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(relu_backward, TRANSFORMER_OPS_ISA);
TRANSFORMER_OPS_KERNEL(activation_value_and_backward, TRANSFORMER_OPS_ISA);

}  // namespace
}  // namespace transformer_ops::cpu
