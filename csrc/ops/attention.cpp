// Attention: softmax(q k^T scale + mask) v for each head, of q, k and v side by side (Vaswani et
// al. 2017).
#include "wrappers/attention.h"

#include <ATen/TensorSubclassLikeUtils.h>

#include "op/op.h"
#include "wrappers/attention_parts.h"

namespace transformer_ops::ops::attention {
namespace {

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor* mask,
                          const Attention& attention) {
  check_attention(check, input, mask, attention);
  return attention_outputs(input, attention);
}

Tensor forward_decomposed(const Tensor& input, const Tensor* mask, const Attention& attention) {
  return attention_decomposed(input, mask, attention);
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& input,
                           const Tensor& output, const Tensor* log_sum_exp, const Tensor& seed,
                           const Tensor* mask, const Attention& attention, AttentionMask wanted) {
  const TensorSpecs specs = forward_shape(check, input, mask, attention);
  check.spec("grad_output", grad_output, specs[0]);
  check.spec("output", output, specs[0]);
  if (log_sum_exp != nullptr) check.spec("log_sum_exp", *log_sum_exp, specs[1]);
  check.spec("seed", seed, specs[2]);
  const auto [wants_input, wants_sinks] = wanted;
  const bool has_sinks = attention.sinks != nullptr;
  const TensorSpec of_sinks = like(has_sinks ? *attention.sinks : input);
  return {wants_input ? like(input) : absent(input.scalar_type()),
          wants_sinks && has_sinks ? of_sinks : absent(of_sinks.dtype)};
}

std::tuple<Tensor, Tensor> backward_decomposed(const Tensor& grad_output, const Tensor& input,
                                               const Tensor&, const Tensor*, const Tensor& seed,
                                               const Tensor* mask, const Attention& attention,
                                               AttentionMask wanted) {
  const auto again = [&](const Tensor& x, const Attention& with) {
    return attention_decomposed(x, mask, with, seed);
  };
  return attention_gradients(again, grad_output, input, attention, wanted);
}

// Drops the same numbers as forward did.
Tensor replay(const ReplayCall& call) {
  const Tensor seed = call.slot("seed");
  if (!seed.defined()) return {};
  const auto& attributes = call.attributes;
  const auto integer = [&](const char* name) { return std::get<int64_t>(attributes.at(name)); };
  Attention attention{integer("num_heads"),
                      integer("num_kv_heads"),
                      integer("head_dim"),
                      std::get<bool>(attributes.at("by_head")),
                      std::get<bool>(attributes.at("causal")),
                      0,
                      {},
                      false};
  if (seed.numel() > 0) attention.p = std::get<double>(attributes.at("p"));
  const auto scale = attributes.find("scale");
  if (scale != attributes.end()) attention.scale = std::get<double>(scale->second);
  const Tensors sinks = call.tensors("sinks");
  if (!sinks.empty() && sinks[0].defined()) attention.sinks = &sinks[0];
  attention.nan_rows = attention.sinks == nullptr && attributes.contains("nan_rows");
  const Tensor mask = call.slot("mask"), statistics = call.slot("log_sum_exp");
  // Scores that forward has computed in float64. A tracer has no numbers.
  const bool is_large = statistics.defined() && statistics.is_cpu() &&
                        !at::isTensorSubclassLike(statistics) && !are_ordinary(statistics);
  return attention_decomposed(is_large ? call.input.to(at::kDouble) : call.input,
                              mask.defined() ? &mask : nullptr, attention, seed)
      .to(call.input.scalar_type());
}

// A number for each head, which a row does not tell, and one seed for all rows.
int64_t bits_of_slot(const std::string& slot, int64_t width, int64_t element_bits) {
  if (slot == "seed" || slot == "mask") return 0;
  return slot == "input" ? width * element_bits : -1;
}

[[maybe_unused]] const bool registered = register_op({
    .declaration =
        {.kind = "Attention",
         .summary = "softmax(q k^T scale + mask) v for each head",
         .parameters = {"sinks"},
         .attributes = {"num_heads", "num_kv_heads", "head_dim", "by_head", "causal", "p", "scale"},
         .flags = {"nan_rows"},
         .extra_inputs = {"mask"},
         .constants = {"mask"},
         .slots =
             {{"input"}, {"mask"}, {"output"}, {.name = "log_sum_exp", .of_exact = true}, {"seed"}},
         .dtype = DTypeRule::Autocast,
         .own_dtype = {"sinks"},
         .width =
             [](const Attributes& attributes, int64_t) {
               return std::get<int64_t>(attributes.at("num_heads")) *
                      std::get<int64_t>(attributes.at("head_dim"));
             },
         .slot_bits = bits_of_slot},
    .forward = {.schema = "attention(Tensor input, Tensor? mask, Tensor? sinks, int num_heads, "
                          "int num_kv_heads, int head_dim, bool by_head, bool causal, float p, "
                          "float? scale, bool nan_rows, bool training) -> "
                          "(Tensor output, Tensor log_sum_exp, Tensor seed)",
                .shape = forward_shape,
                .any_strides = {"mask"},
                .products = {.of_heads = 2},
                .bodies = {attention_cpu, attention_cuda, forward_decomposed},
                .random = true},
    .backward =
        {.schema =
             "attention_backward(Tensor grad_output, Tensor input, Tensor output, "
             "Tensor? log_sum_exp, Tensor seed, Tensor? mask, Tensor? sinks, int num_heads, "
             "int num_kv_heads, int head_dim, bool by_head, bool causal, float p, float? scale, "
             "bool nan_rows, bool training, bool[2] output_mask) -> "
             "(Tensor grad_input, Tensor grad_sinks)",
         .shape = backward_shape,
         .any_strides = {"mask"},
         // The scores again, and four gradients.
         .products = {.of_heads = 5},
         .bodies = {attention_backward_cpu, attention_backward_cuda, backward_decomposed}},
    .replay = replay,
});

}  // namespace
}  // namespace transformer_ops::ops::attention
