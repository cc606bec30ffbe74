// backward:  g ─► BasicLinear' ─► activation' or GLU' ─► [Bias'] ─► g
//             └─► grad_weight ◄─ y, computed again in the same pass
//
// By slices of the columns, each of which is y's gradient first and then y, so that a wide one is
// never there as a whole.
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include "fuser/propagate.h"
#include "ops/activation.h"
#include "ops/bias.h"
#include "ops/column_sums.h"
#include "ops/cpu.h"
#include "ops/glu.h"
#include "ops/linear.h"
#include "ops/linear_cuda.h"
#include "ops/op.h"

namespace transformer_ops {
namespace {

// ---- shapes; arguments (grad_output, input, weight, ...)

// Results of a function whose output has the width of the weight's rows.
TensorSpecs shape(const Args& args, const TensorSpec& y) {
  const Tensor& grad = args.tensor(0);
  const Tensor& input = args.tensor(1);
  const Tensor& weight = args.tensor(2);
  check_compute_dtype(args, "grad_output", grad);
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == y.sizes.back(), "[", args.op(),
              "] weight must have shape [*, ", y.sizes.back(), "], got ", weight.sym_sizes());
  TensorSpec output = y;
  output.sizes.back() = weight.sym_size(0);
  check_spec(args, "grad_output", grad, output);
  check_spec(args, "weight", weight, {c10::SymDimVector(weight.sym_sizes()), y.dtype});
  return {like(input), like(weight)};
}

TensorSpecs activation_shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(1));
  check_has_rows(args, "input", args.tensor(1));
  const ActivationRow& row = activation_named(args.text(3));
  TORCH_CHECK(!row.keeps_mask, "[", args.op(), "] activation must keep its input, got ", row.name);
  return shape(args, like(args.tensor(1)));
}

TensorSpecs activation_bias_shape(const Args& args) {
  TensorSpecs specs = activation_shape(args);
  specs.push_back(bias_gradient(args.tensor(1)));
  return specs;
}

TensorSpecs glu_shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(1));
  return shape(args, glu_output(args, "input", like(args.tensor(1)), read_any_glu(args, 3)));
}

// ---- CPU

// Columns of a slice. The wider, the faster are the products: whole ones, with their pass, took
// 0.92 to 0.97 of the time of slices of 2 MB. So a slice takes as much memory as the Linear before
// will need, for its input and its weight's gradient: those of this one have about their sizes.
int64_t slice_width(int64_t rows, const Tensor& weight, int64_t unit) {
  constexpr int64_t kLeast = 512;
  const int64_t inputs = weight.size(0), outputs = weight.size(1);
  const int64_t most = std::max(kLeast, inputs + inputs * outputs / std::max<int64_t>(1, rows));
  const int64_t count = std::max<int64_t>(1, (outputs + most - 1) / most);
  const int64_t width = std::max<int64_t>(1, (outputs + count - 1) / count);
  return std::min((width + unit - 1) / unit * unit, outputs);
}

// pass(buffer, first): `buffer` holds a slice of y's gradient from column `first` on, and takes y.
template <typename Pass>
void by_slices(const Args& args, Tensors& results, int64_t unit, const Pass& pass) {
  const Tensor& weight = args.tensor(2);
  const int64_t rows = weight.size(0) == 0 ? 0 : args.tensor(0).numel() / weight.size(0);
  const Tensor grad = args.tensor(0).view({rows, weight.size(0)});
  const int64_t width = slice_width(rows, weight, unit);
  for (int64_t first = 0; first < weight.size(1); first += width) {
    const int64_t count = std::min(width, weight.size(1) - first);
    Tensor buffer = empty_cpu({rows, count}, grad.scalar_type());
    at::cpu::mm_out(buffer, grad, weight.narrow(1, first, count));
    pass(buffer, first);
    // oneDNN's copies of the operands take 2.0 MB for 1024 columns and 2.7 MB for twice as many.
    const int64_t part = grad.scalar_type() == at::kBFloat16 ? 1024 : count;
    for (int64_t column = 0; column < count; column += part) {
      const int64_t columns = std::min(part, count - column);
      Tensor grad_weight = results[1].narrow(1, first + column, columns);
      at::cpu::mm_out(grad_weight, grad.t(), buffer.narrow(1, column, columns));
    }
  }
}

