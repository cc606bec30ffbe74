#include "wrappers/attention.h"

#include <ATen/Context.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "kernels/attention.h"
#include "kernels/dropout.h"
#include "op/decomposition.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/dropout.h"

namespace transformer_ops {
namespace {

// Scores of attention with dropout take this much memory at a time.
constexpr int64_t kScoreBytes = int64_t{4} << 20;

double scale_of(const Attention& attention) {
  return attention.scale.value_or(1 / std::sqrt(static_cast<double>(attention.head_dim)));
}

// ---- heads of rows: [batch, heads, rows, head_dim], without a copy

struct Heads {
  Tensor query, key, value;
};

Tensor heads_at(const Tensor& rows, int64_t first, int64_t heads, int64_t head_dim) {
  return rows.slice(-1, first * head_dim, (first + heads) * head_dim)
      .unflatten(-1, {heads, head_dim})
      .transpose(-2, -3);
}

Heads heads_of(const Tensor& rows, const Attention& attention) {
  const int64_t keys = attention.heads, values = keys + attention.kv_heads;
  return {heads_at(rows, 0, attention.heads, attention.head_dim),
          heads_at(rows, keys, attention.kv_heads, attention.head_dim),
          heads_at(rows, values, attention.kv_heads, attention.head_dim)};
}

Tensor with_one_batch(const Tensor& tensor) {
  return tensor.reshape({-1, tensor.size(-2), tensor.size(-1)});
}

// ---- masks

Tensor infinity(const Tensor& like, at::ScalarType dtype) {
  return at::full({}, -std::numeric_limits<double>::infinity(), like.options().dtype(dtype));
}

Tensor additive(const Tensor& mask, at::ScalarType dtype) {
  if (mask.scalar_type() != at::kBool) return mask.to(dtype);
  return at::where(mask, at::zeros({}, mask.options().dtype(dtype)), infinity(mask, dtype));
}

// The numbers to add to scores, or an undefined tensor if nothing is masked.
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

// [batch or 1, heads or 1, rows or 1, columns], as the kernel of torch takes it, for inputs with
// one dimension of batches.
Tensor with_one_batch(const Tensor& mask, const Tensor& input) {
  if (mask.dim() <= 4 && input.dim() <= 3) return mask.dim() == 3 ? mask.unsqueeze(0) : mask;
  if (mask.dim() == 2) return mask;
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end() - 2);
  const auto own = mask.sizes().slice(mask.dim() - 3);
  sizes.insert(sizes.end(), own.begin(), own.end());
  return mask.expand(sizes).reshape({-1, own[0], own[1], own[2]});
}

// ---- torch's kernel, which drops nothing

using Dense = std::tuple<Tensor, Tensor>;

Dense flash_forward(const Tensor& input, const Tensor* mask, const Attention& attention) {
  const auto [query, key, value] = heads_of(with_one_batch(input), attention);
  std::optional<Tensor> added;
  if (mask != nullptr) {
    added = with_one_batch(mask_of(input, mask, attention, input.scalar_type()), input);
  }
  return at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, 0.0, attention.causal && mask == nullptr, added, scale_of(attention));
}

Tensor flash_backward(const Tensor& grad_output, const Tensor& input, const Tensor* mask,
                      const Tensor& output, const Tensor& log_sum_exp, const Attention& attention) {
  const auto [query, key, value] = heads_of(with_one_batch(input), attention);
  std::optional<Tensor> added;
  if (mask != nullptr) {
    added = with_one_batch(mask_of(input, mask, attention, input.scalar_type()), input);
  }
  const auto in_heads = [&](const Tensor& rows) {
    return heads_at(with_one_batch(rows), 0, attention.heads, attention.head_dim);
  };
  const auto [grad_query, grad_key, grad_value] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          in_heads(grad_output), query, key, value, in_heads(output),
          with_one_batch(log_sum_exp).transpose(1, 2), 0.0, attention.causal && mask == nullptr,
          added, scale_of(attention));
  Tensor result = empty_cpu(input.sizes(), input.scalar_type());
  const Tensor rows = with_one_batch(result);
  int64_t first = 0;
  for (const Tensor* gradient : {&grad_query, &grad_key, &grad_value}) {
    // torch's kernel stores heads next to each other, so that rows are copied as a whole.
    const Tensor part = gradient->transpose(1, 2).flatten(-2);
    rows.slice(-1, first, first + part.size(-1)).copy_(part);
    first += part.size(-1);
  }
  return result;
}

