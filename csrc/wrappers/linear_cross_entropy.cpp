#include "wrappers/linear_cross_entropy.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/bias.h"
#include "kernels/cross_entropy.h"
#include "op/buffer.h"
#include "wrappers/cpu.h"
#include "wrappers/linear.h"
#include "wrappers/product.h"

namespace transformer_ops {
namespace {

using LossOperands = CrossEntropyOperands;
using Options = CrossEntropyOptions;

bool is_finite(double number) { return std::isfinite(number); }

// Each chunk adds to the gradient of the weight, and 16-bit sums are rounded each time. 16 chunks
// add less error to it than the rounding of the logits, which eager mode has too.
constexpr int64_t kMostRoundings = 16;

// The number of rows of a chunk. Products of fewer than 256 rows took up to 1.6 times as long
// (float32 and bfloat16, 576 columns, 49,152 classes); more rows only take more memory. Chunks of
// few classes may have more rows: 4 MiB fit in the caches.
int64_t rows_of_chunk(std::optional<int64_t> chunk, int64_t rows, const Tensor& weight) {
  if (chunk) return std::min(*chunk, rows);
  constexpr int64_t kLeastRows = 256, kCacheBytes = int64_t{4} << 20;
  const int64_t classes = weight.size(0), bytes = classes * weight.element_size();
  int64_t found = std::max(kLeastRows, kCacheBytes / bytes);
  if (weight.element_size() == 2) {
    found = std::max(found, (rows + kMostRoundings - 1) / kMostRoundings);
  }
  return std::min(found, rows);
}

// Float16 cannot hold the gradients of a mean over many rows, so they are made for the sum.
bool has_small_range(const Tensor& weight) { return weight.scalar_type() == at::kHalf; }

// The product and the rows of one device.
struct Device {
  // The logits of these rows.
  Tensor (*logits)(const Tensor& rows, const Tensor& weight, const Tensor* bias);
  // out = beta out + left right.
  void (*multiply)(const Tensor& out, const Tensor& left, const Tensor& right, double beta);
  // Adds the sums of the columns to `sums`, which is in the accumulate dtype.
  void (*add_columns)(const Tensor& rows, Tensor sums);
};

// Adds up the gradients, chunk by chunk.
class Gradients {
 public:
  Gradients(const Device& device, const LossOperands& operands, const Tensor& x,
            CrossEntropyMask mask)
      : device_(device), operands_(operands), x_(x) {
    const auto like = [&](const Tensor& tensor) {
      return empty(tensor.sizes(), tensor.scalar_type(), tensor.device());
    };
    if (mask[0]) input_ = like(x);
    if (mask[1]) weight_ = like(operands.weight);
    if (mask[2]) {
      const auto dtype = accumulate_dtype(x.scalar_type());
      bias_ = empty(operands.bias->sizes(), dtype, x.device()).zero_();
    }
    if (weight_.defined() && x.size(0) == 0) weight_.zero_();
  }

  bool wants_any() const { return input_.defined() || weight_.defined() || bias_.defined(); }

  // `grads` are those of the logits of the rows from `first` on.
  void add(int64_t first, const Tensor& grads) {
    const int64_t count = grads.size(0);
    if (input_.defined()) {
      device_.multiply(rows_of(input_, first, count), grads, operands_.weight, /*beta=*/0);
    }
    if (weight_.defined()) {
      device_.multiply(weight_, transposed(grads), rows_of(x_, first, count), first == 0 ? 0 : 1);
    }
    if (bias_.defined()) device_.add_columns(grads, bias_);
  }

  CrossEntropyGradients take() {
    if (input_.defined()) input_ = input_.view(operands_.input.sizes());
    if (bias_.defined()) bias_ = bias_.to(operands_.bias->scalar_type());
    return {std::move(input_), std::move(weight_), std::move(bias_)};
  }

