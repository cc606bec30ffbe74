// Attention by torch's kernels for CUDA, and in plain ATen.
#include <ATen/Context.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "op/decomposition.h"
#include "wrappers/attention_heads.h"
#include "wrappers/attention_parts.h"
#include "wrappers/cuda.h"
#include "wrappers/dropout.h"

namespace transformer_ops {
namespace {

// ---- the flash kernel, whose backward reads the statistics that forward saves

// The kernel takes heads of up to 256, but not on every GPU. Forward and backward have to agree, so
// that torch's switches of it do not count.
bool takes_flash(const Tensor& input, const Tensor* mask, const Attention& attention) {
  const auto dtype = input.scalar_type();
  return input.is_cuda() && mask == nullptr && (dtype == at::kHalf || dtype == at::kBFloat16) &&
         attention.head_dim % 8 == 0 && attention.head_dim <= 192 && attention.p < 1 &&
         scale_of(attention) > 0;
}

// The kernel reads vectors of 16 bytes.
Tensor aligned(const Tensor& rows) {
  const auto address = reinterpret_cast<uintptr_t>(cuda::read(rows));
  return address % 16 == 0 ? rows : rows.clone();
}

std::tuple<Tensor, Tensor, Tensor> flash_forward(const Tensor& input, const Attention& attention,
                                                 const TensorSpecs& specs) {
  const auto [query, key, value] = heads_of(aligned(with_one_batch(input)), attention);
  const auto found =
      at::_scaled_dot_product_flash_attention(query, key, value, attention.p, attention.causal,
                                              /*return_debug_mask=*/false, scale_of(attention));
  const auto rows_like = [](const Tensor& heads, const TensorSpec& spec) {
    return contiguous(heads.transpose(1, 2).reshape(C10_AS_INTARRAYREF_SLOW(spec.sizes)));
  };
  const Tensor& generator = std::get<6>(found);
  Tensor output = rows_like(std::get<0>(found), specs[0]);
  Tensor log_sum_exp = rows_like(std::get<1>(found), specs[1]);
  add_sinks(attention, output, log_sum_exp);
  return {output, log_sum_exp,
          attention.p > 0 ? generator.view(at::kLong).reshape({2}) : no_seed(input)};
}

// The gradients of the input and, if there are some, of sinks.
std::tuple<Tensor, Tensor> flash_backward(const Tensor& grad_output, const Tensor& input,
                                          const Tensor& output, const Tensor* log_sum_exp,
                                          const Tensor& seed, const Attention& attention) {
  const Tensor rows = aligned(with_one_batch(input));
  const auto [query, key, value] = heads_of(rows, attention);
  const auto in_heads = [&](const Tensor& tensor) {
    return heads_at(aligned(with_one_batch(tensor)), 0, attention.heads, attention.head_dim);
  };
  Tensor rows_out = output, statistics;
  if (log_sum_exp == nullptr) {
    // Dropout comes behind the statistics, which are made again of the decoded input.
    Attention whole = attention;
    whole.p = 0;
    const auto found = flash_forward(input, whole, attention_outputs(input, whole));
    if (attention.p == 0) rows_out = std::get<0>(found);
    statistics = std::get<1>(found);
  } else {
    statistics = *log_sum_exp;
  }
  // Without dropout nobody reads it.
  const Tensor generator =
      attention.p > 0 ? seed : at::empty({2}, input.options().dtype(at::kLong));
  const auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_backward(
      in_heads(grad_output), query, key, value, in_heads(rows_out),
      with_one_batch(statistics).transpose(1, 2).contiguous(), {}, {}, rows.size(1), rows.size(1),
      attention.p, attention.causal, generator.view(at::kUInt64),
      at::empty({}, generator.options()), scale_of(attention));
  return {rows_of_heads({grad_query, grad_key, grad_value}, attention,
                        at::empty(input.sizes(), input.options())),
          attention.sinks == nullptr
              ? Tensor()
              : sinks_gradient(attention, grad_output, rows_out, statistics)};
}

// ---- plain ATen

// `added` may be undefined, and `empty`, the rows that read nothing and become zeros, and the
// scores of sinks, which broadcast to [..., heads, rows, 1], too.
Tensor probabilities_of(const Tensor& query, const Tensor& key, double scale, const Tensor& added,
                        const Tensor& empty, const Tensor& sinks = {}) {
  const int64_t groups = query.size(-3) / key.size(-3);
  const Tensor keys = groups > 1 ? key.repeat_interleave(groups, -3) : key;
  Tensor scores = at::matmul(query, keys.transpose(-1, -2)) * scale;
  if (added.defined()) scores = scores + added;
  if (sinks.defined()) {
    c10::SymDimVector sizes(scores.sym_sizes());
    sizes.back() = 1;
    return at::softmax(at::cat({sinks.expand_symint(sizes), scores}, -1), -1).slice(-1, 1);
  }
  if (!empty.defined()) return at::softmax(scores, -1);
  return at::softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0);
}

Tensor rows_that_read_nothing(const Tensor* mask, const Tensor& added, const Attention& attention) {
  if (mask == nullptr || attention.nan_rows || attention.sinks != nullptr) return {};
  return at::isneginf(added.amax(-1, /*keepdim=*/true));
}

Tensor read(const Tensor& probabilities, const Tensor& value) {
  const int64_t groups = probabilities.size(-3) / value.size(-3);
  const Tensor values = groups > 1 ? value.repeat_interleave(groups, -3) : value;
  return at::matmul(probabilities, values).transpose(-2, -3).flatten(-2);
}

// ---- the kernel that torch chooses, which runs again in backward

// Torch's generator of a device begins at a seed for as long as one of these lives.
class SeededGenerator {
 public:
  SeededGenerator(c10::Device device, uint64_t seed)
      : generator_(at::globalContext().defaultGenerator(device)) {
    const std::scoped_lock lock(generator_.mutex());
    state_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  SeededGenerator(const SeededGenerator&) = delete;
  SeededGenerator& operator=(const SeededGenerator&) = delete;
  ~SeededGenerator() {
    const std::scoped_lock lock(generator_.mutex());
    generator_.set_state(state_);
  }

 private:
  at::Generator generator_;
  Tensor state_;
};

uint64_t draw_seed_cuda(const Tensor& input, double p) {
  const cuda::Philox drawn = draw_philox(input.device(), p);
  TORCH_CHECK(
      drawn.seed_at == nullptr,
      "[attention] p must be 0 while a CUDA graph is captured, or there must be no mask and "
      "a dtype of 16 bits, got ",
      p);
  // Offsets are small, and seeds need not be.
  return drawn.seed + drawn.offset * 0x9e3779b97f4a7c15u;
}

// What the kernel takes. It looks for the greatest product, where the greatest score is another one
// unless the scale is positive.
struct Operands {
  Tensor query, key, value;
  double scale;
  std::optional<Tensor> added = {};
};

// A kernel loses the sum of a row of numbers next to a large one, so the greatest number becomes 0.
// If it rounds scores away, scores minus themselves are added: their gradients pass.
void add_numbers(Operands& in, const Tensor& numbers) {
  const Tensor absorbs = numbers.amax(-1, /*keepdim=*/true).abs() >= kAbsorbing;
  in.added = relative(numbers, std::numeric_limits<double>::infinity()).to(in.query.scalar_type());
  const Tensor minus = in.query.detach().neg().masked_fill(absorbs.logical_not(), 0);
  in.query = at::cat({in.query, minus}, -1);
  in.key = at::cat({in.key, in.key.detach().nan_to_num(0, 0, 0)}, -1);
}

Operands operands_of(const Tensor& input, const Tensor* mask, const Attention& attention) {
  const auto [query, key, value] = heads_of(input, attention);
  const double scale = scale_of(attention);
  Operands in{query, key, value, scale};
  if (scale <= 0) {
    in.query = query * (scale < 0 ? -1 : 0);
    in.scale = scale < 0 ? -scale : 1;
  }
  if (mask == nullptr) return in;
  if (mask->scalar_type() == at::kBool) {
    in.added = mask_of(input, mask, attention, input.scalar_type());
  } else {
    add_numbers(in, mask_of(input, mask, attention, accumulate_dtype(input.scalar_type())));
  }
  return in;
}

Tensor chosen_by_torch(const Tensor& input, const Tensor* mask, const Attention& attention,
                       const Tensor& seed) {
  // The numbers of a run on CPU, where the wrappers for CUDA are tested.
  if (attention.p > 0 && !input.is_cuda()) {
    return attention_decomposed(input, mask, attention, seed);
  }
  std::optional<SeededGenerator> generator;
  if (attention.p > 0) generator.emplace(input.device(), seed[0].item<int64_t>());
  if (attention.nan_rows || attention.sinks != nullptr || needs_float64(input, mask, attention)) {
    return attention_decomposed(input, mask, attention);
  }
  // Torch's kernel for CPU is none of those that it chooses for CUDA, which sum in float32.
  const Tensor rows = input.is_cuda() ? input : to_accumulate(input);
  const Operands in = operands_of(rows, mask, attention);
  if (!input.is_cuda()) {
    const Tensor added = in.added ? *in.added : mask_of(rows, nullptr, attention, at::kFloat);
    const Tensor empty = rows_that_read_nothing(mask, added, attention);
    return read(probabilities_of(in.query, in.key, in.scale, added, empty), in.value)
        .to(input.scalar_type());
  }
  return at::scaled_dot_product_attention(in.query, in.key, in.value, in.added, attention.p,
                                          attention.causal && mask == nullptr, in.scale,
                                          attention.kv_heads < attention.heads)
      .transpose(-2, -3)
      .flatten(-2);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> attention_cuda(const Tensor& input, const Tensor* mask,
                                                  const Attention& attention) {
  const TensorSpecs specs = attention_outputs(input, attention);
  const auto zeros = [&](const TensorSpec& spec) {
    return at::zeros(C10_AS_INTARRAYREF_SLOW(spec.sizes), input.options().dtype(spec.dtype));
  };
  if (input.numel() == 0 || attention.p >= 1) {
    return {zeros(specs[0]), zeros(specs[1]), zeros(specs[2])};
  }
  if (takes_flash(input, mask, attention)) return flash_forward(input, attention, specs);
  const Tensor seed =
      attention.p > 0 ? seed_tensor(draw_seed_cuda(input, attention.p), input) : no_seed(input);
  return {contiguous(chosen_by_torch(input, mask, attention, seed)), zeros(specs[1]), seed};
}

std::tuple<Tensor, Tensor> attention_backward_cuda(const Tensor& grad_output, const Tensor& input,
                                                   const Tensor& output, const Tensor* log_sum_exp,
                                                   const Tensor& seed, const Tensor* mask,
                                                   const Attention& attention,
                                                   AttentionMask wanted) {
  const bool wants_sinks = attention.sinks != nullptr && wanted[1];
  const Tensor& like = attention.sinks != nullptr ? *attention.sinks : input;
  std::tuple<Tensor, Tensor> found;
  if (input.numel() == 0 || attention.p >= 1) {
    found = {at::zeros(input.sizes(), input.options()), at::zeros(like.sizes(), like.options())};
  } else if (takes_flash(input, mask, attention)) {
    found = flash_backward(grad_output, input, output, log_sum_exp, seed, attention);
  } else {
    const WithAutograd guard;
    const auto again = [&](const Tensor& x, const Attention& with) {
      return chosen_by_torch(x, mask, with, seed);
    };
    found = attention_gradients(again, grad_output, input, attention, {true, wants_sinks});
  }
  const auto& [grad_input, grad_sinks] = found;
  return {wanted[0] ? contiguous(grad_input.detach()) : input.new_empty({0}),
          wants_sinks ? contiguous(grad_sinks.detach()) : like.new_empty({0})};
}

std::tuple<Tensor, Tensor> attention_gradients(AttentionFunction function,
                                               const Tensor& grad_output, const Tensor& input,
                                               const Attention& attention, AttentionMask wanted) {
  const auto [wants_input, wants_sinks] = wanted;
  if (attention.sinks == nullptr) {
    const auto again = [&](const Tensor& x) { return function(x, attention); };
    return {wants_input ? std::get<0>(gradients(again, grad_output, input)) : Tensor(), Tensor()};
  }
  const auto again = [&](const Tensor& x, const Tensor& sinks) {
    Attention with = attention;
    with.sinks = &sinks;
    return function(x, with);
  };
  const auto [of_input, of_sinks] = gradients(again, grad_output, input, *attention.sinks);
  return {wants_input ? of_input : Tensor(), wants_sinks ? of_sinks : Tensor()};
}

Tensor attention_decomposed(const Tensor& input, const Tensor* mask, const Attention& attention,
                            const Tensor& seed) {
  const Tensor rows =
      needs_float64(input, mask, attention) ? input.to(at::kDouble) : to_accumulate(input);
  const auto [query, key, value] = heads_of(rows, attention);
  Tensor added = mask_of(input, mask, attention, rows.scalar_type());
  Tensor sinks;
  if (attention.sinks != nullptr) {
    sinks = attention.sinks->to(rows.scalar_type()).unsqueeze(-1).unsqueeze(-1);
  }
  if (mask != nullptr && mask->scalar_type() != at::kBool) {
    const Tensor shift = shift_of(added);
    added = added - shift;
    if (sinks.defined()) sinks = sinks - shift;
  }
  Tensor p = probabilities_of(query, key, scale_of(attention), added,
                              rows_that_read_nothing(mask, added, attention), sinks);
  if (seed.defined() && seed.sym_numel() > 0) {
    TORCH_CHECK(!p.is_cuda(),
                "[attention] p must be 0 on CUDA where forward is computed again, got ",
                attention.p);
    p = p * drop_factors_cpu(p, attention, static_cast<uint64_t>(seed[0].item<int64_t>()));
  } else {
    p = at::dropout(p, attention.p, /*train=*/true);
  }
  return read(p, value).to(input.scalar_type());
}

}  // namespace transformer_ops
