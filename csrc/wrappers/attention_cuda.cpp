// Attention by torch's kernels for CUDA, and in plain ATen.
#include <ATen/Context.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>

#include "op/decomposition.h"
#include "wrappers/attention_dropout.h"
#include "wrappers/attention_heads.h"
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
         attention.head_dim % 8 == 0 && attention.head_dim <= 192 && attention.p < 1;
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
  return {rows_like(std::get<0>(found), specs[0]), rows_like(std::get<1>(found), specs[1]),
          attention.p > 0 ? generator.view(at::kLong).reshape({2}) : no_seed(input)};
}

Tensor flash_backward(const Tensor& grad_output, const Tensor& input, const Tensor& output,
                      const Tensor& log_sum_exp, const Tensor& seed, const Attention& attention) {
  const Tensor rows = aligned(with_one_batch(input));
  const auto [query, key, value] = heads_of(rows, attention);
  const auto in_heads = [&](const Tensor& tensor) {
    return heads_at(aligned(with_one_batch(tensor)), 0, attention.heads, attention.head_dim);
  };
  // Without dropout nobody reads it.
  const Tensor generator =
      attention.p > 0 ? seed : at::empty({2}, input.options().dtype(at::kLong));
  const auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_backward(
      in_heads(grad_output), query, key, value, in_heads(output),
      with_one_batch(log_sum_exp).transpose(1, 2).contiguous(), {}, {}, rows.size(1), rows.size(1),
      attention.p, attention.causal, generator.view(at::kUInt64),
      at::empty({}, generator.options()), scale_of(attention));
  return rows_of_heads({grad_query, grad_key, grad_value}, attention,
                       at::empty(input.sizes(), input.options()));
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

Tensor chosen_by_torch(const Tensor& input, const Tensor* mask, const Attention& attention,
                       const Tensor& seed) {
  // The numbers of a run on CPU, where the wrappers for CUDA are tested.
  if (attention.p > 0 && !input.is_cuda()) {
    return attention_decomposed(input, mask, attention, seed);
  }
  const auto [query, key, value] = heads_of(input, attention);
  std::optional<Tensor> added;
  if (mask != nullptr) added = mask_of(input, mask, attention, input.scalar_type());
  std::optional<SeededGenerator> generator;
  if (attention.p > 0) generator.emplace(input.device(), seed[0].item<int64_t>());
  return at::scaled_dot_product_attention(query, key, value, added, attention.p,
                                          attention.causal && mask == nullptr, scale_of(attention),
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

Tensor attention_backward_cuda(const Tensor& grad_output, const Tensor& input, const Tensor* mask,
                               const Tensor& output, const Tensor& log_sum_exp, const Tensor& seed,
                               const Attention& attention) {
  if (input.numel() == 0 || attention.p >= 1) return at::zeros(input.sizes(), input.options());
  if (takes_flash(input, mask, attention)) {
    return flash_backward(grad_output, input, output, log_sum_exp, seed, attention);
  }
  const auto again = [&](const Tensor& x) { return chosen_by_torch(x, mask, attention, seed); };
  const WithAutograd guard;
  return contiguous(std::get<0>(gradients(again, grad_output, input)).detach());
}

// ---- plain ATen

Tensor attention_decomposed(const Tensor& input, const Tensor* mask, const Attention& attention,
                            const Tensor& seed) {
  auto [query, key, value] = heads_of(to_accumulate(input), attention);
  const int64_t groups = attention.heads / attention.kv_heads;
  if (groups > 1) {
    key = key.repeat_interleave(groups, -3);
    value = value.repeat_interleave(groups, -3);
  }
  Tensor scores = at::matmul(query, key.transpose(-1, -2)) * scale_of(attention);
  const Tensor added = mask_of(input, mask, attention, scores.scalar_type());
  if (added.defined()) scores = scores + added;
  Tensor p = at::_safe_softmax(scores, -1);
  if (seed.defined() && seed.sym_numel() > 0) {
    TORCH_CHECK(!p.is_cuda(),
                "[attention] p must be 0 on CUDA where forward is computed again, got ",
                attention.p);
    p = p * drop_factors_cpu(p, attention, static_cast<uint64_t>(seed[0].item<int64_t>()));
  } else {
    p = at::dropout(p, attention.p, /*train=*/true);
  }
  const Tensor output = at::matmul(p, value).transpose(-2, -3).flatten(-2);
  return output.to(input.scalar_type());
}

}  // namespace transformer_ops