 private:
  const Device& device_;
  const LossOperands& operands_;
  const Tensor& x_;
  Tensor input_, weight_, bias_;
};

// The targets as int64, in one dimension.
Tensor flat_target(const Tensor& target) { return target.reshape({-1}).to(at::kLong); }

// Calls f(first row, logits of the chunk) for each chunk.
template <typename F>
void for_chunks(const Device& device, const LossOperands& operands, const Tensor& x,
                std::optional<int64_t> chunk, F f) {
  const int64_t rows = x.size(0), step = rows_of_chunk(chunk, rows, operands.weight);
  for (int64_t first = 0; first < rows; first += step) {
    const Tensor part = rows_of(x, first, std::min(step, rows - first));
    f(first, device.logits(part, operands.weight, operands.bias));
  }
}

// ---- CPU

Tensor logits_cpu(const Tensor& rows, const Tensor& weight, const Tensor* bias) {
  return linear_cpu(rows, weight, or_undefined(bias));
}

void multiply(const Tensor& out, const Tensor& left, const Tensor& right, double beta) {
  multiply_cpu(out, left, right, beta);
}

void add_columns_cpu(const Tensor& rows, Tensor sums) {
  Tensor found = empty_cpu(sums.sizes(), sums.scalar_type());
  const cpu::Rows grads{rows, rows.size(-1)};
  cpu::sum_rows(grads.count(), grads.width, rows, std::span(&found, 1),
                [&](int64_t begin, int64_t end, const std::vector<void*>& totals) {
                  cpu::column_sum(cpu::kernel_dtype(rows), grads.read(begin), totals[0],
                                  end - begin, grads.width);
                });
  sums.add_(found);
}

constexpr Device kCpu{logits_cpu, multiply, add_columns_cpu};

cpu::CrossEntropy kernel_options(const LossOperands& operands, const Options& options) {
  return {.classes = operands.weight.size(0),
          .ignore_index = options.ignore_index,
          .label_smoothing = options.label_smoothing,
          .softcap = options.softcap.value_or(0),
          .z_loss = options.z_loss};
}

// The number of rows that count.
int64_t count_targets(const Checks& check, const Tensor& target, int64_t classes,
                      int64_t ignore_index) {
  const auto* const ids = target.const_data_ptr<int64_t>();
  int64_t count = 0;
  for (int64_t i = 0; i < target.size(0); ++i) {
    if (ids[i] == ignore_index) continue;
    TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < classes, "[", check.op(), "] target must lie in [0, ",
                      classes, ") or be ignore_index, ", ignore_index, ", got ", ids[i]);
    ++count;
  }
  return count;
}

// Overwrites the logits of the rows from `first` on by their gradients.
void gradients_of_logits(const cpu::CrossEntropy& op, const Tensor& logits, const Tensor& target,
                         const Tensor& lse, const Tensor& factors, int64_t first) {
  const cpu::Rows z{logits, logits.size(1)}, statistics{lse, 1}, factor{factors, 1};
  const auto* const ids = target.const_data_ptr<int64_t>();
  cpu::parallel(logits.size(0), logits.size(1), 1, [&](int64_t begin, int64_t end) {
    cpu::cross_entropy_backward(op, cpu::kernel_dtype(logits), z.write(begin), ids + first + begin,
                                statistics.read(first + begin), factor.read(first + begin),
                                end - begin);
  });
}

// ---- ATen, for CUDA

Tensor logits_of(const Tensor& rows, const Tensor& weight, const Tensor* bias) {
  return at::linear(rows, weight, bias != nullptr ? std::optional(*bias) : std::nullopt);
}

void multiply_by_aten(const Tensor& out, const Tensor& left, const Tensor& right, double beta) {
  Tensor result = out;
  if (beta == 0) {
    at::mm_out(result, left, right);
  } else {
    at::addmm_out(result, result, left, right, beta);
  }
}

void add_columns_by_aten(const Tensor& rows, Tensor sums) {
  sums.add_(rows.sum(0, /*keepdim=*/false, sums.scalar_type()));
}

constexpr Device kAten{logits_of, multiply_by_aten, add_columns_by_aten};

Tensor capped(const Tensor& logits, const Options& options) {
  const Tensor z = to_accumulate(logits);
  return options.softcap ? at::tanh(z / *options.softcap) * *options.softcap : z;
}

// Rows of which `counts` is false have no loss. `index` is the target, or 0 for those rows.
struct Targets {
  Tensor counts, index;

