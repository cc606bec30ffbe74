#include "wrappers/attention.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "wrappers/attention_heads.h"
#include "wrappers/attention_parts.h"
#include "wrappers/cpu.h"
#include "wrappers/dropout.h"

namespace transformer_ops {
namespace {

// How torch's kernel, which drops nothing, takes a call, if it does.
struct Flash {
  bool fits = true;
  std::optional<Tensor> mask = {};
};

// The kernel computes scores in float32, and takes a mask of that.
at::ScalarType mask_dtype(const Tensor& input, const Tensor& mask) {
  const auto dtype = mask.scalar_type();
  const bool is_kept = dtype == at::kBool || dtype == input.scalar_type();
  return is_kept ? input.scalar_type() : accumulate_dtype(input.scalar_type());
}

Flash flash_of(const Tensor& input, const Tensor* mask, const Attention& attention) {
  // The kernel multiplies the -inf of causal attention by the scale, and products by 0 not at all.
  const double scale = scale_of(attention);
  const bool is_scaled = scale > 0 || (scale < 0 && (mask != nullptr || !attention.causal));
  Flash flash{.fits = attention.p == 0 && is_scaled && !needs_float64(input, mask, attention)};
  if (!flash.fits || mask == nullptr) return flash;
  flash.mask = added_mask(input, mask, attention, mask_dtype(input, *mask));
  if (mask->scalar_type() == at::kBool && !attention.nan_rows) return flash;
  const auto acc = accumulate_dtype(input.scalar_type());
  const Tensor greatest = flash.mask->amax(-1).to(acc).contiguous();
  constexpr double kEmpty = -std::numeric_limits<double>::infinity();
  flash.fits = !any_of(greatest, [&](double number) {
    return number == kEmpty ? attention.nan_rows : !(std::abs(number) < kAbsorbing);
  });
  const auto is_large = [](double number) { return number != kEmpty && std::abs(number) > kSmall; };
  if (!flash.fits || !any_of(greatest, is_large)) return flash;
  // Scores of sinks are not relative.
  flash.fits = attention.sinks == nullptr;
  if (flash.fits) flash.mask = relative(flash.mask->to(acc));
  return flash;
}

std::tuple<Tensor, Tensor> flash_forward(const Tensor& input, const Flash& flash,
                                         const Attention& attention) {
  const auto [query, key, value] = heads_of(with_one_batch(input), attention);
  const auto [output, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, 0.0, attention.causal && !flash.mask, flash.mask, scale_of(attention));
  return {output.transpose(1, 2), log_sum_exp.transpose(1, 2)};
}

// Are results of the kernel those of a softmax, and does its backward compute the probabilities
// from these statistics? It takes some rows of NaN for rows that read nothing: their statistics are
// 0 without sinks.
bool is_exact(const Tensor& input, const Tensor& log_sum_exp, const Attention& attention) {
  if (!are_ordinary(log_sum_exp)) return false;
  const bool may_be_nan =
      attention.sinks != nullptr || any_of(log_sum_exp, [](auto number) { return number == 0; });
  return !may_be_nan ||
         std::isfinite(input.sum(accumulate_dtype(input.scalar_type())).item<double>());
}

Tensor flash_backward(const Tensor& grad_output, const Tensor& input, const Flash& flash,
                      const Tensor& output, const Tensor& log_sum_exp, const Attention& attention) {
  const auto [query, key, value] = heads_of(with_one_batch(input), attention);
  const auto in_heads = [&](const Tensor& rows) {
    return heads_at(with_one_batch(rows), 0, attention.heads, attention.head_dim);
  };
  const auto [grad_query, grad_key, grad_value] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          in_heads(grad_output), query, key, value, in_heads(output),
          with_one_batch(log_sum_exp).transpose(1, 2), 0.0, attention.causal && !flash.mask,
          flash.mask, scale_of(attention));
  return rows_of_heads({grad_query, grad_key, grad_value}, attention,
                       empty_cpu(input.sizes(), input.scalar_type()));
}

// The output and the statistics.
std::tuple<Tensor, Tensor> forward(const Tensor& input, const Tensor* mask,
                                   const Attention& attention, uint64_t seed) {
  const TensorSpecs specs = attention_outputs(input, attention);
  const auto as = [](const Tensor& tensor, const TensorSpec& spec) {
    return contiguous(tensor.reshape(C10_AS_INTARRAYREF_SLOW(spec.sizes)).to(spec.dtype));
  };
  if (const Flash flash = flash_of(input, mask, attention); flash.fits) {
    const auto [output, log_sum_exp] = flash_forward(input, flash, attention);
    Tensor rows = as(output, specs[0]), statistics = as(log_sum_exp, specs[1]);
    if (is_exact(input, statistics, attention)) {
      add_sinks(attention, rows, statistics);
      return {rows, statistics};
    }
  }
  auto [output, log_sum_exp] = attention_in_parts_cpu(input, mask, attention, seed);
  add_sinks(attention, output, log_sum_exp);
  return {as(output, specs[0]), as(log_sum_exp, specs[1])};
}

// The gradient of the input, and the statistics that it was computed with.
std::tuple<Tensor, Tensor> input_gradient(const Tensor& grad_output, const Tensor& input,
                                          const Tensor* mask, const Tensor& output,
                                          const Tensor* log_sum_exp, uint64_t seed,
                                          const Attention& attention) {
  if (const Flash flash = flash_of(input, mask, attention); flash.fits) {
    Tensor rows = output, statistics;
    if (log_sum_exp == nullptr) {
      std::tie(rows, statistics) = flash_forward(input, flash, attention);
      rows = rows.flatten(-2);
    } else {
      statistics = *log_sum_exp;
    }
    statistics = contiguous(statistics);
    if (is_exact(input, statistics, attention)) {
      return {flash_backward(grad_output, input, flash, rows, statistics, attention), statistics};
    }
  }
  return attention_in_parts_backward_cpu(grad_output, input, mask, attention, log_sum_exp, seed);
}

}  // namespace