// ---- attention with dropout: scores of a few heads and rows at a time

// Query heads kv G + group for a range of kv heads, and a range of rows.
struct Part {
  int64_t batch, group, first_head, heads, first_row, rows, columns;
};

class Dropping {
 public:
  Dropping(const Tensor& input, const Tensor* mask, const Attention& attention, uint64_t seed)
      : attention_(attention),
        acc_(accumulate_dtype(input.scalar_type())),
        batches_(with_one_batch(input)),
        rows_(batches_.size(1)),
        seed_(seed) {
    if (mask != nullptr) {
      const Tensor added = with_one_batch(mask_of(input, mask,
                                                  {attention.heads, attention.kv_heads,
                                                   attention.head_dim, false, 0, attention.scale},
                                                  acc_),
                                          input);
      mask_ = added.expand({batches_.size(0), attention.heads, rows_, rows_});
      if (mask_.stride(-1) != 1) mask_ = mask_.contiguous();
    }
  }

  // zero for a number that is dropped, else 1 / (1 - p), like probabilities of all heads.
  static Tensor factors(const Tensor& p, const Attention& attention, uint64_t seed) {
    Tensor found = at::ones(p.sizes(), p.options());
    const int64_t columns = p.size(-1), padded = (columns + 7) / 8 * 8;
    const int64_t bytes = columns * static_cast<int64_t>(found.element_size());
    auto* const data = static_cast<char*>(found.mutable_data_ptr());
    for (int64_t row = 0; row * columns < found.numel(); ++row) {
      void* const numbers = data + row * bytes;
      cpu::dropout_forward(kernel_dtype(found), numbers, numbers, nullptr, seed, attention.p,
                           row * padded, columns);
    }
    return found;
  }

  Dense forward() {
    Tensor output = empty_cpu({batches_.size(0), rows_, attention_.query_width()}, acc_);
    Tensor log_sum_exp = empty_cpu({batches_.size(0), rows_, attention_.heads}, acc_);
    for (int64_t b = 0; b < batches_.size(0); ++b) {
      const Heads in = grouped(batches_[b].to(acc_));
      const Tensor out = groups_of_query(output[b]);
      for_parts(b, [&](const Part& part) {
        Tensor products = multiply(query_of(in.query, part), keys_of(in.key, part).mT());
        softmax(part, products, log_sum_exp, /*is_known=*/false);
        drop(part, products, products);
        rows_of(out, part).copy_(at::bmm(products, keys_of(in.value, part)));
      });
    }
    return {output, log_sum_exp};
  }

  Tensor backward(const Tensor& grad_output, const Tensor& log_sum_exp) {
    Tensor result = at::zeros(batches_.sizes(), batches_.options().dtype(acc_));
    const Tensor grads = with_one_batch(grad_output), statistics = with_one_batch(log_sum_exp);
    for (int64_t b = 0; b < batches_.size(0); ++b) {
      const Heads in = grouped(batches_[b].to(acc_)), grad_in = grouped(result[b]);
      const Tensor grad_out = groups_of_query(grads[b].to(acc_));
      for_parts(b, [&](const Part& part) {
        const Tensor query = query_of(in.query, part), key = keys_of(in.key, part);
        const Tensor grad = query_of(grad_out, part);
        const Tensor p = multiply(query, key.mT());
        softmax(part, p, statistics, /*is_known=*/true);
        const Tensor grad_p = multiply(grad, keys_of(in.value, part).mT());
        Tensor dropped = empty_cpu(p.sizes(), acc_);
        drop(part, p, dropped);
        keys_of(grad_in.value, part).add_(at::bmm(dropped.mT(), grad));
        drop_gradient(part, grad_p);
        softmax_backward(part, p, grad_p);
        rows_of(grad_in.query, part).copy_(at::bmm(grad_p, key));
        keys_of(grad_in.key, part).add_(at::bmm(grad_p.mT(), query));
      });
    }
    return result;
  }