  explicit Targets(const Tensor& target, int64_t ignore_index)
      : counts(target != ignore_index),
        index(at::where(counts, target, at::zeros_like(target)).to(at::kLong).unsqueeze(-1)) {}
};

// The loss of each row, and the log-probability of its target.
struct RowLosses {
  Tensor lse, loss, log_probs, correct;
};

RowLosses losses_of(const Tensor& logits, const Targets& targets, const Options& options) {
  const Tensor z = capped(logits, options), zero = at::zeros({}, z.options());
  const Tensor lse = at::logsumexp(z, {-1});
  const Tensor at_target = z.gather(-1, targets.index).squeeze(-1);
  Tensor loss = lse - (1 - options.label_smoothing) * at_target;
  if (options.label_smoothing != 0) loss = loss - options.label_smoothing * z.mean(-1);
  if (options.z_loss != 0) loss = loss + options.z_loss * lse * lse;
  const Tensor best = logits.detach().argmax(-1);
  return {lse, at::where(targets.counts, loss, zero),
          at::where(targets.counts, at_target - lse, zero).detach(),
          (best == targets.index.squeeze(-1)).logical_and(targets.counts)};
}

// The gradients of the logits, times the factor of each row.
Tensor gradients_by_aten(const Tensor& logits, const Tensor& target, const Tensor& lse,
                         const Tensor& factors, const Options& options) {
  const Targets targets(target, options.ignore_index);
  const Tensor z = capped(logits, options);
  const double smoothing = options.label_smoothing;
  Tensor grads = (z - lse.unsqueeze(-1)).exp_();
  if (options.z_loss != 0) grads.mul_((1 + 2 * options.z_loss * lse).unsqueeze(-1));
  if (smoothing != 0) grads.sub_(smoothing / static_cast<double>(logits.size(-1)));
  grads.scatter_add_(-1, targets.index,
                     at::full(targets.index.sizes(), smoothing - 1, grads.options()));
  if (options.softcap) grads.mul_(1 - (z / *options.softcap).square_());
  const Tensor zero = at::zeros({}, grads.options());
  grads = at::where(targets.counts.unsqueeze(-1), grads * factors.unsqueeze(-1), zero);
  return grads.to(logits.scalar_type());
}

// The sum or the mean of the losses of rows, or each of them.
Tensor reduced(const Tensor& losses, const Tensor& count, const Options& options) {
  if (options.has_rows()) return losses;
  return options.reduction == "mean" ? losses.sum() / count : losses.sum();
}

// The factor of each row's gradient. A count of zero rows gives no infinity, because no row counts.
Tensor row_factors(const Tensor& grad_output, const Tensor& count, const Options& options,
                   int64_t rows) {
  const Tensor grad = options.has_rows() ? grad_output.reshape({-1}) : grad_output.expand({rows});
  return (options.reduction == "mean" ? grad / count.clamp_min(1) : grad).contiguous();
}

}  // namespace

void check_cross_entropy(const Checks& check, const LossOperands& operands, const Options& options,
                         std::optional<int64_t> chunk) {
  const auto& [input, weight, bias, target] = operands;
  check.compute_dtype("input", input);
  check.compute_dtype("weight", weight);
  linear_output(check, input, weight, bias);
  TORCH_CHECK(weight.sym_size(0) > 0, "[", check.op(), "] weight must have at least 1 row, got 0");
  TORCH_CHECK(target.scalar_type() == at::kLong || target.scalar_type() == at::kInt, "[",
              check.op(), "] target must have dtype Long or Int, got ", target.scalar_type());
  const auto rows = input.sym_sizes().slice(0, input.dim() - 1);
  TORCH_CHECK(target.sym_sizes() == rows, "[", check.op(), "] target must have shape ", rows,
              ", got ", target.sym_sizes());
  TORCH_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1, "[", check.op(),
              "] label_smoothing must lie in [0, 1], got ", options.label_smoothing);
  const double softcap = options.softcap.value_or(1);
  TORCH_CHECK(softcap > 0 && is_finite(softcap), "[", check.op(),
              "] softcap must be a positive finite number or None, got ", softcap);
  TORCH_CHECK(options.z_loss >= 0 && is_finite(options.z_loss), "[", check.op(),
              "] z_loss must be a finite number >= 0, got ", options.z_loss);
  TORCH_CHECK(options.reduction == "mean" || options.reduction == "sum" || options.has_rows(), "[",
              check.op(), "] reduction must be mean, sum or none, got '", options.reduction, "'");
  TORCH_CHECK(chunk.value_or(1) >= 1, "[", check.op(), "] chunk must be at least 1 or None, got ",
              *chunk);
}

