#include "wrappers/attention_parts.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "kernels/attention.h"
#include "kernels/dropout.h"
#include "wrappers/attention_heads.h"
#include "wrappers/cpu.h"

namespace transformer_ops {
namespace {

// Scores take this much memory at a time.
constexpr int64_t kScoreBytes = int64_t{4} << 20;

// Query heads kv G + group for a range of kv heads, and a range of rows.
struct Part {
  int64_t batch, group, first_head, heads, first_row, rows, columns;
};

class AttentionInParts {
 public:
  AttentionInParts(const Tensor& input, const Tensor* mask, const Attention& attention,
                   at::ScalarType acc, uint64_t seed)
      : attention_(attention),
        acc_(acc),
        batches_(with_one_batch(input)),
        rows_(batches_.size(1)),
        seed_(seed) {
    if (mask != nullptr) {
      // The statistics are those of torch's kernel, which may run in the other direction.
      mask_ = *added_mask(input, mask, attention, acc_);
      if (attention.sinks == nullptr) mask_ = relative(mask_);
      mask_ = mask_.expand({batches_.size(0), attention.heads, rows_, rows_});
      if (mask_.stride(-1) != 1) mask_ = mask_.contiguous();
    }
  }

  std::tuple<Tensor, Tensor> forward() const {
    Tensor output = empty_cpu({batches_.size(0), rows_, attention_.query_width()}, acc_);
    Tensor log_sum_exp = empty_cpu({batches_.size(0), rows_, attention_.heads}, acc_);
    for (int64_t b = 0; b < batches_.size(0); ++b) {
      const Heads in = grouped(batches_[b].to(acc_));
      const Tensor out = groups_of_query(output[b]);
      for_parts(b, [&](const Part& part) {
        Tensor products = multiply(query_of(in.query, part), keys_of(in.key, part).mT());
        softmax(part, products, log_sum_exp, /*is_known=*/false);
        if (attention_.p > 0) drop(part, products, products);
        rows_of(out, part).copy_(at::bmm(products, keys_of(in.value, part)));
      });
    }
    return {output, log_sum_exp};
  }

  // The gradient of the input, and the statistics, which `known` has if it is defined.
  std::tuple<Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& known) const {
    Tensor result = at::zeros(batches_.sizes(), batches_.options().dtype(acc_));
    const bool is_known = known.defined(), has_sinks = attention_.sinks != nullptr;
    const Tensor log_sum_exp = is_known
                                   ? with_one_batch(known)
                                   : empty_cpu({batches_.size(0), rows_, attention_.heads}, acc_);
    const Tensor grads = with_one_batch(grad_output);
    for (int64_t b = 0; b < batches_.size(0); ++b) {
      const Heads in = grouped(batches_[b].to(acc_)), grad_in = grouped(result[b]);
      const Tensor grad_out = groups_of_query(grads[b].to(acc_));
      for_parts(b, [&](const Part& part) {
        const Tensor query = query_of(in.query, part), key = keys_of(in.key, part);
        const Tensor grad = query_of(grad_out, part);
        const Tensor p = multiply(query, key.mT());
        softmax(part, p, log_sum_exp, is_known);
        if (has_sinks && !is_known) share_with_sinks(part, p, log_sum_exp[b]);
        const Tensor grad_p = multiply(grad, keys_of(in.value, part).mT());
        Tensor dropped = p;
        if (attention_.p > 0) {
          dropped = empty_cpu(p.sizes(), acc_);
          drop(part, p, dropped);
          drop_gradient(part, grad_p);
        }
        keys_of(grad_in.value, part).add_(at::bmm(dropped.mT(), grad));
        softmax_backward(part, p, grad_p);
        rows_of(grad_in.query, part).copy_(at::bmm(grad_p, key));
        keys_of(grad_in.key, part).add_(at::bmm(grad_p.mT(), query));
      });
    }
    return {result, log_sum_exp};
  }

 private:
  // [rows, kv heads, query heads of each, head_dim]; keys and values have no third dimension.
  Heads grouped(const Tensor& rows) const {
    if (attention_.by_head) {
      return {part_by_head(rows, attention_, 0).unsqueeze(2), part_by_head(rows, attention_, 1),
              part_by_head(rows, attention_, 2)};
    }
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

  // Probabilities that sum to 1 without the sink, and their statistics [rows, heads], get it.
  void share_with_sinks(const Part& part, const Tensor& p, const Tensor& log_sum_exp) const {
    const auto of_part = [&](const Tensor& numbers) {
      return rows_of(numbers.unflatten(-1, {attention_.kv_heads, groups()}), part);
    };
    const Tensor own = of_part(log_sum_exp);
    const Tensor all =
        at::logaddexp(own, of_part(attention_.sinks->to(acc_).expand_as(log_sum_exp)));
    p.mul_((own - all).exp_().unsqueeze(-1));
    own.copy_(all);
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
                       .nan_rows = attention_.nan_rows,
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

}  // namespace

Tensor drop_factors_cpu(const Tensor& p, const Attention& attention, uint64_t seed) {
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

bool needs_float64(const Tensor& input, const Tensor* mask, const Attention& attention) {
  const double scale = scale_of(attention);
  const bool fits = scale == 0 || std::isnormal(static_cast<float>(scale));
  const bool is_wide = mask != nullptr && mask->scalar_type() == at::kDouble;
  return input.scalar_type() != at::kDouble && (!fits || is_wide);
}

bool are_ordinary(const Tensor& log_sum_exp) {
  // In float32, probabilities are exact up to 6e-5 there. NaN is not ordinary.
  return !any_of(log_sum_exp, [](auto number) { return !(std::abs(number) <= 1000); });
}

std::tuple<Tensor, Tensor> attention_in_parts_cpu(const Tensor& input, const Tensor* mask,
                                                  const Attention& attention, uint64_t seed) {
  if (!needs_float64(input, mask, attention)) {
    const auto acc = accumulate_dtype(input.scalar_type());
    auto found = AttentionInParts(input, mask, attention, acc, seed).forward();
    if (acc == at::kDouble || are_ordinary(std::get<1>(found))) return found;
  }
  return AttentionInParts(input, mask, attention, at::kDouble, seed).forward();
}

std::tuple<Tensor, Tensor> attention_in_parts_backward_cpu(const Tensor& grad_output,
                                                           const Tensor& input, const Tensor* mask,
                                                           const Attention& attention,
                                                           const Tensor* log_sum_exp,
                                                           uint64_t seed) {
  // A row that is not ordinary was computed in float64.
  const bool is_known = log_sum_exp != nullptr && are_ordinary(*log_sum_exp);
  if (!needs_float64(input, mask, attention) && (is_known || log_sum_exp == nullptr)) {
    const AttentionInParts parts(input, mask, attention, accumulate_dtype(input.scalar_type()),
                                 seed);
    auto found = parts.backward(grad_output, is_known ? *log_sum_exp : Tensor());
    if (is_known || are_ordinary(std::get<1>(found))) return found;
  }
  return AttentionInParts(input, mask, attention, at::kDouble, seed).backward(grad_output, {});
}

}  // namespace transformer_ops
