// Softcap: y = cap * tanh(x / cap), elementwise, and a rule that fuses it with the product before
// it.
#include <ATen/Dispatch.h>
#include <ATen/ops/atanh.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>
#include <transformer_ops/extension.h>
#include <transformer_ops/wrappers/linear.h>

#include <cmath>

using namespace transformer_ops;

namespace {

// ---- the op

// What a loop computes in: float32, or float64 for float64.
template <typename Element>
using Compute = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// y = function(x...) for tensors of one size and dtype.
template <typename Function, typename... In>
void map(const Tensor& y, Function function, const In&... x) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "my_ops", [&] {
    scalar_t* const to = y.mutable_data_ptr<scalar_t>();
    const auto loop = [&](const auto*... from) {
      cpu::parallel(y.numel(), /*work=*/1, /*align=*/1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          to[i] = static_cast<scalar_t>(function(static_cast<Compute<scalar_t>>(from[i])...));
        }
      });
    };
    loop(x.template const_data_ptr<scalar_t>()...);
  });
}

void softcap_cpu(const Tensor& input, double cap, Tensor& output) {
  const auto capped = [cap](auto x) {
    const auto c = static_cast<decltype(x)>(cap);
    return c * std::tanh(x / c);
  };
  map(output, capped, input);
}

Tensor softcap_decomposed(const Tensor& input, double cap) {
  return (cap * at::tanh(to_accumulate(input) / cap)).to(input.scalar_type());
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& output,
                           double) {
  check.compute_dtype("output", output);
  check.spec("grad_output", grad_output, like(output));
  return {like(output)};
}

void backward_cpu(const Tensor& grad_output, const Tensor& output, double cap, Tensor& grad_input) {
  const auto times_slope = [cap](auto grad, auto y) {
    const auto part = y / static_cast<decltype(y)>(cap);
    return grad * (1 - part * part);
  };
  map(grad_input, times_slope, grad_output, output);
}

Tensor backward_decomposed(const Tensor& grad_output, const Tensor& output, double cap) {
  const Tensor part = output / cap;
  return grad_output * (1 - part * part);
}

// For second derivatives: the output again, at the input that follows from what was saved.
Tensor replay(const ReplayCall& call) {
  const double cap = std::get<double>(call.attributes.at("cap"));
  const Tensor values = cap * at::atanh(call.slot("output").detach() / cap);
  return cap * at::tanh((call.input - call.input.detach() + values) / cap);
}

Op softcap() {
  return {
      .declaration = {.kind = "Softcap",
                      .summary = "cap * tanh(x / cap)",
                      .attributes = {"cap"},
                      .slots = {{"output"}},
                      .dtype = DTypeRule::Autocast},
      .forward = {.schema = "softcap(Tensor input, float cap) -> Tensor output",
                  .bodies = {.cpu = softcap_cpu, .decomposition = softcap_decomposed},
                  .by_rows = {"input"}},
      .backward = {.schema = "softcap_backward(Tensor grad_output, Tensor output, float cap) -> "
                             "Tensor grad_input",
                   .shape = backward_shape,
                   .bodies = {.cpu = backward_cpu, .decomposition = backward_decomposed}},
      .replay = replay,
  };
}

// ---- the rule:  x -> BasicLinear -> Softcap -> y, in the memory of the product

TensorSpecs linear_softcap_shape(const Checks& check, const Tensor& input, const Tensor& weight,
                                 double) {
  return {linear_output(check, input, weight)};
}

Tensor linear_softcap_cpu(const Tensor& input, const Tensor& weight, double cap) {
  Tensor product = linear_cpu(input, weight);
  softcap_cpu(product, cap, product);
  return product;
}

Tensor linear_softcap_decomposed(const Tensor& input, const Tensor& weight, double cap) {
  return softcap_decomposed(at::linear(input, weight), cap);
}

FusedOp linear_softcap() {
  return {
      .rule = {.name = "linear_softcap",
               .pass = Pass::Forward,
               .benefit = 20,
               .pattern = {{"BasicLinear"}, {"Softcap"}},
               .why_not = [](const Match& match) -> std::optional<std::string> {
                 if (match.key().device == Device::Cpu) return std::nullopt;
                 return "the fused op has a body for the CPU alone";
               }},
      .forward = {.schema = "linear_softcap(Tensor input, Tensor weight, float cap) -> "
                            "Tensor output",
                  .shape = linear_softcap_shape,
                  .bodies = {.cpu = linear_softcap_cpu,
                             .decomposition = linear_softcap_decomposed}},
  };
}

}  // namespace

TRANSFORMER_OPS_LIBRARY(my_ops, library) {
  library.add_op(softcap());
  library.add_fused_op(linear_softcap());
}