 private:
  // [rows, kv heads, query heads of each, head_dim]; keys and values have no third dimension.
  Heads grouped(const Tensor& rows) const {
    const int64_t keys = attention_.heads * attention_.head_dim;
    const int64_t values = keys + attention_.kv_heads * attention_.head_dim;
    const auto in_heads = [&](int64_t first) {
      return rows.slice(-1, first, first + attention_.kv_heads * attention_.head_dim)
          .unflatten(-1, {attention_.kv_heads, attention_.head_dim});
    };
    return {groups_of_query(rows.slice(-1, 0, keys)), in_heads(keys), in_heads(values)};
  }

  Tensor groups_of_query(const Tensor& rows) const {
    return rows.unflatten(-1, {attention_.kv_heads, groups(), attention_.head_dim});
  }

  int64_t groups() const { return attention_.heads / attention_.kv_heads; }

  // [heads, rows, head_dim]
  static Tensor query_of(const Tensor& query, const Part& part) { return rows_of(query, part); }
  static Tensor rows_of(const Tensor& query, const Part& part) {
    return query.slice(0, part.first_row, part.first_row + part.rows)
        .slice(1, part.first_head, part.first_head + part.heads)
        .select(2, part.group)
        .transpose(0, 1);
  }
  // Without the columns that no row of the part attends to.
  static Tensor keys_of(const Tensor& keys, const Part& part) {
    return keys.slice(0, 0, part.columns)
        .slice(1, part.first_head, part.first_head + part.heads)
        .transpose(0, 1);
  }

  static Tensor multiply(const Tensor& left, const Tensor& right) {
    Tensor result = empty_cpu({left.size(0), left.size(1), right.size(2)}, left.scalar_type());
    at::bmm_out(result, left, right);
    return result;
  }

  void for_parts(int64_t batch, c10::function_ref<void(const Part&)> function) const {
    const int64_t row_bytes = rows_ * static_cast<int64_t>(c10::elementSize(acc_));
    // Random numbers begin at multiples of 8.
    const int64_t most_rows = std::max<int64_t>(kScoreBytes / row_bytes / 8 * 8, 8);
    const int64_t rows = std::min(rows_, most_rows);
    const int64_t heads = std::clamp<int64_t>(most_rows / rows, 1, attention_.kv_heads);
    for (int64_t group = 0; group < groups(); ++group) {
      for (int64_t head = 0; head < attention_.kv_heads; head += heads) {
        for (int64_t row = 0; row < rows_; row += rows) {
          const int64_t count = std::min(rows, rows_ - row);
          function({batch, group, head, std::min(heads, attention_.kv_heads - head), row, count,
                    attention_.causal ? row + count : rows_});
        }
      }
    }
  }