TensorSpec cross_entropy_output(const LossOperands& operands, const Options& options) {
  const auto dtype = accumulate_dtype(operands.input.scalar_type());
  if (!options.has_rows()) return {{}, dtype};
  return {c10::SymDimVector(operands.target.sym_sizes()), dtype};
}

CrossEntropyResults cross_entropy_cpu(const Checks& check, const LossOperands& operands,
                                      const Options& options, std::optional<int64_t> chunk,
                                      CrossEntropyMask wanted) {
  const Tensor x = as_matrix(operands.input), target = flat_target(operands.target);
  const cpu::CrossEntropy op = kernel_options(operands, options);
  const int64_t rows = x.size(0);
  const int64_t count = count_targets(check, target, op.classes, options.ignore_index);
  const auto dtype = accumulate_dtype(x.scalar_type());
  const Tensor lse = empty_cpu({rows}, dtype), loss = empty_cpu({rows}, dtype);
  const Tensor log_probs = empty_cpu({rows}, dtype), correct = empty_cpu({rows}, at::kByte);

  const bool is_mean = options.reduction == "mean", later = has_small_range(operands.weight);
  const double factor = is_mean ? 1 / static_cast<double>(std::max<int64_t>(count, 1)) : 1;
  Gradients gradients(kCpu, operands, x, wanted);
  Tensor factors;
  if (gradients.wants_any()) factors = empty_cpu({rows}, dtype).fill_(later ? 1 : factor);
  const cpu::Rows statistics{lse, 1}, losses{loss, 1}, probs{log_probs, 1};
  const auto* const ids = target.const_data_ptr<int64_t>();
  auto* const hits = correct.mutable_data_ptr<uint8_t>();
  for_chunks(kCpu, operands, x, chunk, [&](int64_t first, const Tensor& logits) {
    const cpu::Rows z{logits, op.classes}, each{factors, 1};
    cpu::parallel(logits.size(0), op.classes, 1, [&](int64_t begin, int64_t end) {
      // Both kernels read a row while it is in the cache.
      const int64_t step = std::max<int64_t>(1, 32768 / op.classes);
      for (int64_t row = begin; row < end; row += step) {
        const int64_t at = first + row, some = std::min(step, end - row);
        cpu::cross_entropy_forward(op, cpu::kernel_dtype(logits), z.read(row), ids + at,
                                   statistics.write(at), losses.write(at), probs.write(at),
                                   hits + at, some);
        if (!factors.defined()) continue;
        cpu::cross_entropy_backward(op, cpu::kernel_dtype(logits), z.write(row), ids + at,
                                    statistics.read(at), each.read(at), some);
      }
    });
    gradients.add(first, logits);
  });

  const Tensor counted = at::full({}, count, loss.options());
  const double lacking = count == 0 ? 0 : later ? factor : 1;
  const int64_t right = std::accumulate(hits, hits + rows, int64_t{0});
  return {.output = reduced(loss, counted, options)
                        .view(options.has_rows() ? operands.target.sizes() : at::IntArrayRef{}),
          .log_probs = log_probs.view(operands.target.sizes()),
          .accuracy = at::full({}, right, loss.options()) / counted,
          .lse = lse.view(operands.target.sizes()),
          .gradients = gradients.take(),
          .factor = at::full({1}, lacking, loss.options())};
}

