// Softcap: y = cap * tanh(x / cap), elementwise, and a rule that fuses it with the product before
// it.
#include <ATen/Dispatch.h>
#include <ATen/ops/atanh.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tanh.h>
#include <transformer_ops/extension.h>

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

void cap_elements(const Tensor& y, const Tensor& x, double cap) {
  const auto capped = [cap](auto x) {
    const auto c = static_cast<decltype(x)>(cap);
    return c * std::tanh(x / c);
  };
  map(y, capped, x);
}

TensorSpecs softcap_shape(const Args& args) {
  check_compute_dtype(args, "input", args.tensor(0));
  return {like(args.tensor(0))};
}

void softcap_cpu(const Args& args, Tensors& results) {
  cap_elements(results[0], args.tensor(0), args.number(1));
}

Tensors softcap_unfused(const Args& args) {
  const double cap = args.number(1);
  return {(cap * at::tanh(to_accumulate(args.tensor(0)) / cap)).to(args.tensor(0).scalar_type())};
}

TensorSpecs softcap_backward_shape(const Args& args) {
  check_compute_dtype(args, "output", args.tensor(1));
  check_spec(args, "grad_output", args.tensor(0), like(args.tensor(1)));
  return {like(args.tensor(1))};
}

void softcap_backward_cpu(const Args& args, Tensors& results) {
  const double cap = args.number(2);
  const auto slope = [cap](auto grad, auto y) {
    const auto part = y / static_cast<decltype(y)>(cap);
    return grad * (1 - part * part);
  };
  map(results[0], slope, args.tensor(0), args.tensor(1));
}

Tensors softcap_backward_unfused(const Args& args) {
  const Tensor part = args.tensor(1) / args.number(2);
  return {args.tensor(0) * (1 - part * part)};
}

// For second derivatives: the input again, from the output that was saved.
Tensor softcap_replay(const ReplayCall& call) {
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
                  .shape = softcap_shape,
                  .cpu = softcap_cpu,
                  .unfused = softcap_unfused},
      .backward = {.schema = "softcap_backward(Tensor grad_output, Tensor output, float cap) -> "
                             "Tensor grad_input",
                   .shape = softcap_backward_shape,
                   .cpu = softcap_backward_cpu,
                   .unfused = softcap_backward_unfused},
      .replay = softcap_replay,
  };
}

// ---- the rule:  x -> BasicLinear -> Softcap -> y, in the memory of the product

TensorSpecs linear_softcap_shape(const Args& args) {
  const Tensor &x = args.tensor(0), &weight = args.tensor(1);
  check_compute_dtype(args, "input", x);
  check_has_rows(args, "input", x);
  TORCH_CHECK(weight.dim() == 2 && x.sym_size(-1) == weight.sym_size(1), "[", args.op(),
              "] weight must have shape (features, ", x.sym_size(-1), "), got ",
              weight.sym_sizes());
  TensorSpec output = like(x);
  output.sizes.back() = weight.sym_size(0);
  return {output};
}

void linear_softcap_cpu(const Args& args, Tensors& results) {
  const Tensor product = at::linear(args.tensor(0), args.tensor(1));
  cap_elements(product, product, args.number(2));
  results = {product};
}

Tensors linear_softcap_unfused(const Args& args) {
  const Tensor product = at::linear(args.tensor(0), args.tensor(1));
  const double cap = args.number(2);
  return {(cap * at::tanh(to_accumulate(product) / cap)).to(product.scalar_type())};
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
                  .cpu = linear_softcap_cpu,
                  .unfused = linear_softcap_unfused,
                  .allocates = false},
  };
}

}  // namespace

TRANSFORMER_OPS_LIBRARY(my_ops, library) {
  library.add_op(softcap());
  library.add_fused_op(linear_softcap());
}
