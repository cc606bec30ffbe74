// Plans under a recipe: what is rounded, and which products take scales beside their operands.
#include <gtest/gtest.h>

#include <array>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::nodes;
using toy::ScopedRule;
using toy::steps_text;

// The rows of each group, and each weight, apart; a sum takes the gradient as it is.
TEST(LowerRecipes, RoundsGroupByGroup) {
  const auto ops = nodes({"Groups"});
  PlanKey key = toy::key(ops);
  key.tensors[1] = {};
  key.recipe = recipe_of("mx e4m3, mx e4m3, mx e4m3");
  const std::string on_cpu = steps_text(toy::plan(ops, key));
  EXPECT_EQ(on_cpu, R"(first_backward 0
recipe mx e4m3, mx e4m3, mx e4m3
forward Groups ops=[0]
  [t0.rounded_input] = quantize_dequantize_groups([x0], e0.splits, "mx e4m3", "float32")
  [t0.rounded_weight] = quantize_dequantize_groups([p0.weight], none, "mx e4m3", "float32")
  x1 = groups(t0.rounded_input, e0.splits, t0.rounded_weight, p0.bias)
  save s0.input=x0, s0.splits=e0.splits, s0.weight=p0.weight
backward Groups ops=[0]
  [t0.rounded_grad_output] = quantize_dequantize_groups([g1], s0.splits, "mx e4m3", "float32")
  [t0.rounded_weight] = quantize_dequantize_groups.saved(g1, [s0.weight], none, "mx e4m3 32x1", "float32")
  g0, t0.unused, t0.unused = groups_backward(t0.rounded_grad_output, none, s0.splits, t0.rounded_weight, [true, false, false])
  [t0.rounded_grad_output_columns] = quantize_dequantize_groups([g1], s0.splits, "mx e4m3 32x1", "float32")
  [t0.rounded_input] = quantize_dequantize_groups.saved(g1, [s0.input], s0.splits, "mx e4m3 32x1", "float32")
  t0.unused, dp0.weight, t0.unused = groups_backward(t0.rounded_grad_output_columns, t0.rounded_input, s0.splits, none, [false, true, false])
  t0.unused, t0.unused, dp0.bias = groups_backward(g1, none, s0.splits, none, [false, false, true])
)");
  // No product of groups takes codes.
  key.device = Device::Cuda;
  EXPECT_EQ(steps_text(toy::plan(ops, key)), on_cpu);
  for (const char* const recipe :
       {"e4m3, e4m3, e5m2", "e4m3 1x128, e4m3 128x128, e4m3 1x128", "e4m3, e4m3, e5m2, delayed 4",
        "nvfp4, nvfp4 16x16, nvfp4, hadamard, stochastic"}) {
    for (TensorMeta& tensor : key.tensors) tensor.dtype = DType::BFloat16;
    key.tensors[1] = {};
    key.recipe = recipe_of(recipe);
    key.device = Device::Cpu;
    const std::string wanted = steps_text(toy::plan(ops, key));
    key.device = Device::Cuda;
    EXPECT_EQ(steps_text(toy::plan(ops, key)), wanted) << recipe;
    EXPECT_EQ(wanted.find("float8"), std::string::npos) << recipe;
  }
}

PlanKey with_recipe(const std::vector<OpNode>& ops, const char* recipe, DType dtype) {
  PlanKey key = toy::key(ops);
  for (TensorMeta& tensor : key.tensors) tensor.dtype = dtype;
  key.recipe = recipe_of(recipe);
  return key;
}

