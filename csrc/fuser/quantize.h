#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "fuser/analysis.h"
#include "fuser/plan.h"
#include "fuser/rule.h"
#include "fuser/schema.h"

namespace transformer_ops {

// The op that rounds a tensor to the numbers of a format.
inline constexpr const char* kRoundCall = "quantize_dequantize";
// The suffix of an op that rounds or decodes a tensor which forward saved. Its first argument is a
// gradient, which prevents a compiler from running the op in forward and saving the result.
inline constexpr const char* kSaved = ".saved";
// The name of an op without that suffix.
inline std::string_view without_saved(std::string_view target) {
  const bool is_saved = target.ends_with(kSaved);
  return target.substr(0, target.size() - (is_saved ? std::string_view(kSaved).size() : 0));
}
// The op that rounds to values of codes, and also returns the scale that decodes them.
inline constexpr const char* kRoundValues = "quantize_values";
// The suffix of an op that takes scales. A product takes those of its operands. An op that rounds
// takes a scale that is a state, and also returns the largest magnitude.
inline constexpr const char* kScaled = "_scaled";

// A parameter that is stored quantized is decoded where a step reads it, and again in backward:
//   t1.weight = dequantize(p1.weight.codes, p1.weight.scale, "mx e4m3", "bfloat16", none)
void decode_parameters(const Analysis& analysis, Pass pass, Step& step);
// The call that does so in backward. A gradient of the step prevents a compiler from decoding in
// forward and saving the result.
Instruction decode_again(const Analysis& analysis, const Value& parameter, const Value& gradient);

// Products y = x W^T under a recipe take operands that separate instructions round:
//   t1.rounded_weight = quantize_dequantize(p1.weight, "mx e4m3", "bfloat16")
// The rounded numbers are exact in their dtype, so the result is that of a product of codes. A
// weight that is stored quantized is not rounded. Without a recipe nothing changes.
// If a format has one scale for the tensor, a bfloat16 product takes the values of the codes, which
// are exact, and the scale:
//   t1.rounded_input, t1.rounded_input_scale = quantize_values(x1, "e4m3", "bfloat16")
//   x2 = linear_scaled(t1.rounded_input, t1.rounded_weight, t1.rounded_input_scale, ...)
// On CUDA the product takes codes instead of values if that is the only scale ("float8_e4m3fn"), or
// if both operands are NVFP4 or FP8 codes with a scale for each block of 128 or of 32:
//   t1.rounded_input, t1.rounded_input_scale = quantize(x1, "e4m3 1x128")
// NVFP4 operands that are summed over their rows are rounded by quantize_columns.
// A float16 product, alone or fused, is computed in float32: its other arguments are cast, and its
// result is rounded once.
void quantize_forward(const Analysis& analysis, Step& step);
// Under delayed scaling the scale is a state of the op. The largest magnitude, from which later
// scales are computed, goes to another state. Backward rounds with the same scale as forward:
//   t1.rounded_input, st1.fp8_amax = quantize_dequantize_scaled(x1, st1.fp8_scale, 0, "e4m3", ...)
// The gradients of x and W sum along different dimensions: if the blocks of a format follow the
// sum, each has its own call. `schema`: that of the step's call.
void quantize_backward(const Analysis& analysis, const Schema& schema, Step& step);

// The states of a product under delayed scaling: the scales, and the largest magnitudes that
// forward and backward have seen since the scales were computed. Each has an element for input,
// weight and gradient.
inline constexpr const char* kScaleStates[] = {"fp8_scale", "fp8_amax", "fp8_grad_amax"};
inline constexpr int64_t kScalePositions = 3;
void list_states(Plan& plan);

// The reason why a rule, or a fusion in the host language, may not take these ops: one of them is a
// product whose operands it would not round.
std::optional<std::string> quantized_product(const Match& match, const Rule& rule);
std::optional<std::string> quantized_product(const Match& match);

}  // namespace transformer_ops