Attention BodyParameter<const Attention&>::get(c10::IValue& sinks) {
  c10::IValue* const values = &sinks;
  Attention found{.heads = values[1].toInt(),
                  .kv_heads = values[2].toInt(),
                  .head_dim = values[3].toInt(),
                  .by_head = values[4].toBool(),
                  .causal = values[5].toBool(),
                  .p = values[6].toDouble(),
                  .scale = BodyParameter<std::optional<double>>::get(values[7]),
                  .nan_rows = values[8].toBool(),
                  .sinks = BodyParameter<const Tensor*>::get(sinks)};
  if (!values[9].toBool()) found.p = 0;  // in training alone
  found.nan_rows &= found.sinks == nullptr;
  return found;
}

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
  if (attention.sinks != nullptr) {
    check.spec("sinks", *attention.sinks, {{attention.heads}, attention.sinks->scalar_type()});
  }
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
  const uint64_t seed = draw_seed(attention.p);
  const Tensor seeds = attention.p > 0 ? seed_tensor(seed, input) : no_seed(input);
  if (input.numel() == 0) {
    const TensorSpecs specs = attention_outputs(input, attention);
    return {empty_cpu(C10_AS_INTARRAYREF_SLOW(specs[0].sizes), specs[0].dtype),
            empty_cpu(C10_AS_INTARRAYREF_SLOW(specs[1].sizes), specs[1].dtype), seeds};
  }
  const auto [output, log_sum_exp] = forward(input, mask, attention, seed);
  return {output, log_sum_exp, seeds};
}

std::tuple<Tensor, Tensor> attention_backward_cpu(const Tensor& grad_output, const Tensor& input,
                                                  const Tensor& output, const Tensor* log_sum_exp,
                                                  const Tensor& seed, const Tensor* mask,
                                                  const Attention& attention,
                                                  AttentionMask wanted) {
  const bool has_sinks = attention.sinks != nullptr, wants_sinks = has_sinks && wanted[1];
  const Tensor none = empty_cpu({0}, input.scalar_type());
  const Tensor no_sinks = empty_cpu({0}, (has_sinks ? *attention.sinks : input).scalar_type());
  if (input.numel() == 0) {
    return {wanted[0] ? at::zeros(input.sizes(), input.options()) : none,
            wants_sinks ? at::zeros_like(*attention.sinks) : no_sinks};
  }
  const auto number = attention.p > 0 ? static_cast<uint64_t>(seed[0].item<int64_t>()) : 0;
  if (has_sinks && log_sum_exp == nullptr) {
    const auto [rows, statistics] = forward(input, mask, attention, number);
    return attention_backward_cpu(grad_output, input, rows, &statistics, seed, mask, attention,
                                  wanted);
  }
  const auto [grad_input, statistics] =
      input_gradient(grad_output, input, mask, output, log_sum_exp, number, attention);
  return {wanted[0] ? contiguous(grad_input.to(input.scalar_type()).reshape(input.sizes())) : none,
          wants_sinks ? sinks_gradient(attention, grad_output, output, statistics) : no_sinks};
}

}  // namespace transformer_ops