// Values of codes are exact in bfloat16, their scale is not: it goes beside them.
TEST(LowerRecipes, ProductsIn16BitsTakeScalesBesideTheirOperands) {
  const auto ops = nodes({"Product"});
  PlanKey key = with_recipe(ops, "e4m3, e4m3, e5m2", DType::BFloat16);
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 0
recipe e4m3, e4m3, e5m2
forward Product ops=[0]
  t0.rounded_input, t0.rounded_input_scale = quantize_values(x0, "e4m3", "bfloat16")
  t0.rounded_weight, t0.rounded_weight_scale = quantize_values(p0.weight, "e4m3", "bfloat16")
  x1 = product_scaled(t0.rounded_input, t0.rounded_weight, t0.rounded_input_scale, t0.rounded_weight_scale)
  save s0.input=x0, s0.weight=p0.weight
backward Product ops=[0]
  t0.rounded_grad_output, t0.rounded_grad_output_scale = quantize_values(g1, "e5m2", "bfloat16")
  t0.rounded_weight, t0.rounded_weight_scale = quantize_values.saved(g1, s0.weight, "e4m3", "bfloat16")
  g0, t0.unused = product_backward_scaled(t0.rounded_grad_output, none, t0.rounded_weight, [true, false], t0.rounded_grad_output_scale, t0.rounded_weight_scale)
  t0.rounded_input, t0.rounded_input_scale = quantize_values.saved(g1, s0.input, "e4m3", "bfloat16")
  t0.unused, dp0.weight = product_backward_scaled(t0.rounded_grad_output, t0.rounded_input, none, [false, true], t0.rounded_grad_output_scale, t0.rounded_input_scale)
)");
  // Where nobody multiplies by a scale, and in wider dtypes, numbers are rounded as they are.
  key.device = Device::Other;
  EXPECT_EQ(steps_text(toy::plan(ops, key)).find("_scaled"), std::string::npos);
  key = with_recipe(ops, "e4m3, e4m3, e5m2", DType::Float32);
  EXPECT_EQ(steps_text(toy::plan(ops, key)).find("_scaled"), std::string::npos);
}

// A GPU may multiply codes with scales of blocks. Elsewhere they are decoded.
TEST(LowerRecipes, ProductsOnCudaTakeCodesWithScalesOfBlocks) {
  const auto ops = nodes({"Product"});
  const char* const recipe = "e4m3 1x128, e4m3 128x128, e5m2 1x128";
  PlanKey key = with_recipe(ops, recipe, DType::BFloat16);
  EXPECT_EQ(steps_text(toy::plan(ops, key)).find("_scaled"), std::string::npos);
  key.device = Device::Cuda;
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 0
recipe e4m3 1x128, e4m3 128x128, e5m2 1x128
forward Product ops=[0]
  t0.rounded_input, t0.rounded_input_scale = quantize(x0, "e4m3 1x128")
  t0.rounded_weight, t0.rounded_weight_scale = quantize(p0.weight, "e4m3 128x128")
  x1 = product_scaled(t0.rounded_input, t0.rounded_weight, t0.rounded_input_scale, t0.rounded_weight_scale)
  save s0.input=x0, s0.weight=p0.weight
backward Product ops=[0]
  t0.rounded_grad_output, t0.rounded_grad_output_scale = quantize(g1, "e5m2 1x128")
  t0.rounded_weight, t0.rounded_weight_scale = quantize.saved(g1, s0.weight, "e4m3 128x128")
  g0, t0.unused = product_backward_scaled(t0.rounded_grad_output, none, t0.rounded_weight, [true, false], t0.rounded_grad_output_scale, t0.rounded_weight_scale)
  t0.rounded_grad_output_columns, t0.rounded_grad_output_columns_scale = quantize(g1, "e5m2 128x1")
  t0.rounded_input, t0.rounded_input_scale = quantize.saved(g1, s0.input, "e4m3 128x1")
  t0.unused, dp0.weight = product_backward_scaled(t0.rounded_grad_output_columns, t0.rounded_input, none, [false, true], t0.rounded_grad_output_columns_scale, t0.rounded_input_scale)
)");
  const auto has_codes = [&](const char* formats, DType dtype) {
    PlanKey other = with_recipe(ops, formats, dtype);
    other.device = Device::Cuda;
    const std::string text = steps_text(toy::plan(ops, other));
    return std::pair(text.find("= quantize(x0") != std::string::npos,
                     text.find(" = quantize.saved(") != std::string::npos);
  };
  EXPECT_EQ(has_codes(recipe, DType::BFloat16), std::pair(true, true));
  // The gradient decides on backward alone.
  EXPECT_EQ(has_codes("e4m3 1x128, e4m3 1x128, exact", DType::BFloat16), std::pair(true, false));
  EXPECT_EQ(has_codes("mx e4m3, mx e4m3, mx e5m2", DType::BFloat16), std::pair(true, true));
  EXPECT_EQ(has_codes("nvfp4, nvfp4 16x16, exact", DType::BFloat16), std::pair(true, false));
  // Other dtypes, one operand alone, other scales, and what is rounded at random.
  EXPECT_EQ(has_codes(recipe, DType::Float32), std::pair(false, false));
  EXPECT_EQ(has_codes(recipe, DType::Float16), std::pair(false, false));
  for (const char* formats :
       {"e4m3 1x128, exact, e4m3 1x128", "e4m3 1x128, e4m3, e4m3 1x128",
        "mx e4m3, e4m3 128x128, mx e4m3", "nvfp4, mx e4m3, nvfp4", "nvfp4 16x1, nvfp4, nvfp4",
        "e4m3 128x128, e4m3 128x128, e4m3 128x128", "mx e5m2, mx e5m2, mx e5m2"}) {
    EXPECT_EQ(has_codes(formats, DType::BFloat16), std::pair(false, false)) << formats;
  }
  EXPECT_EQ(has_codes("e4m3 1x128, e4m3 128x128, e4m3 1x128, stochastic", DType::BFloat16),
            std::pair(true, false));
}

