#include "wrappers/parallel_linear.h"

#include <algorithm>
#include <deque>

#include "op/buffer.h"
#include "wrappers/bias.h"
#include "wrappers/linear.h"
#include "wrappers/linear_cuda.h"
#include "wrappers/product.h"

namespace transformer_ops {

namespace {

const Tensor& with_rows(const Checks& check, const Tensor& input) {
  TORCH_CHECK(input.dim() >= 2, "[", check.op(),
              "] input must have at least 2 dimensions, got shape ", input.sym_sizes());
  return input;
}

// Memory for a chunk of the rows of all ranks, like those of `tensor`.
Tensor empty_for(const Chunk& chunk, const Tensor& tensor, const Ranks& ranks) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = ranks.count * chunk.count;
  return empty(sizes, tensor.scalar_type(), tensor.device());
}

// Op `product` has the weight, the next one has the bias.
std::optional<std::string> why_not(const Match& match, int product) {
  if (!match.input_requires_grad()) return "the input needs no gradient";
  if (!match.parameter_requires_grad(product, 0)) return "the weight needs no gradient";
  const Analysis& analysis = match.analysis;
  if (product > 0 &&
      analysis.dtypes()[match.places[0]] != analysis.compute_dtype(match.places[product])) {
    return "the input is cast before the product";
  }
  if (!match.has(product + 1)) return std::nullopt;
  if (!match.parameter_requires_grad(product + 1, 0)) return "the bias needs no gradient";
  const bool differ = match.parameters(product)[0].dtype != match.parameters(product + 1)[0].dtype;
  return differ ? std::optional<std::string>("weight and bias have different dtypes")
                : std::nullopt;
}

}  // namespace

c10::SymInt gathered_rows(const Checks& check, const Tensor& input, int64_t ranks) {
  return gathered(check, "input", with_rows(check, input), ranks).sizes[0];
}

c10::SymInt scattered_rows(const Checks& check, const Tensor& input, int64_t ranks) {
  return scattered(check, "input", with_rows(check, input), ranks).sizes[0];
}

std::vector<Chunk> chunks_of(const Tensor& rows, const Ranks& ranks, int64_t least_rows) {
  // 1, 4, 4, 4, 1 parts: more chunks would hide little more of the products, and each one costs a
  // collective and another pass over the weight.
  constexpr int64_t kMostInside = 3, kParts = 14;
  const int64_t whole = rows.size(0), width = std::max<int64_t>(rows.size(-1), 1);
  const int64_t each = whole > 0 ? rows.numel() / width / whole * ranks.count : 0;
  if (each == 0) return {{0, whole}};
  const auto divided = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t least = std::max(divided(least_rows, each), divided(whole, kParts));
  if (whole < 2 * least) return {{0, whole}};
  const int64_t inside = whole - 2 * least, count = std::min(inside / least, kMostInside);
  if (count == 0) return {{0, whole - least}, {whole - least, least}};
  std::vector<Chunk> chunks = {{0, least}};
  for (int64_t k = 0; k < count; ++k) {
    const int64_t first = least + inside * k / count;
    chunks.push_back({first, least + inside * (k + 1) / count - first});
  }
  chunks.push_back({whole - least, least});
  return chunks;
}

Tensor rows_of_ranks(const Tensor& whole, const Ranks& ranks, const Chunk& chunk) {
  return whole.unflatten(0, {ranks.count, -1}).narrow(1, chunk.first, chunk.count);
}

void parallel_product(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& output) {
  if (!input.is_cpu()) {
    output.copy_(linear_cuda(input, weight, bias));
  } else if (bias.defined()) {
    output.copy_(bias.expand_as(output));
    add_linear_cpu(output, input, weight);
  } else {
    product_cpu(as_matrix(output), as_matrix(input), transposed(weight), /*adds=*/false);
  }
}

void parallel_input_gradient(const Tensor& grad_output, const Tensor& weight,
                             const Tensor& grad_input) {
  if (grad_output.is_cpu()) {
    product_cpu(as_matrix(grad_input), as_matrix(grad_output), weight, /*adds=*/false);
  } else {
    linear_input_gradient_cuda(grad_output, weight, grad_input);
  }
}

