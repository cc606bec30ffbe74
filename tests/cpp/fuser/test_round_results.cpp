// Which calls of a plan round what they give, in place of a call of their own.
#include <gtest/gtest.h>

#include "fuser/round_results.h"
#include "toy.h"

namespace transformer_ops {
namespace {

using toy::nodes;
using toy::steps_text;

// As the library does for each of its ops.
[[maybe_unused]] const bool noted = [] {
  for (const char* target : {"norm", "square", "square_backward"}) {
    set_traits(target, {.rounds = true});
  }
  for (const char* target : {"recompute_norm", "recompute_square"}) {
    set_traits(target, {.rounds = true, .reads_first = false});
  }
  return true;
}();

PlanKey key_of(const std::vector<OpNode>& ops, const char* recipe = "mx e4m3, mx e4m3, mx e4m3") {
  PlanKey key = toy::key(ops);
  key.recipe = recipe_of(recipe);
  key.policies.recompute = Recompute::Cheap;
  return key;
}

bool has(const std::vector<OpNode>& ops, const PlanKey& key, const std::string& text) {
  return steps_text(toy::plan(ops, key)).find(text) != std::string::npos;
}

// Does any op round what it gives?
bool rounds(const std::vector<OpNode>& ops, const PlanKey& key) {
  return has(ops, key, ".rounded(") || has(ops, key, ".rounded_by(");
}

// Forward by rows, what backward computes again by columns, and a gradient by both. The reads of g2
// and g4 that only tie a call to backward do not count.
TEST(RoundResults, TheOpThatGivesAValueRoundsIt) {
  const auto ops = nodes({"Norm", "Product", "Square", "Product"});
  EXPECT_EQ(steps_text(toy::plan(ops, key_of(ops))), R"(first_backward 0
recipe mx e4m3, mx e4m3, mx e4m3
forward Norm ops=[0]
  x1, s0.rstd, t1.unused = norm.rounded(x0, 1e-05, "mx e4m3", "")
  save s0.input=x0, s0.rstd=s0.rstd
forward Product ops=[1]
  t1.rounded_weight = quantize_dequantize(p1.weight, "mx e4m3", "float32")
  x2 = product(x1, t1.rounded_weight)
  save s1.weight=p1.weight
forward Square ops=[2]
  x3, t3.unused = square.rounded(x2, "mx e4m3", "")
  save s2.input=x2
forward Product ops=[3]
  t3.rounded_weight = quantize_dequantize(p3.weight, "mx e4m3", "float32")
  x4 = product(x3, t3.rounded_weight)
  save s3.weight=p3.weight
backward Norm ops=[0]
  g0 = norm_backward(g1, s0.input, s0.rstd)
backward Product ops=[1]
  x1, t1.unused = recompute_norm.rounded(g2, s0.input, s0.rstd, "mx e4m3 32x1", "")
  t1.rounded_weight = quantize_dequantize.saved(g2, s1.weight, "mx e4m3 32x1", "float32")
  g1, t1.unused = product_backward(g2, none, t1.rounded_weight, [true, false])
  t1.unused, dp1.weight = product_backward(t1.rounded_grad_output_columns, x1, none, [false, true])
backward Square ops=[2]
  g2, t1.rounded_grad_output_columns = square_backward.rounded(g3, s2.input, "mx e4m3", "mx e4m3 32x1")
backward Product ops=[3]
  x3, t3.unused = recompute_square.rounded(g4, s2.input, "mx e4m3 32x1", "")
  t3.rounded_grad_output = quantize_dequantize(g4, "mx e4m3", "float32")
  t3.rounded_weight = quantize_dequantize.saved(g4, s3.weight, "mx e4m3 32x1", "float32")
  g3, t3.unused = product_backward(t3.rounded_grad_output, none, t3.rounded_weight, [true, false])
  t3.rounded_grad_output_columns = quantize_dequantize(g4, "mx e4m3 32x1", "float32")
  t3.unused, dp3.weight = product_backward(t3.rounded_grad_output_columns, x3, none, [false, true])
)");
}

TEST(RoundResults, AValueThatOthersReadStaysAsItIs) {
  const auto ops = nodes({"Norm", "Product"});
  // Saved, or handed to the caller, or the output itself.
  PlanKey key = key_of(ops);
  EXPECT_TRUE(has(ops, key, " = norm.rounded("));
  key.policies.recompute = Recompute::None;
  EXPECT_FALSE(has(ops, key, ".rounded("));
  const auto forked = nodes({"Norm", "Fork", "Product"});
  EXPECT_FALSE(has(forked, key_of(forked), " = norm.rounded("));
  const auto last = nodes({"Product", "Norm"});
  EXPECT_FALSE(has(last, key_of(last), " = norm.rounded("));
  // The caller's gradient.
  const auto first = nodes({"Square", "Product"});
  EXPECT_FALSE(has(first, key_of(first), " = square_backward.rounded("));
}

TEST(RoundResults, AStepOfTheHostLanguageReadsItsInput) {
  auto ops = nodes({"Norm", "Product"});
  ops.insert(ops.begin() + 1, toy::python_node("Mine"));
  EXPECT_FALSE(has(ops, key_of(ops), " = norm.rounded("));
  ops = nodes({"Product", "Square"});
  ops.insert(ops.begin() + 1, toy::python_node("Mine"));
  EXPECT_FALSE(has(ops, key_of(ops), ".rounded("));
}

TEST(RoundResults, OnlyFormatsOfBlocksInTheDtypeOfTheValue) {
  const auto ops = nodes({"Norm", "Product"});
  for (const char* recipe : {"e4m3, e4m3, e4m3", "nvfp4, nvfp4, nvfp4", "exact, mx e4m3, exact",
                             "e4m3, e4m3, e4m3, delayed 4"}) {
    EXPECT_FALSE(rounds(ops, key_of(ops, recipe))) << recipe;
  }
  EXPECT_TRUE(has(ops, key_of(ops, "e4m3 128x128, exact, exact"), " = norm.rounded("));
  // Numbers of MX are not exact in float16.
  PlanKey key = key_of(ops);
  for (TensorMeta& tensor : key.tensors) tensor.dtype = DType::Float16;
  EXPECT_FALSE(has(ops, key, ".rounded("));
}

// By a scale of the tensor that is known before it. Forward notes the largest magnitude; what
// backward computes again has none.
TEST(RoundResults, ByAScaleThatIsAState) {
  const auto ops = nodes({"Norm", "Product", "Square", "Product"});
  PlanKey key = key_of(ops, "e4m3, e4m3, e5m2, delayed 4");
  for (TensorMeta& tensor : key.tensors) tensor.dtype = DType::BFloat16;
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 0
recipe e4m3, e4m3, e5m2, delayed 4
forward Norm ops=[0]
  x1, s0.rstd, t1.rounded_input_scale, st1.fp8_amax = norm.rounded_by(x0, 1e-05, st1.fp8_scale, 0, "e4m3", true)
  save s0.input=x0, s0.rstd=s0.rstd
forward Product ops=[1]
  t1.rounded_weight, t1.rounded_weight_scale, st1.fp8_amax = quantize_values_scaled(p1.weight, st1.fp8_scale, 1, "e4m3", "bfloat16")
  x2 = product_scaled(x1, t1.rounded_weight, t1.rounded_input_scale, t1.rounded_weight_scale)
  save s1.weight=p1.weight
forward Square ops=[2]
  x3, t3.rounded_input_scale, st3.fp8_amax = square.rounded_by(x2, st3.fp8_scale, 0, "e4m3", true)
  save s2.input=x2
forward Product ops=[3]
  t3.rounded_weight, t3.rounded_weight_scale, st3.fp8_amax = quantize_values_scaled(p3.weight, st3.fp8_scale, 1, "e4m3", "bfloat16")
  x4 = product_scaled(x3, t3.rounded_weight, t3.rounded_input_scale, t3.rounded_weight_scale)
  save s3.weight=p3.weight
backward Norm ops=[0]
  g0 = norm_backward(g1, s0.input, s0.rstd)
backward Product ops=[1]
  x1, t1.rounded_input_scale, t1.unused = recompute_norm.rounded_by(g2, s0.input, s0.rstd, st1.fp8_scale, 0, "e4m3", false)
  t1.rounded_weight, t1.rounded_weight_scale = quantize_values_scaled.saved(g2, s1.weight, st1.fp8_scale, 1, "e4m3", "bfloat16")
  g1, t1.unused = product_backward_scaled(g2, none, t1.rounded_weight, [true, false], t1.rounded_grad_output_scale, t1.rounded_weight_scale)
  t1.unused, dp1.weight = product_backward_scaled(g2, x1, none, [false, true], t1.rounded_grad_output_scale, t1.rounded_input_scale)
backward Square ops=[2]
  g2, t1.rounded_grad_output_scale, st1.fp8_grad_amax = square_backward.rounded_by(g3, s2.input, st1.fp8_scale, 2, "e5m2", true)
backward Product ops=[3]
  x3, t3.rounded_input_scale, t3.unused = recompute_square.rounded_by(g4, s2.input, st3.fp8_scale, 0, "e4m3", false)
  t3.rounded_grad_output, t3.rounded_grad_output_scale, st3.fp8_grad_amax = quantize_values_scaled(g4, st3.fp8_scale, 2, "e5m2", "bfloat16")
  t3.rounded_weight, t3.rounded_weight_scale = quantize_values_scaled.saved(g4, s3.weight, st3.fp8_scale, 1, "e4m3", "bfloat16")
  g3, t3.unused = product_backward_scaled(t3.rounded_grad_output, none, t3.rounded_weight, [true, false], t3.rounded_grad_output_scale, t3.rounded_weight_scale)
  t3.unused, dp3.weight = product_backward_scaled(t3.rounded_grad_output, x3, none, [false, true], t3.rounded_grad_output_scale, t3.rounded_input_scale)
)");
  key.policies.recompute = Recompute::None;
  EXPECT_FALSE(has(ops, key, " = norm.rounded_by("));
}

TEST(RoundResults, OnTheCpuAndInFusedStepsOnly) {
  const auto ops = nodes({"Norm", "Product"});
  PlanKey key = key_of(ops);
  for (const Device device : {Device::Cuda, Device::Other}) {
    key.device = device;
    EXPECT_FALSE(has(ops, key, ".rounded("));
  }
  key.device = Device::Cpu;
  key.decomposed = true;
  EXPECT_FALSE(has(ops, key, ".rounded("));
  key = key_of(ops, "e4m3, e4m3, e5m2, delayed 4");
  for (TensorMeta& tensor : key.tensors) tensor.dtype = DType::BFloat16;
  EXPECT_TRUE(has(ops, key, ".rounded_by("));
  key.device = Device::Cuda;
  EXPECT_FALSE(rounds(ops, key));
}

}  // namespace
}  // namespace transformer_ops