// Codes of 4 bits are two in a byte: along the sum, by quantize_columns where that is over rows.
TEST(LowerRecipes, ProductsOnCudaTakePairsOfCodes) {
  const auto ops = nodes({"Product"});
  const auto text_of = [&](const char* recipe, DType dtype = DType::BFloat16) {
    PlanKey key = with_recipe(ops, recipe, dtype);
    key.device = Device::Cuda;
    return steps_text(toy::plan(ops, key));
  };
  const std::string whole = "nvfp4, nvfp4 16x16, nvfp4, hadamard, stochastic";
  EXPECT_EQ(text_of(whole.c_str()), "first_backward 0\nrecipe " + whole + R"(
forward Product ops=[0]
  t0.rounded_input, t0.rounded_input_scale = quantize(x0, "nvfp4")
  t0.rounded_weight, t0.rounded_weight_scale = quantize(p0.weight, "nvfp4 16x16")
  x1 = product_scaled(t0.rounded_input, t0.rounded_weight, t0.rounded_input_scale, t0.rounded_weight_scale)
  save s0.input=x0, s0.weight=p0.weight
backward Product ops=[0]
  t0.rounded_grad_output, t0.rounded_grad_output_scale = quantize_stochastic(g1, "nvfp4")
  t0.rounded_weight, t0.rounded_weight_scale = quantize_columns.saved(g1, s0.weight, "nvfp4 16x16")
  g0, t0.unused = product_backward_scaled(t0.rounded_grad_output, none, t0.rounded_weight, [true, false], t0.rounded_grad_output_scale, t0.rounded_weight_scale)
  t0.turned_grad_output = hadamard_columns(g1, g1, none)
  t0.rounded_grad_output_columns, t0.rounded_grad_output_columns_scale = quantize_columns_stochastic(t0.turned_grad_output, "nvfp4 16x1")
  t0.turned_input = hadamard_columns(g1, s0.input, none)
  t0.rounded_input, t0.rounded_input_scale = quantize_columns.saved(g1, t0.turned_input, "nvfp4 16x1")
  t0.unused, dp0.weight = product_backward_scaled(t0.rounded_grad_output_columns, t0.rounded_input, none, [false, true], t0.rounded_grad_output_columns_scale, t0.rounded_input_scale)
)");
  const std::string plain = text_of("nvfp4, nvfp4, nvfp4");
  EXPECT_EQ(plain.find("stochastic"), std::string::npos);
  EXPECT_NE(plain.find("= quantize_columns(g1, \"nvfp4 16x1\")"), std::string::npos);
  EXPECT_NE(plain.find("= quantize_columns.saved(g1, s0.weight, \"nvfp4 16x1\")"),
            std::string::npos);
  const std::string chosen = text_of("nvfp4 4over6, nvfp4 4over6 mse 16x16, nvfp4, hadamard");
  for (const char* call :
       {"quantize(x0, \"nvfp4 4over6\")", "quantize(p0.weight, \"nvfp4 4over6 mse 16x16\")",
        "quantize_columns.saved(g1, s0.weight, \"nvfp4 4over6 mse 16x16\")",
        "quantize_columns.saved(g1, t0.turned_input, \"nvfp4 4over6 16x1\")"}) {
    EXPECT_NE(chosen.find(call), std::string::npos) << call << " in\n" << chosen;
  }
  // With square blocks one rounding of the gradient would serve both products, but each has its
  // own.
  const std::string square = text_of("nvfp4, nvfp4, nvfp4 16x16");
  EXPECT_NE(square.find("= quantize(x0, \"nvfp4\")"), std::string::npos);
  EXPECT_EQ(square.find("quantize_columns"), std::string::npos);
  EXPECT_EQ(text_of(whole.c_str(), DType::Float32).find("quantize_columns"), std::string::npos);
}

