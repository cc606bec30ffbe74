// QKNorm: RMS normalization of the queries and of the keys in a row; the rest passes through.
#include <ATen/ops/cat.h>
#include <ATen/ops/rsqrt.h>

#include "op/decomposition.h"
#include "op/op.h"
#include "op/recompute.h"
#include "wrappers/cpu.h"
#include "wrappers/norm.h"

namespace transformer_ops::ops::qk_norm {
namespace {

using Eps = std::optional<double>;
// Flags of the wanted results among (grad_input, grad_q_weight, grad_k_weight).
using Mask = std::array<bool, 3>;

// A part of a row: `count` norms of `width` numbers each, side by side.
struct Part {
  int64_t first;
  int64_t count;
  int64_t width;
};

std::array<Part, 2> parts_of(int64_t heads, int64_t kv_heads, int64_t head_dim, bool per_head) {
  const auto part = [&](int64_t first, int64_t of_part) -> Part {
    if (per_head) return {first, of_part, head_dim};
    return {first, 1, of_part * head_dim};
  };
  return {part(0, heads), part(heads * head_dim, kv_heads)};
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& q_weight,
                          const Tensor& k_weight, int64_t heads, int64_t kv_heads, int64_t head_dim,
                          bool per_head, Eps, bool) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  const int64_t width = (heads + kv_heads) * head_dim;
  TORCH_CHECK(input.sym_size(-1) >= width, "[", check.op(),
              "] input must have a last dimension of at least ", width, " (queries of ", heads,
              " heads, keys of ", kv_heads, " heads), got shape ", input.sym_sizes());
  const auto [q, k] = parts_of(heads, kv_heads, head_dim, per_head);
  check.compute_dtype("q_weight", q_weight);
  check.spec("q_weight", q_weight, {{q.width}, q_weight.scalar_type()});
  check.spec("k_weight", k_weight, {{k.width}, q_weight.scalar_type()});
  return {like(input)};
}

void forward_cpu(const Tensor& input, const Tensor& q_weight, const Tensor& k_weight, int64_t heads,
                 int64_t kv_heads, int64_t head_dim, bool per_head, Eps eps,
                 bool zero_centered_gamma, Tensor& output) {
  const cpu::Rows x{input, input.size(-1)}, y{output, x.width};
  const auto parts = parts_of(heads, kv_heads, head_dim, per_head);
  const cpu::NormParameters q(input, &q_weight, nullptr, zero_centered_gamma);
  const cpu::NormParameters k(input, &k_weight, nullptr, zero_centered_gamma);
  const std::array<const void*, 2> gammas = {q.gamma, k.gamma};
  const double epsilon = rms_norm_eps(eps, input);
  const auto dtype = cpu::kernel_dtype(input);
  const auto size = static_cast<int64_t>(input.element_size());
  const int64_t rest = (heads + kv_heads) * head_dim;
  cpu::parallel(x.count(), x.width, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> statistics(static_cast<size_t>(heads + kv_heads));
    for (int64_t row = begin; row < end; ++row) {
      const auto* const from = static_cast<const char*>(x.read(row));
      auto* const to = static_cast<char*>(y.write(row));
      for (size_t i = 0; i < parts.size(); ++i) {
        const int64_t at = parts[i].first * size;
        cpu::rms_norm_forward(dtype, from + at, gammas[i], epsilon, to + at, statistics.data(),
                              parts[i].count, parts[i].width);
      }
      if (from != to) std::copy_n(from + rest * size, (x.width - rest) * size, to + rest * size);
    }
  });
}

Tensor norm_decomposed(const Tensor& input, const Tensor& weight, const Part& part, Eps eps,
                       bool zero_centered_gamma) {
  const Tensor x = to_accumulate(input)
                       .slice(-1, part.first, part.first + part.count * part.width)
                       .unflatten(-1, {part.count, part.width});
  const Tensor gamma = weight.to(x.scalar_type()) + gamma_offset(zero_centered_gamma);
  const Tensor rstd = at::rsqrt(x.square().mean(-1, /*keepdim=*/true) + rms_norm_eps(eps, input));
  return (x * rstd * gamma).flatten(-2).to(input.scalar_type());
}

