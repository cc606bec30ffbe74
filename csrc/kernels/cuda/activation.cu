// Activations, element by element.
#include "kernels/activation.h"
#include "kernels/choose.h"
#include "kernels/cuda/bits.h"
#include "kernels/cuda/elementwise.h"

namespace transformer_ops::cuda {
namespace {

using kernel::with_activation;

template <class Formula>
struct Forward {
  template <class A>
  __device__ __forceinline__ A operator()(A x) const {
    return Formula().forward(x);
  }
};

template <class Formula>
struct Backward {
  template <class A>
  __device__ __forceinline__ A operator()(A grad, A x) const {
    return Formula().backward(grad, x);
  }
};

template <class Formula>
struct BackwardFromOutput {
  template <class A>
  __device__ __forceinline__ A operator()(A grad, A y) const {
    return Formula().backward_from_output(grad, y);
  }
};

template <template <class> class Op, class Formula, class... In>
void map_formula(Stream stream, DType dtype, Formula, void* out, int64_t n, const In*... in) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const Arrays<T, sizeof...(In)> arrays{static_cast<const T*>(in)...};
    map(stream, Op<Formula>(), arrays, static_cast<T*>(out), n);
  });
}

namespace entry {

void activation_forward(Stream stream, Activation activation, DType dtype, const void* x, void* y,
                        int64_t n) {
  with_activation(activation,
                  [&](auto formula) { map_formula<Forward>(stream, dtype, formula, y, n, x); });
}

void activation_backward(Stream stream, Activation activation, DType dtype, const void* grad_y,
                         const void* x, void* grad_x, int64_t n) {
  with_activation(activation, [&](auto formula) {
    map_formula<Backward>(stream, dtype, formula, grad_x, n, grad_y, x);
  });
}

void activation_backward_from_output(Stream stream, Activation activation, DType dtype,
                                     const void* grad_y, const void* y, void* grad_x, int64_t n) {
  const auto run = [&](auto formula) {
    map_formula<BackwardFromOutput>(stream, dtype, formula, grad_x, n, grad_y, y);
  };
  if (activation == Activation::ReLU) return run(math::ReLU());
  if (activation == Activation::SReLU) return run(math::SReLU());
}

void relu_forward(Stream stream, DType dtype, const void* x, void* y, uint8_t* mask, int64_t n) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    map_groups<T>(stream, ReluWithMask<Acc<T>>{mask}, x, y, n);
  });
}

void relu_backward(Stream stream, DType dtype, const void* grad_y, const uint8_t* mask,
                   void* grad_x, int64_t n) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    map_groups<T>(stream, ScaleWhereSet<Acc<T>>{mask, Acc<T>(1)}, grad_y, grad_x, n);
  });
}

}  // namespace entry

TRANSFORMER_OPS_KERNEL(activation_forward, "cuda");
TRANSFORMER_OPS_KERNEL(activation_backward, "cuda");
TRANSFORMER_OPS_KERNEL(activation_backward_from_output, "cuda");
TRANSFORMER_OPS_KERNEL(relu_forward, "cuda");
TRANSFORMER_OPS_KERNEL(relu_backward, "cuda");

}  // namespace
}  // namespace transformer_ops::cuda
