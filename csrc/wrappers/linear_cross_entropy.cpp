#include "wrappers/linear_cross_entropy.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/bias.h"
#include "kernels/cross_entropy.h"
#include "op/buffer.h"
#include "wrappers/cpu.h"
#include "wrappers/cuda.h"
#include "wrappers/linear.h"
#include "wrappers/product.h"

namespace transformer_ops {
namespace {

using LossOperands = CrossEntropyOperands;
using Options = CrossEntropyOptions;

kernel::CrossEntropy kernel_options(const LossOperands& operands, const Options& options) {
  return {.classes = operands.weight.size(0),
          .ignore_index = options.ignore_index,
          .label_smoothing = options.label_smoothing,
          .softcap = options.softcap.value_or(0),
          .z_loss = options.z_loss};
}

bool is_finite(double number) { return std::isfinite(number); }

// Each chunk adds to the gradient of the weight, and 16-bit sums are rounded each time. 16 chunks
// add less error to it than the rounding of the logits, which eager mode has too.
constexpr int64_t kMostRoundings = 16;

// Float16 cannot hold the gradients of a mean over many rows, so they are made for the sum.
bool has_small_range(const Tensor& weight) { return weight.scalar_type() == at::kHalf; }

// One number for each row, in the accumulate dtype; `correct` has bytes.
struct Rows {
  Tensor target;  // int64
  Tensor lse;     // is read if `loss` is not defined
  Tensor loss, log_probs, correct;
  Tensor factors;  // not defined: no gradients

  // The rows from `first` on.
  Rows from(int64_t first, int64_t count) const {
    const auto part = [&](const Tensor& all) {
      return all.defined() ? all.narrow(0, first, count) : all;
    };
    return {part(target), part(lse), part(loss), part(log_probs), part(correct), part(factors)};
  }
};

// The rows that are computed: all, or those that count.
class Kept {
 public:
  explicit Kept(int64_t rows) : rows_(rows) {}
  Kept(int64_t rows, Tensor ids) : rows_(rows), ids_(std::move(ids)) {}

  Tensor of(const Tensor& all) const {
    return ids_.defined() ? at::index_select(all, 0, ids_) : all;
  }

  // All rows, with 0 in those that do not count.
  Tensor back(Tensor kept) const {
    if (!ids_.defined() || !kept.defined()) return kept;
    c10::DimVector sizes(kept.sizes());
    sizes[0] = rows_;
    return at::zeros(sizes, kept.options()).index_copy_(0, ids_, kept);
  }

 private:
  int64_t rows_;
  Tensor ids_;
};

// The products and the rows of one device.
struct Device {
  // The logits of these rows.
  Tensor (*logits)(const Tensor& rows, const Tensor& weight, const Tensor* bias);
  // out = beta out + left right.
  void (*multiply)(const Tensor& out, const Tensor& left, const Tensor& right, double beta);
  // Adds the sums of the columns to `sums`, which is in the accumulate dtype.
  void (*add_columns)(const Tensor& rows, Tensor sums);
  // Computes what `rows` has, and overwrites the logits by their gradients if it has factors.
  void (*compute)(const kernel::CrossEntropy& op, const Tensor& logits, const Rows& rows);
  // What to compute for these targets.
  Kept (*kept)(const Tensor& target, int64_t ignore_index);
  int64_t least_rows;  // of a chunk
};

// The number of rows of a chunk: at least those that its products need. More rows only take more
// memory, but chunks of few classes may have more: 4 MiB fit in the caches.
int64_t rows_of_chunk(const Device& device, std::optional<int64_t> chunk, int64_t rows,
                      const Tensor& weight) {
  if (chunk) return std::min(*chunk, rows);
  constexpr int64_t kCacheBytes = int64_t{4} << 20;
  const int64_t classes = weight.size(0), bytes = classes * weight.element_size();
  int64_t found = std::max(device.least_rows, kCacheBytes / bytes);
  if (weight.element_size() == 2) {
    found = std::max(found, (rows + kMostRoundings - 1) / kMostRoundings);
  }
  return std::min(found, rows);
}

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