Tensor forward_decomposed(const Tensor& input, const Tensor& q_weight, const Tensor& k_weight,
                          int64_t heads, int64_t kv_heads, int64_t head_dim, bool per_head, Eps eps,
                          bool zero_centered_gamma) {
  const auto [q, k] = parts_of(heads, kv_heads, head_dim, per_head);
  return at::cat({norm_decomposed(input, q_weight, q, eps, zero_centered_gamma),
                  norm_decomposed(input, k_weight, k, eps, zero_centered_gamma),
                  input.slice(-1, (heads + kv_heads) * head_dim)},
                 -1);
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                           const Tensor& q_weight, const Tensor& k_weight, int64_t heads,
                           int64_t kv_heads, int64_t head_dim, bool per_head, Eps eps,
                           bool zero_centered_gamma, Mask wanted) {
  forward_shape(check, input, q_weight, k_weight, heads, kv_heads, head_dim, per_head, eps,
                zero_centered_gamma);
  check.spec("grad_output", grad_output, like(input));
  const auto [wants_input, wants_q, wants_k] = wanted;
  return {wants_input ? like(input) : absent(input.scalar_type()),
          wants_q ? like(q_weight) : absent(q_weight.scalar_type()),
          wants_k ? like(k_weight) : absent(k_weight.scalar_type())};
}

// Norms of several rows, copied next to each other.
class Gathered {
 public:
  Gathered(const Part& part, const cpu::Rows& rows)
      : skipped_(part.first * rows.tensor.element_size()),
        bytes_(part.count * part.width * rows.tensor.element_size()) {}

  int64_t bytes() const { return bytes_; }

  void read(const cpu::Rows& rows, int64_t row, int64_t count, char* to) const {
    for (int64_t r = 0; r < count; ++r) {
      const auto* const from = static_cast<const char*>(rows.read(row + r));
      std::copy_n(from + skipped_, bytes_, to + r * bytes_);
    }
  }
  void write(const char* from, const cpu::Rows& rows, int64_t row, int64_t count) const {
    for (int64_t r = 0; r < count; ++r) {
      auto* const to = static_cast<char*>(rows.write(row + r));
      std::copy_n(from + r * bytes_, bytes_, to + skipped_);
    }
  }

 private:
  int64_t skipped_;
  int64_t bytes_;
};

// The gradients of one part of all rows. A kernel sums over few rows at a time.
void part_backward(const Part& part, const cpu::Rows& grad, const cpu::Rows& x,
                   const cpu::Rows& grad_x, const cpu::NormParameters& parameters, double eps,
                   const Tensor* grad_weight) {
  constexpr int64_t kRows = 8;
  const Gathered gathered(part, x);
  const auto dtype = cpu::kernel_dtype(x.tensor);
  Tensor sums = grad_weight != nullptr ? *grad_weight : Tensor();
  cpu::sum_rows(x.count(), part.width, x.tensor, {&sums, grad_weight != nullptr ? size_t{1} : 0},
                [&](int64_t begin, int64_t end, const std::vector<void*>& totals) {
                  const auto most = static_cast<size_t>(kRows * gathered.bytes());
                  std::vector<char> xs(most), grads(most), made(most);
                  std::vector<double> rstd(static_cast<size_t>(kRows * part.count));
                  for (int64_t row = begin; row < end; row += kRows) {
                    const int64_t count = std::min(kRows, end - row);
                    gathered.read(x, row, count, xs.data());
                    gathered.read(grad, row, count, grads.data());
                    cpu::rms_norm_forward(dtype, xs.data(), nullptr, eps, made.data(), rstd.data(),
                                          count * part.count, part.width);
                    cpu::rms_norm_backward(
                        dtype, grads.data(), xs.data(), rstd.data(), parameters.gamma, made.data(),
                        totals.empty() ? nullptr : totals[0], count * part.count, part.width);
                    gathered.write(made.data(), grad_x, row, count);
                  }
                });
}

