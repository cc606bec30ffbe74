#pragma once

#include <optional>
#include <string>

#include "fuser/analysis.h"
#include "fuser/plan.h"
#include "fuser/rule.h"
#include "fuser/schema.h"

namespace transformer_ops {

// A tensor rounded to the numbers of a format. In backward ".saved" stands behind it: of a tensor
// from forward, after the gradient that ties the call there.
inline constexpr const char* kRoundCall = "quantize_dequantize";
// To values of codes, by a scale that is a state: the scale that decodes them and the largest
// magnitude beside them.
// Behind the name of an op that rounds, or decodes: of what forward saved. Its first argument is a
// gradient, which keeps a compiler from running it in forward, and from keeping the result.
inline constexpr const char* kSaved = ".saved";
inline constexpr const char* kRoundValuesScaled = "quantize_values_scaled";

// A parameter that is held quantized is decoded where a step reads it, in backward again:
//   t1.weight = dequantize(p1.weight.codes, p1.weight.scale, "mx e4m3", "bfloat16", none)
void decode_parameters(const Analysis& analysis, Pass pass, Step& step);

// Products y = x W^T under a recipe take operands that are rounded to its formats, by instructions
// of their own:
//   t1.rounded_weight = quantize_dequantize(p1.weight, "mx e4m3", "bfloat16")
// Numbers of a format are exact in the dtype they are rounded in, so what is multiplied is what a
// product of codes would multiply; one that is held quantized is taken as it is. Without a recipe
// nothing changes.
// Where a format has one scale of the tensor, a product in bfloat16 takes the values of the codes,
// which are exact there, and the scale beside them:
//   t1.rounded_input, t1.rounded_input_scale = quantize_values(x1, "e4m3", "bfloat16")
//   x2 = linear_scaled(t1.rounded_input, t1.rounded_weight, t1.rounded_input_scale, ...)
// On CUDA codes instead of their values, where that scale is all there is: "float8_e4m3fn"; and
// where both operands have FP8 codes with a scale for each block of 128, or of 32, or are in NVFP4,
// those:
//   t1.rounded_input, t1.rounded_input_scale = quantize(x1, "e4m3 1x128")
// Of NVFP4, what is summed over its rows is rounded by quantize_columns.
// A product of float16 is computed in float32, and a fused one with it: the tensors beside its
// operands are cast, and what it gives is rounded once.
void quantize_forward(const Analysis& analysis, Step& step);
// Under delayed scaling the scale is a state of the op, and the largest magnitude, of which the
// next scales are made, goes to another one; backward rounds what forward rounded by the same
// scale:
//   t1.rounded_input, st1.fp8_amax = quantize_dequantize_scaled(x1, st1.fp8_scale, 0, "e4m3", ...)
// The gradients of x and W are sums along different dimensions: where the blocks of a format follow
// the sum, the two have a call each. `schema`: that of the step's call.
void quantize_backward(const Analysis& analysis, const Schema& schema, Step& step);

// The states of a product under delayed scaling, each with a place for input, weight and gradient:
// the scales, and the largest magnitudes that forward and backward have met since those were made.
inline constexpr const char* kScaleStates[] = {"fp8_scale", "fp8_amax", "fp8_grad_amax"};
inline constexpr int64_t kScalePlaces = 3;
void list_states(Plan& plan);

// Why a rule, or a fusion in the host language, may not take these ops: one of them is a product
// whose operands it would not round.
std::optional<std::string> quantized_product(const Match& match, const Rule& rule);
std::optional<std::string> quantized_product(const Match& match);

}  // namespace transformer_ops
