// Router: chooses the experts of each token, and their probabilities. The tokens pass through.
#include <ATen/ops/arange.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "op/op.h"

namespace transformer_ops::ops::router {
namespace {

struct Settings {
  int64_t top_k;
  std::string_view score;  // "softmax" or "sigmoid"
  bool normalize;
};

void check_router(const Checks& check, const Tensor& input, const Tensor& weight,
                  const Settings& settings) {
  check.compute_dtype("input", input);
  check.has_rows("input", input);
  check.compute_dtype("weight", weight);
  TORCH_CHECK(weight.dim() == 2, "[", check.op(), "] weight must have 2 dimensions, got shape ",
              weight.sym_sizes());
  TORCH_CHECK(input.sym_size(-1) == weight.sym_size(1), "[", check.op(),
              "] input must have last dimension ", weight.sym_size(1), ", got shape ",
              input.sym_sizes());
  TORCH_CHECK(settings.score == "softmax" || settings.score == "sigmoid", "[", check.op(),
              "] score must be softmax or sigmoid, got '", settings.score, "'");
  TORCH_CHECK(settings.top_k >= 1 && settings.top_k <= weight.sym_size(0), "[", check.op(),
              "] top_k must lie in [1, ", weight.sym_size(0), "], got ", settings.top_k);
}

c10::SymDimVector ids_sizes(const Tensor& input, int64_t top_k) {
  c10::SymDimVector sizes(input.sym_sizes());
  sizes.back() = top_k;
  return sizes;
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& weight,
                          const Tensor* balance, int64_t top_k, std::string_view score,
                          bool normalize) {
  check_router(check, input, weight, {top_k, score, normalize});
  if (balance != nullptr) {
    check.compute_dtype("balance", *balance);
    check.spec("balance", *balance, {{weight.sym_size(0)}, balance->scalar_type()});
  }
  const c10::SymDimVector sizes = ids_sizes(input, top_k);
  const auto dtype = accumulate_dtype(weight.scalar_type());
  return {{sizes, dtype}, {sizes, at::kInt}, {{}, dtype}};
}

// The score of each token for each expert, in the accumulate dtype; the product is in the weight's.
Tensor scores_of(const Tensor& input, const Tensor& weight, const Settings& settings) {
  const Tensor logits = to_accumulate(at::linear(input.to(weight.scalar_type()), weight));
  return settings.score == "softmax" ? at::softmax(logits, -1) : at::sigmoid(logits);
}

Tensor probs_of(const Tensor& scores, const Tensor& ids, const Settings& settings) {
  const Tensor probs = scores.gather(-1, ids);
  return settings.normalize ? probs / (probs.sum(-1, /*keepdim=*/true) + 1e-20) : probs;
}

// experts * sum over experts of (its share of the copies) (its mean probability). The minimum is 1,
// if all experts get the same number of copies (Fedus et al. 2021, Switch Transformer).
Tensor aux_loss_of(const Tensor& scores, const Tensor& ids, const Settings& settings) {
  const c10::SymInt experts = scores.sym_size(-1);
  const Tensor rows = scores.reshape_symint({-1, experts});
  const Tensor shares =
      settings.score == "softmax" ? rows : rows / (rows.sum(-1, /*keepdim=*/true) + 1e-20);
  const Tensor flat = ids.reshape({-1});
  const Tensor counts =
      at::zeros_symint({experts}, flat.options()).scatter_add(0, flat, at::ones_like(flat));
  const c10::SymInt tokens = rows.sym_size(0).max(1);
  const Tensor part = counts.to(scores.scalar_type()) / at::Scalar(flat.sym_size(0).max(1));
  return (part * shares.sum(0)).sum() * at::Scalar(experts) / at::Scalar(tokens);
}

std::tuple<Tensor, Tensor, Tensor> forward_decomposed(const Tensor& input, const Tensor& weight,
                                                      const Tensor* balance, int64_t top_k,
                                                      std::string_view score, bool normalize) {
  const Settings settings{top_k, score, normalize};
  const Tensor scores = scores_of(input, weight, settings);
  const Tensor key = balance != nullptr ? scores + *balance : scores;
  const Tensor ids = std::get<1>(key.detach().topk(top_k, -1));
  return {probs_of(scores, ids, settings), ids.to(at::kInt), aux_loss_of(scores, ids, settings)};
}

using Mask = std::array<bool, 2>;  // flags of the wanted results among (grad_input, grad_weight)

TensorSpecs backward_shape(const Checks& check, const Tensor& input, const Tensor& weight,
                           const Tensor& expert_ids, const Tensor* grad_output,
                           const Tensor* grad_probs, const Tensor* grad_aux_loss, int64_t top_k,
                           std::string_view score, bool normalize, Mask wanted) {
  check_router(check, input, weight, {top_k, score, normalize});
  const c10::SymDimVector sizes = ids_sizes(input, top_k);
  const auto dtype = accumulate_dtype(weight.scalar_type());
  check.spec("expert_ids", expert_ids, {sizes, at::kInt});
  if (grad_output != nullptr) check.spec("grad_output", *grad_output, like(input));
  if (grad_probs != nullptr) check.spec("grad_probs", *grad_probs, {sizes, dtype});
  if (grad_aux_loss != nullptr) check.spec("grad_aux_loss", *grad_aux_loss, {{}, dtype});
  const auto [wants_input, wants_weight] = wanted;
  return {wants_input ? like(input) : absent(input.scalar_type()),
          wants_weight ? like(weight) : absent(weight.scalar_type())};
}

std::tuple<Tensor, Tensor> backward_decomposed(const Tensor& input, const Tensor& weight,
                                               const Tensor& expert_ids, const Tensor* grad_output,
                                               const Tensor* grad_probs,
                                               const Tensor* grad_aux_loss, int64_t top_k,
                                               std::string_view score, bool normalize,
                                               Mask wanted) {
  const Settings settings{top_k, score, normalize};
  const auto [wants_input, wants_weight] = wanted;
  const Tensor ids = expert_ids.to(at::kLong);
  Tensor grad_input, grad_weight;
  if (grad_probs != nullptr || grad_aux_loss != nullptr) {
    const Tensor one = at::ones({}, input.options().dtype(accumulate_dtype(weight.scalar_type())));
    const auto found = gradients(
        [&](const Tensor& x, const Tensor& w) {
          const Tensor scores = scores_of(x, w, settings);
          Tensor sum;
          if (grad_probs != nullptr) sum = (probs_of(scores, ids, settings) * *grad_probs).sum();
          if (grad_aux_loss != nullptr) {
            const Tensor loss = aux_loss_of(scores, ids, settings) * *grad_aux_loss;
            sum = sum.defined() ? sum + loss : loss;
          }
          return sum;
        },
        one, input, weight);
    std::tie(grad_input, grad_weight) = std::tuple(std::get<0>(found), std::get<1>(found));
  } else {
    grad_input = at::zeros_like(input);
    grad_weight = at::zeros_like(weight);
  }
  if (grad_output != nullptr) grad_input = grad_input + *grad_output;
  return {wants_input ? grad_input : Tensor(), wants_weight ? grad_weight : Tensor()};
}

// Computed from the saved ids.
Tensor replay(const ReplayCall& call) {
  const Tensor kept = call.slot("expert_ids");
  if (!kept.defined()) return {};
  const auto& attributes = call.attributes;
  const Settings settings{std::get<int64_t>(attributes.at("top_k")),
                          std::get<std::string>(attributes.at("score")),
                          std::get<bool>(attributes.at("normalize"))};
  const Tensor ids = kept.to(at::kLong);
  const Tensor scores = scores_of(call.input, call.tensors("weight")[0], settings);
  call.give("expert_ids", kept);
  call.give("probs", probs_of(scores, ids, settings));
  call.give("aux_loss", aux_loss_of(scores, ids, settings));
  return call.input;
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "Router",
                    .summary = "the top_k experts of each row by act(x weight^T), and their "
                               "probabilities; the output is x",
                    .parameters = {"weight", "balance"},
                    .attributes = {"top_k", "score", "normalize"},
                    .extra_outputs = {"expert_ids", "probs", "aux_loss"},
                    .integers = {"expert_ids"},
                    .slots = {{"input"}, {"weight"}, {"expert_ids"}}},
    .forward = {.schema = "router(Tensor input, Tensor weight, Tensor? balance, int top_k, "
                          "str score, bool normalize) -> (Tensor probs, Tensor expert_ids, "
                          "Tensor aux_loss)",
                .shape = forward_shape,
                .products = {.list = {{"weight"}}},
                .bodies = {.decomposition = forward_decomposed}},
    .backward = {.schema = "router_backward(Tensor input, Tensor weight, Tensor expert_ids, "
                           "Tensor? grad_output, Tensor? grad_probs, Tensor? grad_aux_loss, "
                           "int top_k, str score, bool normalize, "
                           "bool[2] output_mask) -> (Tensor grad_input, Tensor grad_weight)",
                 .shape = backward_shape,
                 .products = {.list = {{"weight"}}},
                 .bodies = {.decomposition = backward_decomposed}},
    .replay = replay,
});

}  // namespace
}  // namespace transformer_ops::ops::router