  CrossEntropyGradients take(const Kept& kept) {
    if (input_.defined()) input_ = kept.back(input_).view(operands_.input.sizes());
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
  const int64_t rows = x.size(0), step = rows_of_chunk(device, chunk, rows, operands.weight);
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

// Raises if a target is neither a class nor ignored.
void check_targets(const Checks& check, const kernel::CrossEntropy& op, const Tensor& target) {
  const auto* const ids = target.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < target.size(0); ++i) {
    TORCH_CHECK_INDEX(ids[i] == op.ignore_index || (ids[i] >= 0 && ids[i] < op.classes), "[",
                      check.op(), "] target must lie in [0, ", op.classes, ") or be ignore_index, ",
                      op.ignore_index, ", got ", ids[i]);
  }
}

void compute_cpu(const kernel::CrossEntropy& op, const Tensor& logits, const Rows& rows) {
  const auto one = [](const Tensor& each) { return cpu::Rows{each, 1}; };
  const cpu::Rows z{logits, op.classes}, lse = one(rows.lse), loss = one(rows.loss);
  const cpu::Rows log_probs = one(rows.log_probs), correct = one(rows.correct);
  const cpu::Rows factors = one(rows.factors);
  const auto* const ids = rows.target.const_data_ptr<int64_t>();
  const cpu::DType dtype = cpu::kernel_dtype(logits);
  cpu::parallel(logits.size(0), op.classes, 1, [&](int64_t begin, int64_t end) {
    // Both kernels read a row while it is in the cache.
    const int64_t step = std::max<int64_t>(1, 32768 / op.classes);
    for (int64_t row = begin; row < end; row += step) {
      const int64_t some = std::min(step, end - row);
      if (rows.loss.defined()) {
        cpu::cross_entropy_forward(op, dtype, z.read(row), ids + row, lse.write(row),
                                   loss.write(row), log_probs.write(row),
                                   static_cast<uint8_t*>(correct.write(row)), some);
      }
      if (rows.factors.defined()) {
        cpu::cross_entropy_backward(op, dtype, z.write(row), ids + row, lse.read(row),
                                    factors.read(row), some);
      }
    }
  });
}

// Most rows of masked language models are ignored, and the prompts of others. To gather the rest
// costs one pass over the input.
Kept kept_cpu(const Tensor& target, int64_t ignore_index) {
  const int64_t rows = target.size(0);
  Tensor ids = at::nonzero(target != ignore_index).view({-1});
  return ids.size(0) * 16 > rows * 15 ? Kept(rows) : Kept(rows, std::move(ids));
}

// Products of fewer than 256 rows took up to 1.6 times as long (float32 and bfloat16, 576 columns,
// 49,152 classes).
constexpr Device kCpu{logits_cpu,  multiply, add_columns_cpu,
                      compute_cpu, kept_cpu, /*least_rows=*/256};

// ---- CUDA

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

void compute_cuda(const kernel::CrossEntropy& op, const Tensor& logits, const Rows& rows) {
  const auto data = [](const Tensor& each) { return each.defined() ? cuda::write(each) : nullptr; };
  cuda::cross_entropy(cuda::stream_of(logits), op, kernel_dtype(logits), cuda::write(logits),
                      rows.target.const_data_ptr<int64_t>(),
                      {.lse = data(rows.lse),
                       .loss = data(rows.loss),
                       .log_probs = data(rows.log_probs),
                       .correct = static_cast<uint8_t*>(data(rows.correct)),
                       .factors = data(rows.factors)},
                      logits.size(0));
}

// To count the rows that count would wait for the device.
Kept kept_cuda(const Tensor& target, int64_t) { return Kept(target.size(0)); }

// Products of 1,024 rows have more operations for each byte of the weight than a GPU can feed.
constexpr Device kCuda{logits_of,    multiply_by_aten, add_columns_by_aten,
                       compute_cuda, kept_cuda,        /*least_rows=*/1024};

// ---- in plain ATen calls

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

// The number of rows that count.
Tensor count_of(const Tensor& target, const Options& options, at::ScalarType dtype) {
  return (target != options.ignore_index).sum().to(dtype);
}

CrossEntropyResults forward(const Device& device, const LossOperands& operands,
                            const Tensor& target, const Options& options,
                            std::optional<int64_t> chunk, CrossEntropyMask wanted) {
  const Kept kept = device.kept(target, options.ignore_index);
  const Tensor x = kept.of(as_matrix(operands.input));
  const kernel::CrossEntropy op = kernel_options(operands, options);
  const int64_t rows = x.size(0);
  const auto dtype = accumulate_dtype(x.scalar_type());
  const auto each = [&](at::ScalarType type) { return empty({rows}, type, x.device()); };
  const Tensor count = count_of(target, options, dtype);
  Gradients gradients(device, operands, x, wanted);
  Rows all{kept.of(target), each(dtype), each(dtype), each(dtype), each(at::kByte), {}};
  Tensor factor = count.clamp_max(1);
  if (gradients.wants_any()) {
    Options of_rows = options;
    if (has_small_range(operands.weight) && options.reduction == "mean") {
      of_rows.reduction = "sum";
      factor = factor / count.clamp_min(1);
    }
    all.factors = row_factors(at::ones({}, count.options()), count, of_rows, rows);
  }
  for_chunks(device, operands, x, chunk, [&](int64_t first, const Tensor& logits) {
    device.compute(op, logits, all.from(first, logits.size(0)));
    if (gradients.wants_any()) gradients.add(first, logits);
  });
  const auto of_all = [&](const Tensor& each) {
    return kept.back(each).view(operands.target.sizes());
  };
  return {.output = options.has_rows() ? of_all(all.loss) : reduced(all.loss, count, options),
          .log_probs = of_all(all.log_probs),
          .accuracy = all.correct.sum().to(dtype) / count,
          .lse = of_all(all.lse),
          .gradients = gradients.take(kept),
          .factor = factor.reshape({1})};
}

CrossEntropyGradients backward(const Device& device, const Tensor& grad_output,
                               const LossOperands& operands, const Tensor& lse,
                               const Options& options, std::optional<int64_t> chunk,
                               CrossEntropyMask wanted) {
  const Tensor target = flat_target(operands.target);
  const Kept kept = device.kept(target, options.ignore_index);
  const Tensor x = kept.of(as_matrix(operands.input));
  const Tensor count = count_of(target, options, lse.scalar_type());
  const Tensor factors = row_factors(grad_output, count, options, target.size(0));
  const Rows all{kept.of(target), kept.of(lse.reshape({-1})), {}, {}, {}, kept.of(factors)};
  Gradients gradients(device, operands, x, wanted);
  for_chunks(device, operands, x, chunk, [&](int64_t first, const Tensor& logits) {
    device.compute(kernel_options(operands, options), logits, all.from(first, logits.size(0)));
    gradients.add(first, logits);
  });
  return gradients.take(kept);
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
  const Tensor target = flat_target(operands.target);
  check_targets(check, kernel_options(operands, options), target);
  return forward(kCpu, operands, target, options, chunk, wanted);
}

CrossEntropyResults cross_entropy_cuda(const Checks&, const LossOperands& operands,
                                       const Options& options, std::optional<int64_t> chunk,
                                       CrossEntropyMask wanted) {
  return forward(kCuda, operands, flat_target(operands.target), options, chunk, wanted);
}

CrossEntropyGradients cross_entropy_backward_cpu(const Tensor& grad_output,
                                                 const LossOperands& operands, const Tensor& lse,
                                                 const Options& options,
                                                 std::optional<int64_t> chunk,
                                                 CrossEntropyMask wanted) {
  return backward(kCpu, grad_output, operands, lse, options, chunk, wanted);
}

CrossEntropyGradients cross_entropy_backward_cuda(const Tensor& grad_output,
                                                  const LossOperands& operands, const Tensor& lse,
                                                  const Options& options,
                                                  std::optional<int64_t> chunk,
                                                  CrossEntropyMask wanted) {
  return backward(kCuda, grad_output, operands, lse, options, chunk, wanted);
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
