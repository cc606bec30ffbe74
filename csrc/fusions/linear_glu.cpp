// backward:  g ─► BasicLinear' ─► GLU' ─► g
//             └─► grad_weight ◄─ y, computed again in the same pass
#include "bodies/cpu.h"
#include "bodies/cuda.h"
#include "bodies/glu.h"
#include "bodies/linear.h"
#include "bodies/linear_cuda.h"
#include "bodies/linear_recomputed.h"
#include "kernels/glu.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(1));
  return linear_backward_outputs(
      args, glu_output(args, "input", like(args.tensor(1)), read_any_glu(args, 3)));
}

void backward_cpu(const Args& args, Tensors& results) {
  const Tensor& input = args.tensor(1);
  const cpu::Glu glu = read_any_glu(args, 3);
  const int64_t width = input.size(-1);
  const int64_t block = std::max<int64_t>(1, glu.interleave);
  linear_recomputed_cpu(
      args, results, (64 + block - 1) / block * block, [&](const Tensor& buffer, int64_t first) {
        const cpu::Rows both{buffer, buffer.size(1)}, x{input, width};
        const cpu::Rows grad_x{results[0], width};
        cpu::parallel(both.count(), both.width, 1, [&](int64_t begin, int64_t end) {
          cpu::glu_value_and_backward(glu, cpu::kernel_dtype(input), both.write(begin),
                                      x.read(begin), grad_x.write(begin), end - begin, both.width,
                                      width / 2, first);
        });
      });
}

void backward_cuda(const Args& args, Tensors& results) {
  const Tensor& x = args.tensor(1);
  const cuda::Glu glu = read_any_glu(args, 3);
  c10::DimVector sizes(x.sizes());
  sizes.back() /= 2;
  {
    // Gone before its gradient is made.
    const Tensor y = empty(sizes, x.scalar_type(), x.device());
    glu_forward_cuda(glu, x, y);
    linear_weight_gradient_cuda(args.tensor(0), y, results[1], {.adds = args.main_grad().adds});
  }
  const Tensor grad_y = linear_input_gradient_cuda(args.tensor(0), args.tensor(2));
  glu_backward_cuda(glu, grad_y, x, results[0]);
}

Tensors backward_unfused(const Args& args) {
  return linear_recomputed_unfused(args, [&](const Tensor& input) {
    return glu_unfused(glu_of(args, 3), input, read_any_glu(args, 3));
  });
}

Bindings bind(const Match& match) {
  Bindings bindings = bind_glu(match, 0);
  bindings["input"] = Field{0, "input"};
  return bindings;
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "linear_glu",
             .pass = Pass::Backward,
             .benefit = 30,
             .pattern = {glu_kinds(), {"BasicLinear"}},
             .why_not = [](const Match& match) { return why_not_recomputed(match, 0); },
             .bind = bind},
    .backward = {.schema = std::string("linear_glu_backward(Tensor grad_output, Tensor input, "
                                       "Tensor weight, ") +
                           kGluArguments + ") -> (Tensor grad_input, Tensor grad_weight)",
                 .shape = shape,
                 .overwrites = {1},
                 .cpu = backward_cpu,
                 .cuda = backward_cuda,
                 .unfused = backward_unfused,
                 .accumulates = true},
});

}  // namespace
}  // namespace transformer_ops