void parallel_weight_gradient(const Call& call, const Tensor& grad_output, const Tensor& input,
                              const Tensor& grad_weight, Tensor grad_bias) {
  const bool adds = call.main_grad().adds, is_cpu = grad_output.is_cpu();
  if (grad_weight.defined() && !is_cpu) {
    return linear_weight_gradient_cuda(grad_output, input, grad_weight,
                                       {.adds = adds, .grad_bias = std::move(grad_bias)});
  }
  if (grad_weight.defined()) {
    product_cpu(grad_weight, transposed(as_matrix(grad_output)), as_matrix(input), adds);
  }
  if (!grad_bias.defined()) return;
  is_cpu ? sum_columns_cpu(grad_output, grad_bias) : sum_columns_cuda(grad_output, grad_bias);
}

void gather_beside(const Checks& check, const Tensor& input, const Ranks& ranks, int64_t least_rows,
                   Tensor whole, const Tensor& output,
                   const std::function<void(const Tensor&, const Tensor&)>& product) {
  const auto chunks = chunks_of(input, ranks, least_rows);
  if (chunks.size() == 1) {
    if (!whole.defined()) whole = empty_for(chunks[0], input, ranks);
    start_gather(check, input, ranks, whole);
    finish(check, ranks, whole);
    if (output.defined()) product(whole, output);
    return;
  }
  // One collective waits while another runs.
  std::deque<Tensor> started;
  const auto start = [&](size_t k) {
    if (k >= chunks.size()) return;
    started.push_back(empty_for(chunks[k], input, ranks));
    start_gather(check, input.narrow(0, chunks[k].first, chunks[k].count), ranks, started.back());
  };
  start(0);
  start(1);
  for (size_t k = 0; k < chunks.size(); ++k) {
    finish(check, ranks, started.front());
    start(k + 2);
    const Tensor rows = std::move(started.front());
    started.pop_front();
    const auto put = [&](const Tensor& part, const Tensor& into) {
      rows_of_ranks(into, ranks, chunks[k]).copy_(part.unflatten(0, {ranks.count, -1}));
    };
    if (whole.defined()) put(rows, whole);
    if (!output.defined()) continue;
    const Tensor results = empty_for(chunks[k], output, ranks);
    product(rows, results);
    put(results, output);
  }
}

std::optional<std::string> different_bias_dtype(const Match& match, int product) {
  // Under autocast both are cast.
  if (!match.has(product + 1) || match.key().autocast) return std::nullopt;
  const bool differ = match.parameters(product)[0].dtype != match.parameters(product + 1)[0].dtype;
  return differ ? std::optional<std::string>("weight and bias have different dtypes")
                : std::nullopt;
}

TensorSpecs parallel_outputs(TensorSpecs of_product, const Tensor& grad_output,
                             ParallelMask wanted) {
  TensorSpecs specs = std::move(of_product);
  specs.push_back(bias_gradient(grad_output));
  for (size_t k = 0; k < specs.size(); ++k) {
    if (!wanted[k]) specs[k] = absent(grad_output.scalar_type());
  }
  return specs;
}

FusedOp make_rule(ParallelBackward parts) {
  const int product = parts.pattern[0].kinds[0] == "BasicLinear" ? 0 : 1;
  return {.rule = {.name = parts.name,
                   .pass = Pass::Backward,
                   // runs before bias_linear, and after the rules that save a pass over the
                   // gradient
                   .benefit = 8,
                   .pattern = std::move(parts.pattern),
                   .why_not = [product](const Match& match) { return why_not(match, product); }},
          .backward = {.schema = parts.name +
                                 "_backward(Tensor grad_output, Tensor input, Tensor weight, "
                                 "int group_size, str group, bool[3] output_mask) -> "
                                 "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
                       .shape = std::move(parts.shape),
                       .products = {.list = {{"weight"}}, .rows = std::move(parts.rows)},
                       .bodies = std::move(parts.bodies),
                       .accumulates = true}};
}

}  // namespace transformer_ops