  // Calls function(first score of the range, its first row, rows, query head) on several threads.
  void for_ranges(const Part& part, const Tensor& scores,
                  c10::function_ref<void(void*, int64_t, int64_t, int64_t)> function) const {
    const int64_t bytes = part.columns * static_cast<int64_t>(scores.element_size());
    auto* const data = static_cast<char*>(scores.mutable_data_ptr());
    // Rows of a part begin at multiples of 8, so that random numbers do, too.
    const int64_t units = (part.rows + 7) / 8;
    cpu::parallel(part.heads * units, 8 * part.columns, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i / units, row = i % units * 8;
        function(data + (head * part.rows + row) * bytes, part.first_row + row,
                 std::min<int64_t>(8, part.rows - row),
                 (part.first_head + head) * groups() + part.group);
      }
    });
  }

  cpu::Scores scores_at(const Part& part, int64_t row, int64_t head) const {
    cpu::Scores scores{.columns = part.columns,
                       .scale = scale_of(attention_),
                       .attended = row + 1,
                       .causal = attention_.causal,
                       .stride = attention_.heads};
    if (mask_.defined()) {
      scores.mask_stride = mask_.stride(2);
      const int64_t at =
          part.batch * mask_.stride(0) + head * mask_.stride(1) + row * mask_.stride(2);
      scores.mask = static_cast<const char*>(mask_.const_data_ptr()) +
                    at * static_cast<int64_t>(mask_.element_size());
    }
    return scores;
  }

  void softmax(const Part& part, const Tensor& products, const Tensor& log_sum_exp,
               bool is_known) const {
    auto* const statistics = static_cast<char*>(log_sum_exp.mutable_data_ptr());
    const auto size = static_cast<int64_t>(log_sum_exp.element_size());
    for_ranges(part, products, [&](void* data, int64_t row, int64_t rows, int64_t head) {
      const cpu::Scores scores = scores_at(part, row, head);
      const int64_t at = (part.batch * rows_ + row) * attention_.heads + head;
      const auto dtype = kernel_dtype(acc_);
      if (is_known) {
        cpu::attention_probabilities(dtype, data, scores, statistics + at * size, rows);
      } else {
        cpu::attention_softmax(dtype, data, scores, statistics + at * size, rows);
      }
    });
  }

  void softmax_backward(const Part& part, const Tensor& p, const Tensor& grad) const {
    const auto* const probabilities = static_cast<const char*>(p.const_data_ptr());
    auto* const first = static_cast<char*>(grad.mutable_data_ptr());
    for_ranges(part, grad, [&](void* data, int64_t row, int64_t rows, int64_t head) {
      const auto at = static_cast<char*>(data) - first;
      cpu::attention_softmax_backward(kernel_dtype(acc_), probabilities + at,
                                      scores_at(part, row, head), data, rows);
    });
  }

  // The index of a row's first random number; that of a part's first row is a multiple of 8.
  int64_t number_of(const Part& part, int64_t row, int64_t head) const {
    const int64_t columns = (rows_ + 7) / 8 * 8;
    return ((part.batch * attention_.heads + head) * rows_ + row) * columns;
  }

  void drop(const Part& part, const Tensor& p, const Tensor& dropped) const {
    const auto* const from = static_cast<const char*>(p.const_data_ptr());
    auto* const to = static_cast<char*>(dropped.mutable_data_ptr());
    const int64_t bytes = part.columns * static_cast<int64_t>(p.element_size());
    for_ranges(part, p, [&](void* data, int64_t row, int64_t rows, int64_t head) {
      const auto at = static_cast<char*>(data) - from;
      for (int64_t r = 0; r < rows; ++r) {
        cpu::dropout_forward(kernel_dtype(acc_), from + at + r * bytes, to + at + r * bytes,
                             nullptr, seed_, attention_.p, number_of(part, row + r, head),
                             part.columns);
      }
    });
  }

  void drop_gradient(const Part& part, const Tensor& grad) const {
    const int64_t bytes = part.columns * static_cast<int64_t>(grad.element_size());
    for_ranges(part, grad, [&](void* data, int64_t row, int64_t rows, int64_t head) {
      for (int64_t r = 0; r < rows; ++r) {
        void* const numbers = static_cast<char*>(data) + r * bytes;
        cpu::dropout_backward_from_seed(kernel_dtype(acc_), numbers, numbers, seed_, attention_.p,
                                        number_of(part, row + r, head), part.columns);
      }
    });
  }

  const Attention& attention_;
  at::ScalarType acc_;
  Tensor batches_;
  int64_t rows_;
  uint64_t seed_;
  Tensor mask_;  // [batch, heads, rows, columns], with strides of 0
};

Tensor seed_tensor(uint64_t seed, const Tensor& input) {
  return at::full({1}, static_cast<int64_t>(seed), input.options().dtype(at::kLong));
}