// How often a text has each dtype of operands: values, E4M3 and E5M2 codes.
std::array<int, 3> operand_dtypes(const std::vector<OpNode>& ops, PlanKey key) {
  key.device = Device::Cuda;
  const std::string text = steps_text(toy::plan(ops, key));
  const auto count = [&](const std::string& word) {
    int found = 0;
    for (size_t at = 0; (at = text.find(word, at)) != std::string::npos; ++at) ++found;
    return found;
  };
  EXPECT_GT(count("product_scaled("), 0) << text;
  return {count("\"bfloat16\")"), count("\"float8_e4m3fn\")"), count("\"float8_e5m2\")")};
}

TEST(LowerRecipes, ProductsOnCudaTakeCodesWhereOneScaleIsAllThereIs) {
  const auto ops = nodes({"Product"});
  const auto found = [&](const char* recipe) {
    return operand_dtypes(ops, with_recipe(ops, recipe, DType::BFloat16));
  };
  using Counts = std::array<int, 3>;
  EXPECT_EQ(found("e4m3, e4m3, e5m2"), (Counts{0, 4, 1}));
  EXPECT_EQ(found("e4m3, e4m3, e5m2, delayed 4"), (Counts{0, 4, 1}));
  // No codes of both operands.
  EXPECT_EQ(found("e4m3, e4m3, exact"), (Counts{2, 2, 0}));
  EXPECT_EQ(found("e4m3, exact, e4m3"), (Counts{3, 0, 0}));
  EXPECT_EQ(found("e4m3, mx e4m3, e4m3"), (Counts{5, 0, 0}));
  EXPECT_EQ(found("nvfp4, e4m3, nvfp4"), (Counts{6, 0, 0}));
  EXPECT_EQ(found("nvfp4, nvfp4, nvfp4 16x16"), (Counts{3, 0, 0}));
  EXPECT_EQ(found("e4m3, e4m3, e4m3, stochastic"), (Counts{3, 2, 0}));
}

TEST(LowerRecipes, AnOperandWithoutAScaleHasNoneBesideIt) {
  const auto ops = nodes({"Product"});
  const std::string text =
      steps_text(toy::plan(ops, with_recipe(ops, "mx e4m3, e4m3, exact", DType::BFloat16)));
  EXPECT_NE(text.find("x1 = product_scaled(t0.rounded_input, t0.rounded_weight, none, "
                      "t0.rounded_weight_scale)"),
            std::string::npos);
  EXPECT_NE(text.find("t0.unused, dp0.weight = product_backward(g1, t0.rounded_input, none, "
                      "[false, true])"),
            std::string::npos);
}

TEST(LowerRecipes, FusedOpsWithoutAFormForScalesAreRefused) {
  const auto ops = nodes({"Product", "Shift", "Square"});
  const ScopedRule rule(toy::forward_rule());
  const auto planned = [&](const char* recipe) {
    return make_plan(ops, with_recipe(ops, recipe, DType::BFloat16));
  };
  EXPECT_EQ(planned("mx e4m3, mx e4m3, mx e4m3").plan.forward.size(), 1);
  const Planned refused = planned("e4m3, e4m3, e4m3");
  EXPECT_EQ(refused.plan.forward.size(), 3);
  ASSERT_EQ(refused.near_misses.size(), 1);
  EXPECT_EQ(refused.near_misses[0].reason, "op 0 takes operands with a scale beside them");
}

}  // namespace
}  // namespace transformer_ops