CrossEntropyResults cross_entropy_cuda(const Checks&, const LossOperands& operands,
                                       const Options& options, std::optional<int64_t> chunk,
                                       CrossEntropyMask wanted) {
  const Tensor x = as_matrix(operands.input), target = flat_target(operands.target);
  const Targets targets(target, options.ignore_index);
  const auto floats = x.options().dtype(accumulate_dtype(x.scalar_type()));
  const Tensor count = targets.counts.sum().to(floats.dtype().toScalarType());
  const int64_t rows = x.size(0);
  const Tensor factors = row_factors(at::ones({}, floats), count, options, rows);
  const Tensor lse = at::empty({rows}, floats), loss = at::empty({rows}, floats);
  const Tensor log_probs = at::empty({rows}, floats), correct = at::empty({rows}, floats);
  Gradients gradients(kAten, operands, x, wanted);
  for_chunks(kAten, operands, x, chunk, [&](int64_t first, const Tensor& logits) {
    const int64_t some = logits.size(0);
    const auto part = [&](const Tensor& tensor) { return tensor.narrow(0, first, some); };
    const RowLosses found = losses_of(logits, Targets(part(target), options.ignore_index), options);
    part(lse).copy_(found.lse);
    part(loss).copy_(found.loss);
    part(log_probs).copy_(found.log_probs);
    part(correct).copy_(found.correct);
    if (!gradients.wants_any()) return;
    gradients.add(first,
                  gradients_by_aten(logits, part(target), found.lse, part(factors), options));
  });
  Tensor output = reduced(loss, count, options);
  if (options.has_rows()) output = output.view(operands.target.sizes());
  return {.output = output,
          .log_probs = log_probs.view(operands.target.sizes()),
          .accuracy = correct.sum() / count,
          .lse = lse.view(operands.target.sizes()),
          .gradients = gradients.take(),
          .factor = count.clamp_max(1).reshape({1})};
}

CrossEntropyGradients cross_entropy_backward_cpu(const Tensor& grad_output,
                                                 const LossOperands& operands, const Tensor& lse,
                                                 const Options& options,
                                                 std::optional<int64_t> chunk,
                                                 CrossEntropyMask wanted) {
  const Tensor x = as_matrix(operands.input), target = flat_target(operands.target);
  const cpu::CrossEntropy op = kernel_options(operands, options);
  const Tensor count = (target != options.ignore_index).sum().to(lse.scalar_type());
  const Tensor factors = row_factors(grad_output, count, options, x.size(0));
  Gradients gradients(kCpu, operands, x, wanted);
  for_chunks(kCpu, operands, x, chunk, [&](int64_t first, const Tensor& logits) {
    gradients_of_logits(op, logits, target, lse, factors, first);
    gradients.add(first, logits);
  });
  return gradients.take();
}

CrossEntropyGradients cross_entropy_backward_cuda(const Tensor& grad_output,
                                                  const LossOperands& operands, const Tensor& lse,
                                                  const Options& options,
                                                  std::optional<int64_t> chunk,
                                                  CrossEntropyMask wanted) {
  const Tensor x = as_matrix(operands.input), target = flat_target(operands.target);
  const Tensor count = (target != options.ignore_index).sum().to(lse.scalar_type());
  const Tensor factors = row_factors(grad_output, count, options, x.size(0));
  const Tensor statistics = lse.reshape({-1});
  Gradients gradients(kAten, operands, x, wanted);
  for_chunks(kAten, operands, x, chunk, [&](int64_t first, const Tensor& logits) {
    const auto part = [&](const Tensor& tensor) { return tensor.narrow(0, first, logits.size(0)); };
    gradients.add(
        first, gradients_by_aten(logits, part(target), part(statistics), part(factors), options));
  });
  return gradients.take();
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_decomposed(const LossOperands& operands,
                                                            const Options& options) {
  const Targets targets(operands.target, options.ignore_index);
  const Tensor logits = logits_of(operands.input, operands.weight, operands.bias);
  const RowLosses found = losses_of(logits, targets, options);
  const Tensor count = targets.counts.sum().to(found.loss.scalar_type());
  return {reduced(found.loss, count, options), found.log_probs,
          found.correct.sum().to(count.scalar_type()) / count};
}

Tensor gradient_factor(const Tensor& grad_output, const Tensor& factor) {
  return at::where(factor == 0, factor, grad_output * factor).squeeze(0);
}

Tensor scaled_gradient(Tensor gradient, const Tensor& factor) {
  const bool is_mine = is_last_reference(gradient);
  if (!gradient.is_cpu()) return is_mine ? gradient.mul_(factor) : gradient.mul(factor);
  const double number = factor.item<double>();
  if (!is_mine) return gradient.mul(number);
  return number == 1 ? gradient : gradient.mul_(number);
}

}  // namespace transformer_ops