void backward_cpu(const Tensor& grad_output, const Tensor& input, const Tensor& q_weight,
                  const Tensor& k_weight, int64_t heads, int64_t kv_heads, int64_t head_dim,
                  bool per_head, Eps eps, bool zero_centered_gamma, Mask wanted, Tensor& grad_input,
                  Tensor& grad_q_weight, Tensor& grad_k_weight) {
  const auto [wants_input, wants_q, wants_k] = wanted;
  const Tensor of_input = memory_for(grad_input, wants_input, input);
  const cpu::Rows x{input, input.size(-1)}, grad{grad_output, x.width}, grad_x{of_input, x.width};
  const auto [q, k] = parts_of(heads, kv_heads, head_dim, per_head);
  const double epsilon = rms_norm_eps(eps, input);
  if (wants_input) {
    const int64_t rest = (heads + kv_heads) * head_dim;
    of_input.slice(-1, rest).copy_(grad_output.slice(-1, rest));
  }
  part_backward(q, grad, x, grad_x,
                cpu::NormParameters(input, &q_weight, nullptr, zero_centered_gamma), epsilon,
                wants_q ? &grad_q_weight : nullptr);
  part_backward(k, grad, x, grad_x,
                cpu::NormParameters(input, &k_weight, nullptr, zero_centered_gamma), epsilon,
                wants_k ? &grad_k_weight : nullptr);
}

std::tuple<Tensor, Tensor, Tensor> backward_decomposed(const Tensor& grad_output,
                                                       const Tensor& input, const Tensor& q_weight,
                                                       const Tensor& k_weight, int64_t heads,
                                                       int64_t kv_heads, int64_t head_dim,
                                                       bool per_head, Eps eps,
                                                       bool zero_centered_gamma, Mask wanted) {
  const auto found = gradients(
      [&](const Tensor& x, const Tensor& q, const Tensor& k) {
        return forward_decomposed(x, q, k, heads, kv_heads, head_dim, per_head, eps,
                                  zero_centered_gamma);
      },
      grad_output, input, q_weight, k_weight);
  const auto [wants_input, wants_q, wants_k] = wanted;
  return {wants_input ? found[0] : Tensor(), wants_q ? found[1] : Tensor(),
          wants_k ? found[2] : Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> backward_cuda(const Tensor& grad_output, const Tensor& input,
                                                 const Tensor& q_weight, const Tensor& k_weight,
                                                 int64_t heads, int64_t kv_heads, int64_t head_dim,
                                                 bool per_head, Eps eps, bool zero_centered_gamma,
                                                 Mask wanted) {
  const WithAutograd guard;
  const auto found = backward_decomposed(grad_output, input, q_weight, k_weight, heads, kv_heads,
                                         head_dim, per_head, eps, zero_centered_gamma, wanted);
  const auto as_result = [](const Tensor& gradient, const Tensor& like) {
    return gradient.defined() ? contiguous(gradient.detach()) : like.new_empty({0});
  };
  return {as_result(std::get<0>(found), input), as_result(std::get<1>(found), q_weight),
          as_result(std::get<2>(found), k_weight)};
}

const TypedOp kForward = {
    .schema =
        "qk_norm(Tensor input, Tensor q_weight, Tensor k_weight, int num_heads, "
        "int num_kv_heads, int head_dim, bool per_head, float? eps, "
        "bool zero_centered_gamma) -> Tensor output",
    .shape = forward_shape,
    .overwrites = {"input"},
    .bodies = {forward_cpu, forward_decomposed, forward_decomposed}};

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "QKNorm",
                    .summary = "RMS normalization of queries and keys in rows that hold both",
                    .parameters = {"q_weight", "k_weight"},
                    .attributes = {"num_heads", "num_kv_heads", "head_dim", "per_head", "eps",
                                   "zero_centered_gamma"},
                    .slots = {{"input"}},
                    .dtype = DTypeRule::Autocast},
    .forward = kForward,
    .backward = {.schema = "qk_norm_backward(Tensor grad_output, Tensor input, Tensor q_weight, "
                           "Tensor k_weight, int num_heads, int num_kv_heads, int head_dim, "
                           "bool per_head, float? eps, bool zero_centered_gamma, "
                           "bool[3] output_mask) -> (Tensor grad_input, Tensor grad_q_weight, "
                           "Tensor grad_k_weight)",
                 .shape = backward_shape,
                 .bodies = {backward_cpu, backward_cuda, backward_decomposed}},
    .recompute = recompute_by(kForward),
});

}  // namespace
}  // namespace transformer_ops::ops::qk_norm
