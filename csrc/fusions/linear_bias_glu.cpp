// forward:  x ─► BasicLinear ─► Bias ─► GLU ─► y      bias and GLU in one pass over the product
//                                  └─► kept: the GLU's input
#include <ATen/ops/linear.h>

#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "bodies/glu.h"
#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "kernels/glu.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  const TensorSpec sum = linear_output(args);
  check_linear_bias(args, args.tensor(2), sum);
  const TensorSpec kept = args.flag(10) ? sum : TensorSpec{{0}, sum.dtype};
  return {glu_output(args, "the product", sum, read_any_glu(args, 3)), kept};
}

void forward_cpu(const Args& args, Tensors& results) {
  const cpu::Glu glu = read_any_glu(args, 3);
  const Tensor product = linear_cpu(args.tensor(0), args.tensor(1));
  const Tensor bias = cpu::to_accumulate(args.tensor(2), product);
  auto sizes = product.sizes().vec();
  sizes.back() /= 2;
  Tensor output = empty_cpu(sizes, product.scalar_type());
  const cpu::Rows x{product, product.size(-1)}, y{output, output.size(-1)};
  const bool save = args.flag(10);
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::bias_glu_forward(glu, cpu::kernel_dtype(product), x.read(begin), bias.const_data_ptr(),
                          save ? x.write(begin) : nullptr, y.write(begin), end - begin, y.width);
  });
  results = {output, product};
  if (!save) results[1] = empty_cpu({0}, product.scalar_type());
}

void forward_cuda(const Args& args, Tensors& results) {
  const Tensor product = linear_cuda(args.tensor(0), args.tensor(1));
  const int64_t width = product.size(-1);
  auto sizes = product.sizes().vec();
  sizes.back() /= 2;
  const Tensor output = empty(sizes, product.scalar_type(), product.device());
  const bool save = args.flag(10);
  cuda::bias_glu_forward(cuda::stream_of(product), read_any_glu(args, 3), kernel_dtype(product),
                         cuda::read(product), cuda::vector(args.tensor(2)),
                         save ? cuda::write(product) : nullptr, cuda::write(output),
                         cuda::rows_of(product), width / 2);
  results = {output, save ? product : empty({0}, product.scalar_type(), product.device())};
}

Tensors forward_unfused(const Args& args) {
  const Tensor sum = at::linear(args.tensor(0), args.tensor(1), args.tensor(2));
  return {glu_unfused(glu_of(args, 3), sum, read_any_glu(args, 3))};
}

Bindings bind(const Match& match) {
  Bindings bindings = bind_glu(match, 2);
  bindings["kept"] = Field{2, "input"};
  return bindings;
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_bias_glu",
             .pass = Pass::Forward,
             // Before linear_epilogue, which would take the product and its bias.
             .benefit = 48,
             .pattern = {{"BasicLinear"}, {"Bias"}, glu_kinds()},
             .why_not = different_linear_dtypes,
             .bind = bind},
    .forward = {.schema =
                    std::string("linear_bias_glu(Tensor input, Tensor weight, Tensor bias, ") +
                    kGluArguments + ", bool save_kept) -> (Tensor output, Tensor kept)",
                .shape = shape,
                .any_strides = {"input", "weight"},
                .cpu = forward_cpu,
                .cuda = forward_cuda,
                .unfused = forward_unfused,
                .allocates = false},
});

}  // namespace
}  // namespace transformer_ops