void activation_cpu(const Args& args, Tensors& results) {
  const Tensor& input = args.tensor(1);
  const ActivationRow& row = activation_named(args.text(3));
  const auto dtype = cpu::kernel_dtype(input);
  const int64_t stride = input.size(-1);
  const bool has_bias = results.size() > 2;
  by_slices(args, results, 64, [&](const Tensor& buffer, int64_t first) {
    const cpu::Rows both{buffer, buffer.size(1)}, x{input, stride}, grad_x{results[0], stride};
    Tensor sums[] = {has_bias ? results[2].narrow(0, first, both.width)
                              : empty_cpu({both.width}, input.scalar_type())};
    const int64_t offset = first * input.element_size();
    cpu::sum_rows(both.count(), both.width, input, sums,
                  [&](int64_t begin, int64_t end, const std::vector<void*>& sum) {
                    cpu::kernels().activation_value_and_backward(
                        row.activation, dtype, both.write(begin),
                        static_cast<const char*>(x.read(begin)) + offset,
                        static_cast<char*>(grad_x.write(begin)) + offset, sum[0], end - begin,
                        both.width, stride);
                  });
  });
}

void glu_cpu(const Args& args, Tensors& results) {
  const Tensor& input = args.tensor(1);
  const cpu::Glu glu = read_any_glu(args, 3);
  const int64_t width = input.size(-1);
  const int64_t block = std::max<int64_t>(1, glu.interleave);
  by_slices(
      args, results, (64 + block - 1) / block * block, [&](const Tensor& buffer, int64_t first) {
        const cpu::Rows both{buffer, buffer.size(1)}, x{input, width};
        const cpu::Rows grad_x{results[0], width};
        cpu::parallel(both.count(), both.width, 1, [&](int64_t begin, int64_t end) {
          cpu::kernels().glu_value_and_backward(glu, cpu::kernel_dtype(input), both.write(begin),
                                                x.read(begin), grad_x.write(begin), end - begin,
                                                both.width, width / 2, first);
        });
      });
}

// ---- CUDA: y first, so that it is gone before its gradient is made

Tensor weight_gradient_and_grad_y(const Args& args, Tensor y, Tensors& results) {
  results[1].reset();
  results[1] = linear_backward_cuda(args.tensor(0), std::move(y), {})[1];
  return linear_backward_cuda(args.tensor(0), {}, args.tensor(2))[0];
}

void activation_cuda(const Args& args, Tensors& results) {
  const Tensor& x = args.tensor(1);
  const ActivationRow& row = activation_named(args.text(3));
  Tensor y = empty(x.sizes(), x.scalar_type(), x.device());
  activation_forward_cuda(row, x, y, {});
  const Tensor grad_y = weight_gradient_and_grad_y(args, std::move(y), results);
  const auto stream = cuda::stream_of(x);
  if (results.size() == 2) {
    cuda::kernels().activation_backward(stream, row.activation, kernel_dtype(x), cuda::read(grad_y),
                                        cuda::read(x), cuda::write(results[0]), x.numel());
    return;
  }
  const cuda::ColumnSums sums(x, results[2]);
  cuda::kernels().activation_bias_backward(
      stream, row.activation, kernel_dtype(x), cuda::read(grad_y), cuda::read(x),
      cuda::write(results[0]), sums.kernel, sums.rows, sums.width);
}

void glu_cuda(const Args& args, Tensors& results) {
  const Tensor& x = args.tensor(1);
  const cuda::Glu glu = read_any_glu(args, 3);
  c10::DimVector sizes(x.sizes());
  sizes.back() /= 2;
  Tensor y = empty(sizes, x.scalar_type(), x.device());
  glu_forward_cuda(glu, x, y);
  glu_backward_cuda(glu, weight_gradient_and_grad_y(args, std::move(y), results), x, results[0]);
}

// ---- the same as differentiable ATen calls

Tensors unfused(const Args& args, const std::function<Tensor(const Tensor&)>& function) {
  const auto value = [&](const Args& input) { return Tensors{function(input.tensor(0))}; };
  const Tensor grad_y = at::matmul(args.tensor(0), args.tensor(2));
  const Tensor grad_x = differentiate(value, args.op(), {args[1]}, grad_y)[0];
  const Tensor y = function(args.tensor(1));
  return {grad_x, as_matrix(args.tensor(0)).t().mm(as_matrix(y))};
}

Tensors activation_unfused(const Args& args) {
  return unfused(args, activation_named(args.text(3)).unfused);
}

