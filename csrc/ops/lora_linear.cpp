// LoRALinear: y = x [W0; W1; ...]^T + [b0, b1, ...], and for each adapter its s drop(x) A^T B^T is
// added in the columns of its weight. Forward keeps s drop(x) A^T, which has few columns.
#include "wrappers/lora_linear.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/dropout.h"
#include "wrappers/linear.h"
#include "wrappers/packed_linear.h"

namespace transformer_ops::ops::lora_linear {
namespace {

using Indices = std::vector<int64_t>;
using Scales = std::vector<double>;

PackedMask of_product(const AdapterMask& wanted) { return {wanted[0], wanted[1], wanted[2]}; }

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensors& weight,
                          const Tensors& bias, const Tensors& lora_a, const Tensors& lora_b,
                          Indices out_features, Indices adapted, Scales scaling, double p,
                          bool training, bool save_mask) {
  const TensorSpec output = packed_linear_output(check, input, weight, bias, out_features);
  TensorSpec hidden = like(input);
  const c10::SymInt inner = input.sym_size(-1);
  hidden.sizes.back() =
      check_adapters(check, {lora_a, lora_b, adapted, scaling}, inner, out_features);
  hidden.dtype = lora_a[0].scalar_type();
  check_probability(check, p);
  const bool has_mask = save_mask && training && p > 0;
  return {output, hidden, has_mask ? bit_mask(input) : absent(at::kByte)};
}

// The kernels of a device.
struct Device {
  decltype(&packed_linear_backward_cpu) product_backward;
  decltype(&drop_cpu) drop;
  decltype(&apply_mask_cpu) apply_mask;
};
constexpr Device kCpu = {packed_linear_backward_cpu, drop_cpu, apply_mask_cpu};
constexpr Device kCuda = {packed_linear_backward_cuda, drop_cuda, apply_mask_cuda};

// What the adapters read, and the mask, which is filled if it has elements.
Tensor dropped(const Device& device, const Tensor& x, double p, bool training, Tensor& mask) {
  if (!training || p == 0) return x;
  const Tensor kept = empty(x.sizes(), x.scalar_type(), x.device());
  device.drop(contiguous(x), p, kept, mask.numel() > 0 ? &mask : nullptr);
  return kept;
}

std::tuple<Tensor, Tensor, Tensor> forward(const Device& device, const Tensor& output,
                                           const Tensor& input, const Adapters& adapters,
                                           at::IntArrayRef columns, double p, bool training,
                                           bool save_mask) {
  const bool has_mask = save_mask && training && p > 0;
  Tensor mask = empty({has_mask ? (input.numel() + 7) / 8 : 0}, at::kByte, input.device());
  const Tensor x = dropped(device, as_matrix(input), p, training, mask);
  const Tensor hidden = add_adapters(as_matrix(output), x, adapters, columns);
  return {output, with_last_size(hidden, input, hidden.size(1)), mask};
}

std::tuple<Tensor, Tensor, Tensor> forward_cpu(const Tensor& input, const Tensors& weight,
                                               const Tensors& bias, const Tensors& lora_a,
                                               const Tensors& lora_b, Indices out_features,
                                               Indices adapted, Scales scaling, double p,
                                               bool training, bool save_mask) {
  return forward(kCpu, packed_linear_cpu(input, weight, bias, out_features), input,
                 {lora_a, lora_b, adapted, scaling}, out_features, p, training, save_mask);
}

std::tuple<Tensor, Tensor, Tensor> forward_cuda(const Tensor& input, const Tensors& weight,
                                                const Tensors& bias, const Tensors& lora_a,
                                                const Tensors& lora_b, Indices out_features,
                                                Indices adapted, Scales scaling, double p,
                                                bool training, bool save_mask) {
  return forward(kCuda, packed_linear_cuda(input, weight, bias, out_features), input,
                 {lora_a, lora_b, adapted, scaling}, out_features, p, training, save_mask);
}

// Plain ATen for what the adapters read.
Tensor sum_decomposed(const Tensor& input, const Tensor& x, const Tensors& weight,
                      const Tensors& bias, const Tensors& lora_a, const Tensors& lora_b,
                      const Indices& adapted, const Scales& scaling) {
  Tensors parts;
  for (size_t i = 0; i < weight.size(); ++i) {
    parts.push_back(at::linear(input, weight[i], bias.empty() ? Tensor() : bias[i]));
  }
  for (size_t i = 0; i < lora_a.size(); ++i) {
    Tensor& part = parts[adapted[i]];
    const Tensor hidden = at::linear(x.to(lora_a[i].scalar_type()), lora_a[i]) * scaling[i];
    part = (part + at::linear(hidden, lora_b[i])).to(input.scalar_type());
  }
  return at::cat(parts, -1);
}

Tensor forward_decomposed(const Tensor& input, const Tensors& weight, const Tensors& bias,
                          const Tensors& lora_a, const Tensors& lora_b, Indices, Indices adapted,
                          Scales scaling, double p, bool training, bool) {
  const Tensor x = training && p > 0 ? at::dropout(input, p, /*train=*/true) : input;
  return sum_decomposed(input, x, weight, bias, lora_a, lora_b, adapted, scaling);
}

// Drops the same numbers as forward did.
Tensor replay(const ReplayCall& call) {
  const Tensor mask = call.slot("mask");
  const auto& attributes = call.attributes;
  const double p = std::get<double>(attributes.at("p"));
  const bool drops = mask.defined() && mask.numel() > 0;
  const Tensor x = drops ? dropout_decomposed(call.input, mask, p) : call.input;
  return sum_decomposed(call.input, x, call.tensors("weight"), call.tensors("bias"),
                        call.tensors("lora_a"), call.tensors("lora_b"),
                        std::get<Indices>(attributes.at("adapted")),
                        std::get<Scales>(attributes.at("scaling")));
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor* input,
                           const Tensor* hidden, const Tensor* mask, const Tensors& weight,
                           const Tensors& lora_a, const Tensors& lora_b, Indices out_features,
                           Indices adapted, Scales scaling, double p, AdapterMask wanted) {
  TensorSpecs specs = packed_linear_backward_outputs(check, grad_output, input, weight,
                                                     out_features, of_product(wanted));
  const auto [wants_input, wants_weight, wants_bias, wants_a, wants_b] = wanted;
  check_probability(check, p);
  if (!wants_input && !wants_a && !wants_b) {
    specs.insert(specs.end(), {list_of({}), list_of({})});
    return specs;
  }
  TORCH_CHECK(!lora_a.empty() && lora_a[0].dim() == 2, "[", check.op(),
              "] lora_a must have matrices, got ", lora_a.size(), " tensors");
  TensorSpec as_input = like(grad_output);
  as_input.sizes.back() = lora_a[0].sym_size(1);
  TensorSpec as_hidden = like(grad_output);
  as_hidden.sizes.back() = check_adapters(check, {lora_a, lora_b, adapted, scaling},
                                          as_input.sizes.back(), out_features);
  as_hidden.dtype = lora_a[0].scalar_type();
  const auto given = [&](const char* name, const Tensor* tensor, const TensorSpec& spec) {
    TORCH_CHECK(tensor != nullptr, "[", check.op(), "] ", name,
                " must be given for the gradients of adapters, got none");
    check.spec(name, *tensor, spec);
  };
  if (wants_a) given("input", input, as_input);
  if (wants_b) given("hidden", hidden, as_hidden);
  if (mask != nullptr && mask->sym_numel() != 0) {
    c10::SymInt count = 1;
    for (const auto& size : as_input.sizes) count *= size;
    check.spec("mask", *mask, {{(count + 7) / 8}, at::kByte});
  }
  specs.push_back(wants_a ? like(lora_a) : list_of({}));
  specs.push_back(wants_b ? like(lora_b) : list_of({}));
  return specs;
}

AdapterBackward backward(const Device& device, const Call& call, const Tensor& grad_output,
                         std::optional<Tensor> input, const Tensor* hidden, const Tensor* mask,
                         const Tensors& weight, const Adapters& adapters, at::IntArrayRef columns,
                         double p, AdapterMask wanted) {
  const auto [wants_input, wants_weight, wants_bias, wants_a, wants_b] = wanted;
  Tensor x = wants_a ? as_matrix(*input) : Tensor();
  AdapterBackward found;
  auto& [grad_input, grad_weight, grad_bias, grad_a, grad_b] = found;
  std::tie(grad_input, grad_weight, grad_bias) = device.product_backward(
      grad_output, std::move(input), weight, columns, of_product(wanted), call.main_grad());
  if (!wants_input && !wants_a && !wants_b) return found;
  const Tensor sum = wants_input ? as_matrix(grad_input) : Tensor();
  const bool drops = mask != nullptr && mask->numel() > 0;
  // The gradient of what the adapters read.
  Tensor of_x = sum;
  if (drops && wants_a) {
    const Tensor kept = empty(x.sizes(), x.scalar_type(), x.device());
    device.apply_mask(contiguous(x), *mask, p, kept);
    x = kept;
  }
  if (drops && wants_input) of_x = at::zeros(sum.sizes(), sum.options());
  std::tie(grad_a, grad_b) = adapters_backward(
      as_matrix(grad_output), x, wants_b ? as_matrix(*hidden) : Tensor(), adapters, columns, of_x);
  if (drops && wants_input) {
    device.apply_mask(of_x, *mask, p, of_x);
    sum.add_(of_x);
  }
  return found;
}

AdapterBackward backward_cpu(const Call& call, const Tensor& grad_output,
                             std::optional<Tensor> input, const Tensor* hidden, const Tensor* mask,
                             const Tensors& weight, const Tensors& lora_a, const Tensors& lora_b,
                             Indices out_features, Indices adapted, Scales scaling, double p,
                             AdapterMask wanted) {
  return backward(kCpu, call, grad_output, std::move(input), hidden, mask, weight,
                  {lora_a, lora_b, adapted, scaling}, out_features, p, wanted);
}

AdapterBackward backward_cuda(const Call& call, const Tensor& grad_output,
                              std::optional<Tensor> input, const Tensor* hidden, const Tensor* mask,
                              const Tensors& weight, const Tensors& lora_a, const Tensors& lora_b,
                              Indices out_features, Indices adapted, Scales scaling, double p,
                              AdapterMask wanted) {
  return backward(kCuda, call, grad_output, std::move(input), hidden, mask, weight,
                  {lora_a, lora_b, adapted, scaling}, out_features, p, wanted);
}

AdapterBackward backward_decomposed(const Tensor& grad_output, const Tensor* input,
                                    const Tensor* hidden, const Tensor* mask, const Tensors& weight,
                                    const Tensors& lora_a, const Tensors& lora_b,
                                    Indices out_features, Indices adapted, Scales scaling, double p,
                                    AdapterMask wanted) {
  const auto [wants_input, wants_weight, wants_bias, wants_a, wants_b] = wanted;
  auto [grad_input, grad_weight, grad_bias] = packed_linear_backward_decomposed(
      grad_output, input, weight, out_features, of_product(wanted));
  const bool drops = mask != nullptr && mask->sym_numel() != 0;
  const auto kept = [&](const Tensor& x) { return drops ? dropout_decomposed(x, *mask, p) : x; };
  Tensors grad_a, grad_b;
  if (!wants_input && !wants_a && !wants_b) {
    return {grad_input, grad_weight, grad_bias, grad_a, grad_b};
  }
  const auto dtype = lora_a[0].scalar_type();
  Tensor of_kept;
  c10::SymInt first = 0;
  for (size_t i = 0; i < lora_a.size(); ++i) {
    const auto before = at::IntArrayRef(out_features).slice(0, adapted[i]);
    const int64_t column = std::accumulate(before.begin(), before.end(), int64_t{0});
    const Tensor grad = grad_output.narrow(-1, column, out_features[adapted[i]]).to(dtype);
    const bool needs_hidden = wants_input || wants_a;
    const Tensor of_hidden = needs_hidden ? grad.matmul(lora_b[i]) * scaling[i] : Tensor();
    const c10::SymInt rank = lora_a[i].sym_size(0);
    if (wants_a) {
      grad_a.push_back(as_matrix(of_hidden).t().mm(as_matrix(kept(*input).to(dtype))));
    }
    if (wants_b) {
      const Tensor part = hidden->narrow_symint(-1, first, rank);
      grad_b.push_back(as_matrix(grad).t().mm(as_matrix(part)));
    }
    if (wants_input) {
      const Tensor part = of_hidden.matmul(lora_a[i]);
      of_kept = of_kept.defined() ? of_kept + part : part;
    }
    first += rank;
  }
  if (wants_input) grad_input = (grad_input + kept(of_kept)).to(grad_output.scalar_type());
  return {grad_input, grad_weight, grad_bias, grad_a, grad_b};
}

// Once more from what forward has kept.
TensorSpecs again_shape(const Checks& check, const Tensor& input, const Tensors& weight,
                        const Tensors& bias, const Tensor& hidden, const Tensors& lora_a,
                        const Tensors& lora_b, Indices out_features, Indices adapted,
                        Scales scaling) {
  TensorSpec as_hidden = like(input);
  const TensorSpec output = packed_linear_output(check, input, weight, bias, out_features);
  as_hidden.sizes.back() =
      check_adapters(check, {lora_a, lora_b, adapted, scaling}, input.sym_size(-1), out_features);
  as_hidden.dtype = lora_a[0].scalar_type();
  check.spec("hidden", hidden, as_hidden);
  return {output};
}

Tensor again(const Tensor& output, const Tensor& hidden, const Adapters& adapters,
             at::IntArrayRef columns) {
  add_hidden(as_matrix(output), as_matrix(hidden), adapters, columns);
  return output;
}

Tensor again_cpu(const Tensor& input, const Tensors& weight, const Tensors& bias,
                 const Tensor& hidden, const Tensors& lora_a, const Tensors& lora_b,
                 Indices out_features, Indices adapted, Scales scaling) {
  return again(packed_linear_cpu(input, weight, bias, out_features), hidden,
               {lora_a, lora_b, adapted, scaling}, out_features);
}

Tensor again_cuda(const Tensor& input, const Tensors& weight, const Tensors& bias,
                  const Tensor& hidden, const Tensors& lora_a, const Tensors& lora_b,
                  Indices out_features, Indices adapted, Scales scaling) {
  return again(packed_linear_cuda(input, weight, bias, out_features), hidden,
               {lora_a, lora_b, adapted, scaling}, out_features);
}

Tensor again_decomposed(const Tensor& input, const Tensors& weight, const Tensors& bias,
                        const Tensor& hidden, const Tensors& lora_a, const Tensors& lora_b,
                        Indices out_features, Indices adapted, Scales) {
  Tensors parts = packed_linear_decomposed(input, weight, bias).split_with_sizes(out_features, -1);
  c10::SymInt first = 0;
  for (size_t i = 0; i < lora_a.size(); ++i) {
    const c10::SymInt rank = lora_a[i].sym_size(0);
    Tensor& part = parts[adapted[i]];
    part = (part + at::linear(hidden.narrow_symint(-1, first, rank), lora_b[i]))
               .to(input.scalar_type());
    first += rank;
  }
  return at::cat(parts, -1);
}

int64_t total(const Attributes& attributes, int64_t) {
  const auto& columns = std::get<Indices>(attributes.at("out_features"));
  return std::accumulate(columns.begin(), columns.end(), int64_t{0});
}

// How many columns `hidden` has depends on the ranks.
int64_t bits_of_slot(const std::string& slot, int64_t width, int64_t element_bits) {
  if (slot == "hidden") return -1;
  return slot == "mask" ? width : slot == "input" ? width * element_bits : 0;
}

[[maybe_unused]] const bool registered = register_op({
    .declaration =
        {.kind = "LoRALinear",
         .summary = "x [weight0; weight1; ...]^T + bias, plus s drop(x) A^T B^T for each adapter",
         .parameters = {"weight", "bias", "lora_a", "lora_b"},
         .lists = {{"weight", "num_weights"},
                   {"bias", "num_weights", /*single=*/{}, /*optional=*/true},
                   {"lora_a", "num_adapters"},
                   {"lora_b", "num_adapters"}},
         .attributes = {"in_features", "out_features", "num_weights", "num_adapters", "adapted",
                        "scaling", "p", "accumulate_into_main_grad"},
         .flags = {"drops"},
         .slots = {{"input", {"weight", "lora_a"}},
                   {"hidden", {"lora_b"}},
                   {"mask", {"input", "lora_a"}, Slot::When{"drops", true}},
                   {"weight", {"input"}},
                   {"lora_a", {"input", "lora_a", "lora_b"}},
                   {"lora_b", {"input", "lora_a", "lora_b"}}},
         .states = {{"main_grad", "weight", "accumulate_into_main_grad"}},
         .dtype = DTypeRule::Parameter,
         .own_dtype = {"lora_a", "lora_b"},
         .operands = {"input", "weight"},
         .exact_operands = true,
         .width = total,
         .slot_bits = bits_of_slot},
    .forward = {.schema = "lora_linear(Tensor input, Tensor[] weight, Tensor[] bias, "
                          "Tensor[] lora_a, Tensor[] lora_b, int[] out_features, int[] adapted, "
                          "float[] scaling, float p, bool training, bool save_mask) -> "
                          "(Tensor output, Tensor hidden, Tensor mask)",
                .shape = forward_shape,
                .any_strides = {"input", "weight", "lora_a", "lora_b"},
                .products = {.list = {{"weight"}, {"lora_a"}, {"lora_b"}}},
                .bodies = {forward_cpu, forward_cuda, forward_decomposed},
                .random = true},
    .backward =
        {.schema = "lora_linear_backward(Tensor grad_output, Tensor? input, Tensor? hidden, "
                   "Tensor? mask, Tensor[] weight, Tensor[] lora_a, Tensor[] lora_b, "
                   "int[] out_features, int[] adapted, float[] scaling, float p, "
                   "bool[5] output_mask) -> (Tensor grad_input, Tensor[] grad_weight, "
                   "Tensor[] grad_bias, Tensor[] grad_lora_a, Tensor[] grad_lora_b)",
         .shape = backward_shape,
         .any_strides = {"grad_output", "input", "hidden", "weight", "lora_a", "lora_b"},
         .products = {.list = {{"weight"}, {"lora_a"}, {"lora_b", {"grad_input", "grad_lora_a"}}}},
         .bodies = {backward_cpu, backward_cuda, backward_decomposed},
         .accumulates = true},
    .recompute = recompute_by(
        {.schema = "lora_linear(Tensor input, Tensor[] weight, Tensor[] bias, Tensor hidden, "
                   "Tensor[] lora_a, Tensor[] lora_b, int[] out_features, int[] adapted, "
                   "float[] scaling) -> Tensor output",
         .shape = again_shape,
         .any_strides = {"input", "weight", "hidden", "lora_a", "lora_b"},
         .products = {.list = {{"weight"}, {"lora_b"}}},
         .bodies = {again_cpu, again_cuda, again_decomposed}}),
    .replay = replay,
});

}  // namespace
}  // namespace transformer_ops::ops::lora_linear
