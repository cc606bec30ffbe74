#include "wrappers/glu.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/glu.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"

namespace transformer_ops {
namespace {

using cpu::Glu;
using cpu::GluKind;

const GluAttribute& interleave() {
  static const GluAttribute row = {"glu_interleave_size", &Glu::interleave};
  return row;
}

Tensor glu(const Tensor& a, const Tensor& b, const Glu&) { return at::sigmoid(a) * b; }
Tensor geglu(const Tensor& a, const Tensor& b, const Glu&) { return at::gelu(a, "tanh") * b; }
Tensor exact_geglu(const Tensor& a, const Tensor& b, const Glu&) { return at::gelu(a, "none") * b; }
Tensor qgeglu(const Tensor& a, const Tensor& b, const Glu&) {
  return a * at::sigmoid(1.702 * a) * b;
}
Tensor reglu(const Tensor& a, const Tensor& b, const Glu&) { return at::relu(a) * b; }
Tensor sreglu(const Tensor& a, const Tensor& b, const Glu&) { return at::relu(a).square() * b; }
Tensor swiglu(const Tensor& a, const Tensor& b, const Glu&) { return at::silu(a) * b; }

Tensor situglu(const Tensor& a, const Tensor& b, const Glu& glu) {
  const Tensor gate = glu.beta1 * at::tanh(a / glu.beta1) * at::sigmoid(a);
  return gate * (glu.beta2 * at::tanh(b / glu.beta2));
}

Tensor clamped_swiglu(const Tensor& a, const Tensor& b, const Glu& glu) {
  // at::clamp is not used, because its gradient at the limit depends on torch's version.
  const Tensor gate = at::where(a > glu.limit, glu.limit, a);
  const Tensor below = at::where(b > glu.limit, glu.limit, b);
  const Tensor linear = at::where(below < -glu.limit, -glu.limit, below);
  return gate * at::sigmoid(glu.alpha * gate) * (linear + glu.offset);
}

void check_positive(const Checks& check, const char* name, double value) {
  TORCH_CHECK(std::isfinite(value) && value > 0, "[", check.op(), "] ", name,
              " must be finite and positive, got ", value);
}

}  // namespace

const std::vector<GluRow>& glus() {
  static const std::vector<GluRow> rows = {
      {"GLU", "glu", "sigmoid(a) b", GluKind::GLU, {}, glu},
      {"GEGLU", "geglu", "gelu(a) b", GluKind::GEGLU, {}, geglu},
      {"ExactGEGLU",
       "exact_geglu",
       "0.5 a (1 + erf(a / sqrt(2))) b",
       GluKind::ExactGEGLU,
       {},
       exact_geglu},
      {"QGEGLU", "qgeglu", "a sigmoid(1.702 a) b", GluKind::QGEGLU, {}, qgeglu},
      {"ReGLU", "reglu", "max(a, 0) b", GluKind::ReGLU, {}, reglu},
      {"SReGLU", "sreglu", "max(a, 0)^2 b", GluKind::SReGLU, {}, sreglu},
      {"SwiGLU", "swiglu", "a sigmoid(a) b", GluKind::SwiGLU, {interleave()}, swiglu},
      {"SiTUGLU",
       "situglu",
       "beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2)",
       GluKind::SiTUGLU,
       {interleave(), {"beta1", &Glu::beta1}, {"beta2", &Glu::beta2}},
       situglu},
      {"ClampedSwiGLU",
       "clamped_swiglu",
       "g sigmoid(alpha g) (l + glu_linear_offset), g = min(a, limit), l = clamp(b, +-limit)",
       GluKind::ClampedSwiGLU,
       {interleave(),
        {"limit", &Glu::limit},
        {"alpha", &Glu::alpha},
        {"glu_linear_offset", &Glu::offset}},
       clamped_swiglu},
  };
  return rows;
}

std::string schema_of_attributes(const GluRow& row) {
  std::string text;
  for (const auto& [name, field] : row.attributes) {
    const bool is_integer = std::holds_alternative<int64_t Glu::*>(field);
    text += (is_integer ? ", int " : ", float ") + name;
  }
  return text;
}

std::vector<std::string> names_of_attributes(const GluRow& row) {
  std::vector<std::string> names;
  for (const GluAttribute& attribute : row.attributes) names.push_back(attribute.name);
  return names;
}

const GluRow& glu_of_kind(std::string_view kind) {
  const auto row = std::ranges::find(glus(), kind, &GluRow::kind);
  TORCH_CHECK(row != glus().end(), "[glu] kind must be known, got '", kind, "'");
  return *row;
}

std::vector<std::string> glu_kinds() {
  std::vector<std::string> kinds;
  for (const GluRow& row : glus()) kinds.emplace_back(row.kind);
  return kinds;
}

GluArguments BodyParameter<const GluArguments&>::get(c10::IValue& first) {
  c10::IValue* next = &first;
  const auto number = [&] { return BodyParameter<double>::get(*next++); };
  GluArguments arguments = {};
  arguments.glu = BodyParameter<std::string_view>::get(*next++);
  arguments.glu_interleave_size = BodyParameter<int64_t>::get(*next++);
  arguments.beta1 = number();
  arguments.beta2 = number();
  arguments.limit = number();
  arguments.alpha = number();
  arguments.glu_linear_offset = number();
  return arguments;
}

const GluRow& glu_of(const Checks& check, const GluArguments& arguments) {
  const auto row = std::ranges::find(glus(), arguments.glu, &GluRow::name);
  TORCH_CHECK(row != glus().end(), "[", check.op(), "] glu must be one of ", names_of(glus()),
              ", got '", arguments.glu, "'");
  return *row;
}

cpu::Glu read_glu(const Checks& check, const GluArguments& arguments) {
  return {.kind = glu_of(check, arguments).glu,
          .interleave = arguments.glu_interleave_size,
          .beta1 = arguments.beta1,
          .beta2 = arguments.beta2,
          .limit = arguments.limit,
          .alpha = arguments.alpha,
          .offset = arguments.glu_linear_offset};
}

Bindings default_glu_bindings() {
  const Glu glu;
  return {{interleave().name, Attribute(glu.interleave)},
          {"beta1", Attribute(glu.beta1)},
          {"beta2", Attribute(glu.beta2)},
          {"limit", Attribute(glu.limit)},
          {"alpha", Attribute(glu.alpha)},
          {"glu_linear_offset", Attribute(glu.offset)}};
}

Bindings bind_glu(const Match& match, int k) {
  Bindings bindings = default_glu_bindings();
  bindings["glu"] = Attribute(glu_of_kind(match.kind(k)).name);
  for (const auto& [name, value] : match.op(k).attributes) bindings[name] = value;
  return bindings;
}

TensorSpec glu_output(const Checks& check, const char* name, const TensorSpec& input,
                      const Glu& glu) {
  check_positive(check, "beta1", glu.beta1);
  check_positive(check, "beta2", glu.beta2);
  check_positive(check, "limit", glu.limit);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
  TORCH_CHECK(glu.interleave >= 0 && glu.interleave <= kMost, "[", check.op(), "] ",
              interleave().name, " must lie in [0, ", kMost, "] (0 for halves), got ",
              glu.interleave);
  const int64_t divisor = glu.interleave == 0 ? 2 : 2 * glu.interleave;
  TORCH_CHECK(!input.sizes.empty() && input.sizes.back() % divisor == 0, "[", check.op(), "] ",
              name, " must have a last dimension that is a multiple of ", divisor, ", got shape ",
              c10::SymIntArrayRef(input.sizes));
  TensorSpec output = input;
  output.sizes.back() = input.sizes.back() / 2;
  return output;
}

Tensor glu_decomposed(const GluRow& row, const Tensor& input, const Glu& glu) {
  const Tensor x = to_accumulate(input);
  Tensor output;
  if (glu.interleave == 0) {
    const auto half = x.sym_size(-1) / 2;
    output = row.decomposition(x.narrow_symint(-1, 0, half), x.narrow_symint(-1, half, half), glu);
  } else {
    const auto blocks =
        x.unflatten_symint(-1, {x.sym_size(-1) / (2 * glu.interleave), 2, glu.interleave});
    output = row.decomposition(blocks.select(-2, 0), blocks.select(-2, 1), glu).flatten(-2);
  }
  return output.to(input.scalar_type());
}

void glu_forward_cpu(const Glu& glu, const Tensor& input, const Tensor& output) {
  const cpu::Rows x{input, input.size(-1)}, y{output, output.size(-1)};
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::glu_forward(glu, cpu::kernel_dtype(input), x.read(begin), y.write(begin), end - begin,
                     y.width);
  });
}

void glu_backward_cpu(const Glu& glu, const Tensor& grad_output, const Tensor& input,
                      const Tensor& grad_input) {
  const cpu::Rows grad{grad_output, grad_output.size(-1)};
  const cpu::Rows x{input, input.size(-1)}, grad_x{grad_input, x.width};
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    cpu::glu_backward(glu, cpu::kernel_dtype(input), grad.read(begin), x.read(begin),
                      grad_x.write(begin), end - begin, grad.width);
  });
}

void glu_forward_cuda(const Glu& glu, const Tensor& input, const Tensor& output) {
  cuda::glu_forward(cuda::stream_of(input), glu, kernel_dtype(input), cuda::read(input),
                    cuda::write(output), cuda::rows_of(output), output.size(-1));
}

void glu_backward_cuda(const Glu& glu, const Tensor& grad_output, const Tensor& input,
                       const Tensor& grad_input) {
  cuda::glu_backward(cuda::stream_of(input), glu, kernel_dtype(input), cuda::read(grad_output),
                     cuda::read(input), cuda::write(grad_input), cuda::rows_of(grad_output),
                     grad_output.size(-1));
}

}  // namespace transformer_ops