Tensor no_seed(const Tensor& input) { return at::empty({0}, input.options().dtype(at::kLong)); }

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
  return {output, log_sum_exp, {{attention.p > 0 ? 1 : 0}, at::kLong}};
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
    std::tie(output, log_sum_exp) = Dropping(input, mask, attention, seed).forward();
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

// ---- plain ATen, which also runs on CUDA

namespace {

// A number for each probability: zero if it is dropped, else 1 / (1 - p).
Tensor drop_factors(const Tensor& p, const Attention& attention, uint64_t seed) {
  if (!p.is_cuda()) return Dropping::factors(p, attention, seed);
  at::Generator generator = at::globalContext().defaultGenerator(p.device()).clone();
  generator.set_current_seed(seed);
  const double kept = 1 - attention.p;
  Tensor factors = at::empty(p.sizes(), p.options()).bernoulli_(kept, generator);
  return kept > 0 ? factors.div_(kept) : factors;
}

uint64_t draw_seed_cuda(const Tensor& input, double p) {
  const cuda::Philox drawn = draw_philox(input.device(), p);
  TORCH_CHECK(drawn.seed_at == nullptr,
              "[attention] p must be 0 while a CUDA graph is captured, got ", p);
  // Offsets are small, and seeds need not be.
  return drawn.seed + drawn.offset * 0x9e3779b97f4a7c15u;
}

// The kernel that torch chooses on the device, which also computes its own gradient.
Tensor fused_attention(const Tensor& input, const Tensor* mask, const Attention& attention) {
  const auto [query, key, value] = heads_of(input, attention);
  std::optional<Tensor> added;
  if (mask != nullptr) added = mask_of(input, mask, attention, input.scalar_type());
  return at::scaled_dot_product_attention(query, key, value, added, 0.0,
                                          attention.causal && mask == nullptr, scale_of(attention),
                                          attention.kv_heads < attention.heads)
      .transpose(-2, -3)
      .flatten(-2);
}

}  // namespace

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
    p = p * drop_factors(p, attention, static_cast<uint64_t>(seed.item<int64_t>()));
  } else {
    p = at::dropout(p, attention.p, /*train=*/true);
  }
  const Tensor output = at::matmul(p, value).transpose(-2, -3).flatten(-2);
  return output.to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> attention_cuda(const Tensor& input, const Tensor* mask,
                                                  const Attention& attention) {
  const TensorSpecs specs = attention_outputs(input, attention);
  Tensor statistics =
      at::zeros(C10_AS_INTARRAYREF_SLOW(specs[1].sizes), input.options().dtype(specs[1].dtype));
  if (attention.p > 0) {
    const Tensor seed = seed_tensor(draw_seed_cuda(input, attention.p), input);
    return {contiguous(attention_decomposed(input, mask, attention, seed)), statistics, seed};
  }
  return {contiguous(fused_attention(input, mask, attention)), statistics, no_seed(input)};
}

Tensor attention_backward_cuda(const Tensor& grad_output, const Tensor& input, const Tensor* mask,
                               const Tensor& seed, const Attention& attention) {
  const auto again = [&](const Tensor& x) {
    return attention.p > 0 ? attention_decomposed(x, mask, attention, seed)
                           : fused_attention(x, mask, attention);
  };
  const WithAutograd guard;
  return contiguous(std::get<0>(gradients(again, grad_output, input)).detach());
}

Tensor attention_backward_cpu(const Tensor& grad_output, const Tensor& input, const Tensor* mask,
                              const Tensor& output, const Tensor& log_sum_exp, const Tensor& seed,
                              const Attention& attention) {
  if (input.numel() == 0) return at::zeros(input.sizes(), input.options());
  if (attention.p == 0) {
    return flash_backward(grad_output, input, mask, output, log_sum_exp, attention);
  }
  const auto number = static_cast<uint64_t>(seed.item<int64_t>());
  const Tensor found = Dropping(input, mask, attention, number).backward(grad_output, log_sum_exp);
  return contiguous(found.to(input.scalar_type()).reshape(input.sizes()));
}

}  // namespace transformer_ops