Tensors activation_bias_unfused(const Args& args) {
  Tensors grads = activation_unfused(args);
  grads.push_back(grads[0].sum_to_size_symint({grads[0].sym_size(-1)}));
  return grads;
}

Tensors glu_any_unfused(const Args& args) {
  return unfused(args, [&](const Tensor& input) {
    return glu_unfused(glu_named(args.text(3)), input, read_any_glu(args, 3));
  });
}

// ---- rules; `k` is the place of the activation or GLU in the match, BasicLinear follows

std::optional<std::string> why_not(const Match& match, int k) {
  if (!match.facts.recompute) return "nothing is computed again (recompute=\"none\")";
  if (!match.parameter_requires_grad(k + 1, 0)) return "the weight needs no gradient";
  if (!match.input_requires_grad()) return "the input needs no gradient";
  const auto dtypes = propagate_dtypes(match.ops, match.facts);
  for (int i = 0; i <= k + 1; ++i) {
    const int op = match.first + i;
    const DType in = dtypes[op];
    if (in == dtypes[match.first] &&
        required_dtype(match.ops, match.facts, op, in).value_or(in) == in) {
      continue;
    }
    return "its ops compute in different dtypes";
  }
  return std::nullopt;
}

std::optional<std::string> why_not_with_bias(const Match& match) {
  if (auto reason = no_bias_gradient(match)) return reason;
  return why_not(match, 1);
}

Bindings bind_activation(const Match& match, int k) {
  return {{"activation", Attribute(activation_of_kind(match.kind(k)).name)},
          {"input", Field{k, "input"}}};
}

Bindings bind_any_glu(const Match& match) {
  Bindings bindings = bind_glu(match, 0);
  bindings["input"] = Field{0, "input"};
  return bindings;
}

std::vector<std::string> kinds_that_keep_input() {
  std::vector<std::string> kinds;
  for (const ActivationRow& row : activations()) {
    if (!row.keeps_mask) kinds.push_back(row.kind);
  }
  return kinds;
}

constexpr const char* kActivationArguments =
    "(Tensor grad_output, Tensor input, Tensor weight, str activation) -> "
    "(Tensor grad_input, Tensor grad_weight";

bool register_all() {
  register_fused_op({.rule = {.name = "linear_activation_bias",
                              .pass = Pass::Backward,
                              .benefit = 40,
                              .pattern = {{"Bias"}, kinds_that_keep_input(), {"BasicLinear"}},
                              .why_not = why_not_with_bias,
                              .bind = [](const Match& match) { return bind_activation(match, 1); }},
                     .backward = {.schema = std::string("linear_activation_bias_backward") +
                                            kActivationArguments + ", Tensor grad_bias)",
                                  .shape = activation_bias_shape,
                                  .overwrites = {1},
                                  .cpu = activation_cpu,
                                  .cuda = activation_cuda,
                                  .unfused = activation_bias_unfused}});
  register_fused_op({.rule = {.name = "linear_activation",
                              .pass = Pass::Backward,
                              .benefit = 30,
                              .pattern = {kinds_that_keep_input(), {"BasicLinear"}},
                              .why_not = [](const Match& match) { return why_not(match, 0); },
                              .bind = [](const Match& match) { return bind_activation(match, 0); }},
                     .backward = {.schema = std::string("linear_activation_backward") +
                                            kActivationArguments + ")",
                                  .shape = activation_shape,
                                  .overwrites = {1},
                                  .cpu = activation_cpu,
                                  .cuda = activation_cuda,
                                  .unfused = activation_unfused}});
  return register_fused_op(
      {.rule = {.name = "linear_glu",
                .pass = Pass::Backward,
                .benefit = 30,
                .pattern = {glu_kinds(), {"BasicLinear"}},
                .why_not = [](const Match& match) { return why_not(match, 0); },
                .bind = bind_any_glu},
       .backward = {.schema = std::string("linear_glu_backward(Tensor grad_output, Tensor input, "
                                          "Tensor weight, ") +
                              kGluArguments + ") -> (Tensor grad_input, Tensor grad_weight)",
                    .shape = glu_shape,
                    .overwrites = {1},
                    .cpu = glu_cpu,
                    .cuda = glu_cuda,
                    .unfused = glu_any_unfused}});
}

[[maybe_unused]] const bool registered = register_all();

}  // namespace
}  // namespace transformer_ops
