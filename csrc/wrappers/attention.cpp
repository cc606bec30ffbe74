#include "wrappers/attention.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/zeros.h>

#include "wrappers/attention_dropout.h"
#include "wrappers/attention_heads.h"
#include "wrappers/cpu.h"
#include "wrappers/dropout.h"

namespace transformer_ops {
namespace {

// torch's kernel, which drops nothing.
std::tuple<Tensor, Tensor> flash_forward(const Tensor& input, const Tensor* mask,
                                         const Attention& attention) {
  const auto [query, key, value] = heads_of(with_one_batch(input), attention);
  const auto added = added_mask(input, mask, attention, input.scalar_type());
  return at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, 0.0, attention.causal && mask == nullptr, added, scale_of(attention));
}

Tensor flash_backward(const Tensor& grad_output, const Tensor& input, const Tensor* mask,
                      const Tensor& output, const Tensor& log_sum_exp, const Attention& attention) {
  const auto [query, key, value] = heads_of(with_one_batch(input), attention);
  const auto added = added_mask(input, mask, attention, input.scalar_type());
  const auto in_heads = [&](const Tensor& rows) {
    return heads_at(with_one_batch(rows), 0, attention.heads, attention.head_dim);
  };
  const auto [grad_query, grad_key, grad_value] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          in_heads(grad_output), query, key, value, in_heads(output),
          with_one_batch(log_sum_exp).transpose(1, 2), 0.0, attention.causal && mask == nullptr,
          added, scale_of(attention));
  return rows_of_heads({grad_query, grad_key, grad_value}, attention,
                       empty_cpu(input.sizes(), input.scalar_type()));
}

}  // namespace

void check_attention(const Checks& check, const Tensor& input, const Tensor* mask,
                     const Attention& attention) {
  check.compute_dtype("input", input);
  TORCH_CHECK(attention.heads >= 1 && attention.kv_heads >= 1 && attention.head_dim >= 1, "[",
              check.op(), "] num_heads, num_kv_heads and head_dim must be at least 1, got ",
              attention.heads, ", ", attention.kv_heads, " and ", attention.head_dim);
  TORCH_CHECK(attention.heads % attention.kv_heads == 0, "[", check.op(),
              "] num_heads must be a multiple of num_kv_heads, got ", attention.heads, " and ",
              attention.kv_heads);
  TORCH_CHECK(!attention.by_head || attention.heads == attention.kv_heads, "[", check.op(),
              "] num_kv_heads must be num_heads with by_head, got ", attention.kv_heads, " and ",
              attention.heads);
  TORCH_CHECK(input.dim() >= 2, "[", check.op(),
              "] input must have at least 2 dimensions, got shape ", input.sym_sizes());
  TORCH_CHECK(input.sym_size(-1) == attention.width(), "[", check.op(),
              "] input must have last dimension ", attention.width(), " (queries of ",
              attention.heads, " heads, keys and values of ", attention.kv_heads,
              " heads), got shape ", input.sym_sizes());
  check_probability(check, attention.p);
  if (mask == nullptr) return;
  TORCH_CHECK(mask->scalar_type() == at::kBool || at::isFloatingType(mask->scalar_type()), "[",
              check.op(), "] mask must have a floating dtype or Bool, got ", mask->scalar_type());
  const c10::SymInt rows = input.sym_size(-2);
  c10::SymDimVector wanted(input.sym_sizes().slice(0, input.dim() - 2));
  wanted.insert(wanted.end(), {c10::SymInt(attention.heads), rows, rows});
  const auto sizes = mask->sym_sizes();
  bool fits = sizes.size() == 2 || sizes.size() == wanted.size();
  for (size_t i = 0; fits && i < sizes.size(); ++i) {
    const c10::SymInt& most = wanted[wanted.size() - sizes.size() + i];
    fits = sizes[i] == most || (sizes[i] == 1 && i + 1 < sizes.size());
  }
  TORCH_CHECK(fits, "[", check.op(), "] mask must have shape ", c10::SymIntArrayRef(wanted),
              " (all but the last may be 1), or its last two dimensions, got shape ", sizes);
}

TensorSpecs attention_outputs(const Tensor& input, const Attention& attention) {
  TensorSpec output = like(input);
  output.sizes.back() = attention.query_width();
  TensorSpec log_sum_exp{output.sizes, accumulate_dtype(input.scalar_type())};
  log_sum_exp.sizes.back() = attention.heads;
  return {output, log_sum_exp, {{attention.p > 0 ? 2 : 0}, at::kLong}};
}

std::tuple<Tensor, Tensor, Tensor> attention_cpu(const Tensor& input, const Tensor* mask,
                                                 const Attention& attention) {
  const TensorSpecs specs = attention_outputs(input, attention);
  const auto sizes_of = [](const TensorSpec& spec) { return C10_AS_INTARRAYREF_SLOW(spec.sizes); };
  const uint64_t seed = draw_seed(attention.p);
  Tensor output, log_sum_exp;
  if (input.numel() == 0) {
    output = at::zeros(sizes_of(specs[0]), input.options());
    log_sum_exp = at::zeros(sizes_of(specs[1]), input.options().dtype(specs[1].dtype));
  } else if (attention.p > 0) {
    std::tie(output, log_sum_exp) = dropped_attention_cpu(input, mask, attention, seed);
    output = output.to(input.scalar_type());
  } else {
    std::tie(output, log_sum_exp) = flash_forward(input, mask, attention);
    output = output.transpose(1, 2);
    log_sum_exp = log_sum_exp.transpose(1, 2);
  }
  return {contiguous(output.reshape(sizes_of(specs[0]))),
          contiguous(log_sum_exp.reshape(sizes_of(specs[1]))),
          attention.p > 0 ? seed_tensor(seed, input) : no_seed(input)};
}

Tensor attention_backward_cpu(const Tensor& grad_output, const Tensor& input, const Tensor* mask,
                              const Tensor& output, const Tensor& log_sum_exp, const Tensor& seed,
                              const Attention& attention) {
  if (input.numel() == 0) return at::zeros(input.sizes(), input.options());
  if (attention.p == 0) {
    return flash_backward(grad_output, input, mask, output, log_sum_exp, attention);
  }
  const auto number = static_cast<uint64_t>(seed[0].item<int64_t>());
  const Tensor found =
      dropped_attention_backward_cpu(grad_output, input, mask, attention, log_sum_exp, number);
  return contiguous(found.to(input.scalar_type()).reshape(input.sizes()));
}

}  // namespace transformer_ops
