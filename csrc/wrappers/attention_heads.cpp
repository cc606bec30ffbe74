#include "wrappers/attention_heads.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>

namespace transformer_ops {
namespace {

Tensor infinity(const Tensor& like, at::ScalarType dtype) {
  return at::full({}, -std::numeric_limits<double>::infinity(), like.options().dtype(dtype));
}

Tensor additive(const Tensor& mask, at::ScalarType dtype) {
  if (mask.scalar_type() != at::kBool) return mask.to(dtype);
  return at::where(mask, at::zeros({}, mask.options().dtype(dtype)), infinity(mask, dtype));
}

// [batch or 1, heads or 1, rows or 1, columns], as the kernel of torch takes it, for inputs with
// one dimension of batches.
Tensor mask_with_one_batch(const Tensor& mask, const Tensor& input) {
  if (mask.dim() <= 4 && input.dim() <= 3) return mask.dim() == 3 ? mask.unsqueeze(0) : mask;
  if (mask.dim() == 2) return mask;
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end() - 2);
  const auto own = mask.sizes().slice(mask.dim() - 3);
  sizes.insert(sizes.end(), own.begin(), own.end());
  return mask.expand(sizes).reshape({-1, own[0], own[1], own[2]});
}

}  // namespace

double scale_of(const Attention& attention) {
  return attention.scale.value_or(1 / std::sqrt(static_cast<double>(attention.head_dim)));
}

Tensor heads_at(const Tensor& rows, int64_t first, int64_t heads, int64_t head_dim) {
  return rows.slice(-1, first * head_dim, (first + heads) * head_dim)
      .unflatten(-1, {heads, head_dim})
      .transpose(-2, -3);
}

Tensor part_by_head(const Tensor& rows, const Attention& attention, int64_t which) {
  return rows.unflatten(-1, {attention.heads, 3, attention.head_dim}).select(-2, which);
}

Heads heads_of(const Tensor& rows, const Attention& attention) {
  if (attention.by_head) {
    const auto part = [&](int64_t which) {
      return part_by_head(rows, attention, which).transpose(-2, -3);
    };
    return {part(0), part(1), part(2)};
  }
  const int64_t keys = attention.heads, values = keys + attention.kv_heads;
  return {heads_at(rows, 0, attention.heads, attention.head_dim),
          heads_at(rows, keys, attention.kv_heads, attention.head_dim),
          heads_at(rows, values, attention.kv_heads, attention.head_dim)};
}

Tensor with_one_batch(const Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-2), tensor.size(-1)});
}

Tensor rows_of_heads(const Heads& gradients, const Attention& attention, const Tensor& result) {
  const Tensor rows = with_one_batch(result);
  if (attention.by_head) {
    int64_t which = 0;
    for (const Tensor* gradient : {&gradients.query, &gradients.key, &gradients.value}) {
      part_by_head(rows, attention, which++).copy_(gradient->transpose(1, 2));
    }
    return result;
  }
  int64_t first = 0;
  for (const Tensor* gradient : {&gradients.query, &gradients.key, &gradients.value}) {
    // torch's kernels store heads next to each other, so that rows are copied as a whole.
    const Tensor part = gradient->transpose(1, 2).flatten(-2);
    rows.slice(-1, first, first + part.size(-1)).copy_(part);
    first += part.size(-1);
  }
  return result;
}

Tensor mask_of(const Tensor& input, const Tensor* mask, const Attention& attention,
               at::ScalarType dtype) {
  Tensor found = mask == nullptr ? Tensor() : additive(*mask, dtype);
  if (attention.causal) {
    const c10::SymInt rows = input.sym_size(-2);
    const Tensor later =
        at::ones_symint({rows, rows}, input.options().dtype(at::kBool)).triu_symint(1);
    const Tensor causal =
        at::where(later, infinity(input, dtype), at::zeros({}, input.options().dtype(dtype)));
    found = found.defined() ? found + causal : causal;
  }
  return found;
}

std::optional<Tensor> added_mask(const Tensor& input, const Tensor* mask,
                                 const Attention& attention, at::ScalarType dtype) {
  if (mask == nullptr) return std::nullopt;
  return mask_with_one_batch(mask_of(input, mask, attention, dtype), input);
}

Tensor shift_of(const Tensor& mask, double limit) {
  const Tensor greatest = mask.amax(-1, /*keepdim=*/true);
  const Tensor size = greatest.abs();
  return at::where((size > kSmall).logical_and(size < limit), greatest, 0);
}

Tensor relative(const Tensor& mask, double limit) { return mask - shift_of(mask, limit); }

void add_sinks(const Attention& attention, Tensor& output, Tensor& log_sum_exp) {
  if (attention.sinks == nullptr) return;
  const Tensor all = at::logaddexp(log_sum_exp, attention.sinks->to(log_sum_exp.scalar_type()));
  output.unflatten(-1, {attention.heads, attention.head_dim})
      .mul_((log_sum_exp - all).exp_().unsqueeze(-1));
  log_sum_exp = all;
}

Tensor sinks_gradient(const Attention& attention, const Tensor& grad_output, const Tensor& output,
                      const Tensor& log_sum_exp) {
  const auto in_heads = [&](const Tensor& rows) {
    return with_one_batch(rows)
        .to(log_sum_exp.scalar_type())
        .unflatten(-1, {attention.heads, attention.head_dim});
  };
  const Tensor p = (*attention.sinks - with_one_batch(log_sum_exp)).exp_();
  const Tensor along = (in_heads(grad_output) * in_heads(output)).sum(-1);
  return (p * along).sum({0, 1}).neg_().to(attention.sinks->scalar_type());
}

Tensor seed_tensor(uint64_t seed, const Tensor& input) {
  Tensor found = at::zeros({2}, input.options().dtype(at::kLong));
  found[0].fill_(static_cast<int64_t>(seed));
  return found;
}

Tensor no_seed(const Tensor& input) { return at::empty({0}, input.options().dtype(at::kLong)); }

}  // namespace transformer_ops
