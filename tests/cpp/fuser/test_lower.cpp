// Small plans as text: what is called, what is saved, where dtypes change.
#include <gtest/gtest.h>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;
using toy::nodes;
using toy::ScopedRule;
using toy::ScopedUserFusion;
using toy::steps_text;

TEST(Lower, BindsFieldsByName) {
  EXPECT_EQ(to_text(toy::plan(nodes({"Norm", "Product", "Shift", "Scale"}))), R"(plan 4
op 0 Norm training=true eps=1e-05
op 1 Product training=true
op 2 Shift training=true
op 3 Scale training=true factor=2.0
parameters p1.weight p2.shift
gradients g0 dp1.weight dp2.shift
first_backward 0
forward Norm ops=[0]
  x1, s0.rstd = norm(x0, 1e-05)
  save s0.input=x0, s0.rstd=s0.rstd
forward Product ops=[1]
  x2 = product(x1, p1.weight)
  save s1.input=x1, s1.weight=p1.weight
forward Shift ops=[2]
  x3 = shift(x2, p2.shift)
forward Scale ops=[3]
  x4 = scale(x3, 2.0)
backward Norm ops=[0]
  g0 = norm_backward(g1, s0.input, s0.rstd)
backward Product ops=[1]
  g1, dp1.weight = product_backward(g2, s1.input, s1.weight, [true, true])
backward Shift ops=[2]
  g2 = g3
  dp2.shift = shift_backward(g3)
backward Scale ops=[3]
  g3 = scale(g4, 2.0)
)");
}

std::vector<OpNode> tally(bool tallies) {
  auto ops = nodes({"Tally"});
  ops[0].attributes["tallies"] = Attribute(tallies);
  return ops;
}

TEST(Lower, AStateTakesTheGradient) {
  const Plan plan = toy::plan(tally(true));
  EXPECT_EQ(plan.backward[0].instructions[0].results, (std::vector<Result>{
                                                          Value{Value::Kind::Grad, 0},
                                                          Value{Value::Kind::State, 0, "total"},
                                                      }));
  // Autograd is given something in its place.
  EXPECT_EQ(to_text(plan.gradients[1]), "dp0.weight");
  EXPECT_EQ(
      to_text(std::get<Value>(toy::plan(tally(false)).backward[0].instructions[0].results[1])),
      "dp0.weight");
}

// The rows of each group, and each weight, apart; a sum takes the gradient as it is.
TEST(Lower, RoundsGroupByGroup) {
  const auto ops = nodes({"Groups"});
  PlanKey key = toy::key(ops);
  key.tensors[1] = {};
  key.recipe = recipe_of("mx e4m3, mx e4m3, mx e4m3");
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 0
recipe mx e4m3, mx e4m3, mx e4m3
forward Groups ops=[0]
  [t0.rounded_input] = quantize_dequantize_groups([x0], e0.splits, "mx e4m3", "float32")
  [t0.rounded_weight] = quantize_dequantize_groups([p0.weight], none, "mx e4m3", "float32")
  x1 = groups(t0.rounded_input, e0.splits, t0.rounded_weight, p0.bias)
  save s0.input=x0, s0.splits=e0.splits, s0.weight=p0.weight
backward Groups ops=[0]
  [t0.rounded_grad_output] = quantize_dequantize_groups([g1], s0.splits, "mx e4m3", "float32")
  [t0.rounded_weight] = quantize_dequantize_groups_saved(g1, [s0.weight], none, "mx e4m3 32x1", "float32")
  g0, t0.unused, t0.unused = groups_backward(t0.rounded_grad_output, none, s0.splits, t0.rounded_weight, [true, false, false])
  [t0.rounded_grad_output_columns] = quantize_dequantize_groups([g1], s0.splits, "mx e4m3 32x1", "float32")
  [t0.rounded_input] = quantize_dequantize_groups_saved(g1, [s0.input], s0.splits, "mx e4m3 32x1", "float32")
  t0.unused, dp0.weight, t0.unused = groups_backward(t0.rounded_grad_output_columns, t0.rounded_input, s0.splits, none, [false, true, false])
  t0.unused, t0.unused, dp0.bias = groups_backward(g1, none, s0.splits, none, [false, false, true])
)");
  key.device = Device::Cuda;
  EXPECT_EQ(error_of([&] { toy::plan(ops, key); }),
            "[Groups] recipe must be exact on CUDA, where the host does not know which rows are of "
            "one group, got mx e4m3, mx e4m3, mx e4m3");
}

PlanKey with_recipe(const std::vector<OpNode>& ops, const char* recipe, DType dtype) {
  PlanKey key = toy::key(ops);
  for (TensorMeta& tensor : key.tensors) tensor.dtype = dtype;
  key.recipe = recipe_of(recipe);
  return key;
}

// Values of codes are exact in bfloat16, their scale is not: it goes beside them.
TEST(Lower, ProductsIn16BitsTakeScalesBesideTheirOperands) {
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
  t0.rounded_weight, t0.rounded_weight_scale = quantize_values_saved(g1, s0.weight, "e4m3", "bfloat16")
  g0, t0.unused = product_backward_scaled(t0.rounded_grad_output, none, t0.rounded_weight, [true, false], t0.rounded_grad_output_scale, t0.rounded_weight_scale)
  t0.rounded_input, t0.rounded_input_scale = quantize_values_saved(g1, s0.input, "e4m3", "bfloat16")
  t0.unused, dp0.weight = product_backward_scaled(t0.rounded_grad_output, t0.rounded_input, none, [false, true], t0.rounded_grad_output_scale, t0.rounded_input_scale)
)");
  // Where nobody multiplies by a scale, and in wider dtypes, numbers are rounded as they are.
  key.device = Device::Other;
  EXPECT_EQ(steps_text(toy::plan(ops, key)).find("_scaled"), std::string::npos);
  key = with_recipe(ops, "e4m3, e4m3, e5m2", DType::Float32);
  EXPECT_EQ(steps_text(toy::plan(ops, key)).find("_scaled"), std::string::npos);
}

// A GPU may multiply codes with scales of blocks. Elsewhere they are decoded.
TEST(Lower, ProductsOnCudaTakeCodesWithScalesOfBlocks) {
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
  t0.rounded_weight, t0.rounded_weight_scale = quantize_saved(g1, s0.weight, "e4m3 128x128")
  g0, t0.unused = product_backward_scaled(t0.rounded_grad_output, none, t0.rounded_weight, [true, false], t0.rounded_grad_output_scale, t0.rounded_weight_scale)
  t0.rounded_grad_output_columns, t0.rounded_grad_output_columns_scale = quantize(g1, "e5m2 128x1")
  t0.rounded_input, t0.rounded_input_scale = quantize_saved(g1, s0.input, "e4m3 128x1")
  t0.unused, dp0.weight = product_backward_scaled(t0.rounded_grad_output_columns, t0.rounded_input, none, [false, true], t0.rounded_grad_output_columns_scale, t0.rounded_input_scale)
)");
  const auto has_codes = [&](const char* formats, DType dtype) {
    PlanKey other = with_recipe(ops, formats, dtype);
    other.device = Device::Cuda;
    const std::string text = steps_text(toy::plan(ops, other));
    return std::pair(text.find("= quantize(x0") != std::string::npos,
                     text.find(" = quantize_saved(") != std::string::npos);
  };
  EXPECT_EQ(has_codes(recipe, DType::BFloat16), std::pair(true, true));
  // The gradient decides on backward alone.
  EXPECT_EQ(has_codes("e4m3 1x128, e4m3 1x128, exact", DType::BFloat16), std::pair(true, false));
  EXPECT_EQ(has_codes("mx e4m3, mx e4m3, mx e5m2", DType::BFloat16), std::pair(true, true));
  // Other dtypes, one operand alone, other scales, and what is rounded at random.
  EXPECT_EQ(has_codes(recipe, DType::Float32), std::pair(false, false));
  EXPECT_EQ(has_codes(recipe, DType::Float16), std::pair(false, false));
  for (const char* formats : {"e4m3 1x128, exact, e4m3 1x128", "e4m3 1x128, e4m3, e4m3 1x128",
                              "mx e4m3, e4m3 128x128, mx e4m3", "nvfp4, nvfp4, nvfp4"}) {
    EXPECT_EQ(has_codes(formats, DType::BFloat16), std::pair(false, false)) << formats;
  }
  EXPECT_EQ(has_codes("e4m3 1x128, e4m3 128x128, e4m3 1x128, stochastic", DType::BFloat16),
            std::pair(true, false));
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

TEST(Lower, ProductsOnCudaTakeCodesWhereOneScaleIsAllThereIs) {
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
  EXPECT_EQ(found("nvfp4, nvfp4 16x16, nvfp4"), (Counts{6, 0, 0}));
  EXPECT_EQ(found("e4m3, e4m3, e4m3, stochastic"), (Counts{3, 2, 0}));
}

TEST(Lower, AnOperandWithoutAScaleHasNoneBesideIt) {
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

TEST(Lower, FusedOpsWithoutAFormForScalesAreRefused) {
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

TEST(Lower, SavesNothingWithoutGradients) {
  const auto ops = nodes({"Norm", "Product"});
  EXPECT_EQ(steps_text(toy::plan(ops, toy::key(ops, /*grad=*/false))), R"(first_backward 2
forward Norm ops=[0]
  x1, s0.rstd = norm(x0, 1e-05)
forward Product ops=[1]
  x2 = product(x1, p1.weight)
backward Norm ops=[0] skipped=true
backward Product ops=[1] skipped=true
)");
}

TEST(Lower, SkipsWhatLiesBeforeTheFirstGradient) {
  const auto ops = nodes({"Square", "Product", "Square"});
  PlanKey key = toy::key(ops);
  key.tensors[0].requires_grad = false;
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 1
forward Square ops=[0]
  x1 = square(x0)
forward Product ops=[1]
  x2 = product(x1, p1.weight)
  save s1.input=x1
forward Square ops=[2]
  x3 = square(x2)
  save s2.input=x2
backward Square ops=[0] skipped=true
backward Product ops=[1]
  t1.unused, dp1.weight = product_backward(g2, s1.input, none, [false, true])
backward Square ops=[2]
  g2 = square_backward(g3, s2.input)
)");
}

TEST(Lower, SavesOnlyWhatAWantedGradientReads) {
  const auto ops = nodes({"Product"});
  PlanKey key = toy::key(ops);
  toy::parameter(key, ops, 0).requires_grad = false;
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 0
forward Product ops=[0]
  x1 = product(x0, p0.weight)
  save s0.weight=p0.weight
backward Product ops=[0]
  g0, t0.unused = product_backward(g1, none, s0.weight, [true, false])
)");
}

TEST(Lower, DoesNotCallABackwardNobodyWants) {
  const auto ops = nodes({"Product", "Shift"});
  PlanKey key = toy::key(ops);
  toy::parameter(key, ops, 1).requires_grad = false;
  EXPECT_EQ(steps_text(toy::plan(ops, key)).find("shift_backward"), std::string::npos);
}

// ---- ops that hand on, switches, shapes

TEST(Lower, HandsOnWhereThereIsNoSchema) {
  EXPECT_EQ(steps_text(toy::plan(nodes({"Same"}))), R"(first_backward 0
forward Same ops=[0]
  x1 = x0
backward Same ops=[0]
  g0 = g1
)");
}

TEST(Lower, TellsForwardWhetherASlotIsNeeded) {
  const auto ops = nodes({"Mask"});
  EXPECT_EQ(steps_text(toy::plan(ops)), R"(first_backward 0
forward Mask ops=[0]
  x1, s0.mask = mask(x0, true)
  save s0.mask=s0.mask
backward Mask ops=[0]
  g0 = mask_backward(g1, s0.mask)
)");
  const std::string without = steps_text(toy::plan(ops, toy::key(ops, /*grad=*/false)));
  EXPECT_NE(without.find("mask(x0, false)"), std::string::npos) << without;
}

TEST(Lower, HandsOnWhereTheOpIsInactive) {
  const auto ops = nodes({"Mask"});
  PlanKey key = toy::key(ops);
  key.training[0] = false;
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 0
forward Mask ops=[0]
  x1 = x0
backward Mask ops=[0]
  g0 = g1
)");
}

TEST(Lower, PassesTheShapeOfTheInput) {
  EXPECT_EQ(steps_text(toy::plan(nodes({"Same", "View"}))), R"(first_backward 0
forward Same ops=[0]
  x1 = x0
forward View ops=[1]
  x2 = aten::reshape(x1, [-1, 4])
backward Same ops=[0]
  g0 = g1
backward View ops=[1]
  g1 = aten::reshape(g2, n1)
)");
}

// ---- extra tensors

TEST(Lower, TakesExtraTensorsFromTheCaller) {
  EXPECT_EQ(to_text(toy::plan(nodes({"Fork", "Add"}))), R"(plan 4
op 0 Fork training=true
op 1 Add training=true
inputs e1.extra_input
outputs o0.extra_output
gradients g0 de1.extra_input
first_backward 0
forward Fork ops=[0]
  x1, o0.extra_output = x0
forward Add ops=[1]
  x2 = add(x1, e1.extra_input)
backward Fork ops=[0]
  g0 = fork_backward(g1, do0.extra_output)
backward Add ops=[1]
  g1, de1.extra_input = g2
)");
}

TEST(Lower, RoutesAChannel) {
  auto ops = nodes({"Fork", "Square", "Add"});
  toy::connect(ops, 0, 2);
  EXPECT_EQ(to_text(toy::plan(ops)), R"(plan 4
op 0 Fork training=true
op 1 Square training=true
op 2 Add training=true
route e2.extra_input=o0.extra_output
gradients g0
first_backward 0
forward Fork ops=[0]
  x1, o0.extra_output = x0
forward Square ops=[1]
  x2 = square(x1)
  save s1.input=x1
forward Add ops=[2]
  x3 = add(x2, o0.extra_output)
backward Fork ops=[0]
  g0 = fork_backward(g1, do0.extra_output)
backward Square ops=[1]
  g1 = square_backward(g2, s1.input)
backward Add ops=[2]
  g2, do0.extra_output = g3
)");
}

PlanKey pick_key(const std::vector<OpNode>& ops) {
  PlanKey key = toy::key(ops);
  key.tensors[2] = {.dtype = DType::Unknown};
  return key;
}

TEST(Lower, TakesTensorsByName) {
  const auto ops = nodes({"Pick"});
  EXPECT_EQ(to_text(toy::plan(ops, pick_key(ops))), R"(plan 4
op 0 Pick training=true
inputs e0.rows e0.ids
parameters p0.table
gradients g0 de0.rows dp0.table
first_backward 0
forward Pick ops=[0]
  x1 = pick(x0, e0.rows, e0.ids, p0.table)
  save s0.ids=e0.ids
backward Pick ops=[0]
  g0 = g1
  de0.rows, dp0.table = pick_backward(g1, s0.ids, [true, true])
)");
}

TEST(Lower, LeavesOutWhatIsNone) {
  const auto ops = nodes({"Pick"});
  PlanKey key = pick_key(ops);
  key.tensors[1] = key.tensors[3] = {.is_absent = true};
  EXPECT_EQ(to_text(toy::plan(ops, key)), R"(plan 4
op 0 Pick training=true
inputs e0.ids
gradients g0
first_backward 0
forward Pick ops=[0]
  x1 = pick(x0, none, e0.ids, none)
backward Pick ops=[0]
  g0 = g1
)");
}

TEST(Lower, RefusesTensorsThatDoNotFitTheirNames) {
  const auto ops = nodes({"Pick"});
  PlanKey key = pick_key(ops);
  key.tensors[2].dtype = DType::Float32;
  EXPECT_EQ(error_of([&] { toy::plan(ops, key); }), "[Pick] ids must hold integers, got float32");
  key.tensors[2] = {.is_absent = true};
  EXPECT_EQ(error_of([&] { toy::plan(ops, key); }), "[Pick] ids must be a tensor, got None");
  const auto product = nodes({"Product"});
  key = toy::key(product);
  key.tensors[1] = {.is_absent = true};
  EXPECT_EQ(error_of([&] { toy::plan(product, key); }),
            "[Product] weight must be a tensor, got None");
}

TEST(Lower, RoutesIntegersWithoutGradients) {
  auto ops = nodes({"Router", "Pick"});
  ops[0].visible = {false, false};
  ops[1].sources = {OpNode::Source{0, 0}, OpNode::Source{0, 1}};
  EXPECT_EQ(to_text(toy::plan(ops)), R"(plan 4
op 0 Router training=true
op 1 Pick training=true
parameters p1.table
route e1.rows=o0.weights e1.ids=o0.chosen
gradients g0 dp1.table
first_backward 0
forward Router ops=[0]
  x1, o0.weights, o0.chosen = route(x0)
  save s0.input=x0
forward Pick ops=[1]
  x2 = pick(x1, o0.weights, o0.chosen, p1.table)
  save s1.ids=o0.chosen
backward Router ops=[0]
  g0 = route_backward(g1, do0.weights, s0.input)
backward Pick ops=[1]
  g1 = g2
  do0.weights, dp1.table = pick_backward(g2, s1.ids, [true, true])
)");
}

TEST(Lower, GivesNoGradientOfAnOutputNobodyReads) {
  auto ops = nodes({"Router"});
  ops[0].visible = {false, true};
  EXPECT_EQ(steps_text(toy::plan(ops)), R"(first_backward 0
forward Router ops=[0]
  x1, o0.weights, o0.chosen = route(x0)
  save s0.input=x0
backward Router ops=[0]
  g0 = route_backward(g1, none, s0.input)
)");
}

TEST(Lower, HandsOnTheGradientOfAnOutputNobodyReads) {
  auto ops = nodes({"Fork"});
  ops[0].visible[0] = false;
  EXPECT_EQ(steps_text(toy::plan(ops)), R"(first_backward 0
forward Fork ops=[0]
  x1, o0.extra_output = x0
backward Fork ops=[0]
  g0 = g1
)");
}

// ---- dtypes

TEST(Lower, CastsTheInputOfAProductAndItsGradientBack) {
  const auto ops = nodes({"Product", "Square"});
  PlanKey key = toy::key(ops);
  key.tensors[0].dtype = DType::BFloat16;
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 0
forward Product ops=[0]
  t0.input = cast(x0, "float32")
  x1 = product(t0.input, p0.weight)
  save s0.input=t0.input, s0.weight=p0.weight
forward Square ops=[1]
  x2 = square(x1)
  save s1.input=x1
backward Product ops=[0]
  t0.grad_input, dp0.weight = product_backward(g1, s0.input, s0.weight, [true, true])
  g0 = cast(t0.grad_input, "bfloat16")
backward Square ops=[1]
  g1 = square_backward(g2, s1.input)
)");
}

TEST(Lower, CastsInputAndParametersUnderAutocast) {
  const auto ops = nodes({"Square", "Product", "Shift"});
  PlanKey key = toy::key(ops);
  key.autocast = DType::BFloat16;
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 0
autocast bfloat16
forward Square ops=[0]
  t0.input = cast(x0, "bfloat16")
  x1 = square(t0.input)
  save s0.input=t0.input
forward Product ops=[1]
  t1.weight = cast(p1.weight, "bfloat16")
  x2 = product(x1, t1.weight)
  save s1.input=x1, s1.weight=p1.weight
forward Shift ops=[2]
  x3 = shift(x2, p2.shift)
backward Square ops=[0]
  t0.grad_input = square_backward(g1, s0.input)
  g0 = cast(t0.grad_input, "float32")
backward Product ops=[1]
  t1.weight = cast(s1.weight, "bfloat16")
  g1, dp1.weight = product_backward(g2, s1.input, t1.weight, [true, true])
backward Shift ops=[2]
  g2 = g3
  dp2.shift = shift_backward(g3)
)");
}

TEST(Lower, AutocastLeavesFloat64Alone) {
  const auto ops = nodes({"Square"});
  PlanKey key = toy::key(ops);
  key.tensors[0].dtype = DType::Float64;
  key.autocast = DType::BFloat16;
  EXPECT_EQ(steps_text(toy::plan(ops, key)).find("cast("), std::string::npos);
}

TEST(Lower, PromotesWithAnExtraInput) {
  const auto ops = nodes({"Add", "Square"});
  PlanKey key = toy::key(ops);
  key.tensors[0].dtype = DType::BFloat16;
  key.tensors[1].dtype = DType::Float32;
  EXPECT_EQ(steps_text(toy::plan(ops, key)), R"(first_backward 0
forward Add ops=[0]
  x1 = add(x0, e0.extra_input)
forward Square ops=[1]
  x2 = square(x1)
  save s1.input=x1
backward Add ops=[0]
  t0.grad_input, de0.extra_input = g1
  g0 = cast(t0.grad_input, "bfloat16")
backward Square ops=[1]
  g1 = square_backward(g2, s1.input)
)");
}

// ---- fused ops

TEST(Lower, ForwardFusionSavesTheSlotsOfItsOps) {
  const ScopedRule rule(toy::forward_rule());
  EXPECT_EQ(steps_text(toy::plan(nodes({"Product", "Shift", "Square"}))), R"(first_backward 0
forward product_shift_square ops=[0, 1, 2]
  x3, s2.input = product_shift_square(x0, p0.weight, p1.shift, true)
  save s0.input=x0, s0.weight=p0.weight, s2.input=s2.input
backward Product ops=[0]
  g0, dp0.weight = product_backward(g1, s0.input, s0.weight, [true, true])
backward Shift ops=[1]
  g1 = g2
  dp1.shift = shift_backward(g2)
backward Square ops=[2]
  g2 = square_backward(g3, s2.input)
)");
}

// One tensor: the extra output of Fork, and what Norm keeps.
TEST(Lower, ForwardFusionHandsOutWhatASlotHolds) {
  const ScopedRule rule({.name = "add_fork_norm",
                         .pass = Pass::Forward,
                         .benefit = 10,
                         .pattern = {{"Add"}, {"Fork"}, {"Norm"}},
                         .forward = "add_norm(Tensor input, Tensor extra_input, float eps, "
                                    "bool save_sum) -> (Tensor output, Tensor sum, Tensor rstd)",
                         .bind = [](const Match&) {
                           return Bindings{{"sum", Field{1, "extra_output"}},
                                           {"save_sum", Attribute(true)},
                                           {"rstd", Field{2, "rstd"}}};
                         }});
  const Plan plan = toy::plan(nodes({"Add", "Fork", "Norm"}));
  EXPECT_EQ(steps_text(plan), R"(first_backward 0
forward add_fork_norm ops=[0, 1, 2]
  x3, o1.extra_output, s2.rstd = add_norm(x0, e0.extra_input, 1e-05, true)
  save s2.input=o1.extra_output, s2.rstd=s2.rstd
backward Add ops=[0]
  g0, de0.extra_input = g1
backward Fork ops=[1]
  g1 = fork_backward(g2, do1.extra_output)
backward Norm ops=[2]
  g2 = norm_backward(g3, s2.input, s2.rstd)
)");
  EXPECT_EQ(to_text(parse_plan(to_text(plan))), to_text(plan));
  // An idle op between them hands it on.
  const Plan idle = toy::plan(nodes({"Add", "Fork", "Same", "Norm"}));
  EXPECT_EQ(idle.forward.front().saves.front().source,
            (Value{Value::Kind::ExtraOutput, 1, "extra_output"}));
}

TEST(Lower, BackwardFusionReadsTheSlotsOfItsOps) {
  const ScopedRule rule(toy::backward_rule());
  EXPECT_EQ(steps_text(toy::plan(nodes({"Shift", "Square"}))), R"(first_backward 0
forward Shift ops=[0]
  x1 = shift(x0, p0.shift)
forward Square ops=[1]
  x2 = square(x1)
  save s1.input=x1
backward square_shift ops=[0, 1]
  g0, dp0.shift = square_shift_backward(g2, s1.input)
)");
}

TEST(Lower, ForwardAndBackwardFusionMeetInTheSlots) {
  const ScopedRule forward(toy::forward_rule()), backward(toy::backward_rule());
  EXPECT_EQ(steps_text(toy::plan(nodes({"Product", "Shift", "Square"}))), R"(first_backward 0
forward product_shift_square ops=[0, 1, 2]
  x3, s2.input = product_shift_square(x0, p0.weight, p1.shift, true)
  save s0.input=x0, s0.weight=p0.weight, s2.input=s2.input
backward Product ops=[0]
  g0, dp0.weight = product_backward(g1, s0.input, s0.weight, [true, true])
backward square_shift ops=[1, 2]
  g1, dp1.shift = square_shift_backward(g3, s2.input)
)");
}

TEST(Lower, JointFusionKeepsWhatItLikes) {
  const ScopedRule rule(toy::joint_rule());
  EXPECT_EQ(steps_text(toy::plan(nodes({"Square", "Product"}))), R"(first_backward 0
forward square_product ops=[0, 1] joint=true
  x2, s1.input = square_product(x0, p1.weight)
  save s1.input=s1.input, s1.weight=p1.weight
backward square_product ops=[0, 1] joint=true
  g0, dp1.weight = square_product_backward(g2, s1.input, s1.weight, [true, true])
)");
}

// ---- rules with optional ops, and ops that do nothing

// Product, [Shift], [Scale], [Add], and the same backward without Add.
Rule epilogue(Pass pass) {
  return {.name = "epilogue",
          .pass = pass,
          .benefit = 10,
          .pattern = {{"Product"},
                      optional_op({"Shift"}),
                      optional_op({"Scale"}),
                      optional_op({pass == Pass::Forward ? "Add" : "Fork"})},
          .forward =
              "epilogue(Tensor input, Tensor weight, Tensor? shift, Tensor? extra_input, "
              "float factor) -> Tensor output",
          .backward =
              "epilogue_backward(Tensor grad_output, Tensor? grad_extra_output, "
              "Tensor? input, Tensor? weight, float factor, bool[3] output_mask) -> "
              "(Tensor grad_input, Tensor grad_weight, Tensor grad_shift)",
          .bind = [](const Match& match) {
            return match.has(2) ? Bindings() : Bindings{{"factor", Attribute(1.0)}};
          }};
}

TEST(Lower, AnAbsentOpGivesNone) {
  const ScopedRule forward(epilogue(Pass::Forward)), backward(epilogue(Pass::Backward));
  EXPECT_EQ(steps_text(toy::plan(nodes({"Product", "Scale"}))), R"(first_backward 0
forward epilogue ops=[0, 1]
  x2 = epilogue(x0, p0.weight, none, none, 2.0)
  save s0.input=x0, s0.weight=p0.weight
backward epilogue ops=[0, 1]
  g0, dp0.weight, t0.unused = epilogue_backward(g2, none, s0.input, s0.weight, 2.0, [true, true, false])
)");
  EXPECT_EQ(steps_text(toy::plan(nodes({"Product", "Shift", "Fork"}))), R"(first_backward 0
forward epilogue ops=[0, 1]
  x2 = epilogue(x0, p0.weight, p1.shift, none, 1.0)
  save s0.input=x0, s0.weight=p0.weight
forward Fork ops=[2]
  x3, o2.extra_output = x2
backward epilogue ops=[0, 1, 2]
  g0, dp0.weight, dp1.shift = epilogue_backward(g3, do2.extra_output, s0.input, s0.weight, 1.0, [true, true, true])
)");
}

TEST(Lower, AStepCoversTheIdleOpsInIt) {
  const ScopedRule forward(toy::forward_rule()), backward(toy::backward_rule());
  const auto ops = nodes({"Product", "Same", "Shift", "Mask", "Square"});
  PlanKey key = toy::key(ops);
  key.training.assign(ops.size(), false);
  const Plan plan = toy::plan(ops, key);
  EXPECT_EQ(steps_text(plan), R"(first_backward 0
forward product_shift_square ops=[0, 1, 2, 3, 4]
  x5, s4.input = product_shift_square(x0, p0.weight, p2.shift, true)
  save s0.input=x0, s0.weight=p0.weight, s4.input=s4.input
backward Product ops=[0]
  g0, dp0.weight = product_backward(g1, s0.input, s0.weight, [true, true])
backward Same ops=[1]
  g1 = g2
backward square_shift ops=[2, 3, 4]
  g2, dp2.shift = square_shift_backward(g5, s4.input)
)");
  EXPECT_EQ(to_text(parse_plan(to_text(plan))), to_text(plan));
  key.training.assign(ops.size(), true);
  EXPECT_EQ(toy::plan(ops, key).forward.size(), ops.size());
}

TEST(Lower, AnArgumentOfAnAbsentOpMustBeOptional) {
  Rule rule = epilogue(Pass::Forward);
  rule.bind = nullptr;
  const ScopedRule scoped(rule);
  EXPECT_EQ(error_of([] {
              toy::plan(nodes({"Product", "Shift"}));
            }),
            "[plan] 'epilogue' must bind argument 'factor'");
}

TEST(Lower, FusedOpMustBindEveryArgument) {
  Rule rule = toy::backward_rule();
  rule.bind = nullptr;
  const ScopedRule scoped(rule);
  EXPECT_EQ(error_of([] {
              toy::plan(nodes({"Shift", "Square"}));
            }),
            "[plan] 'square_shift' must bind argument 'kept'");
}

TEST(Lower, FusedForwardThatFillsNoSlotIsAnError) {
  Rule rule = toy::forward_rule();
  rule.forward =
      "product_shift_square(Tensor input, Tensor weight, Tensor shift) -> "
      "Tensor output";
  const ScopedRule scoped(rule);
  EXPECT_EQ(error_of([] {
              toy::plan(nodes({"Product", "Shift", "Square"}));
            }),
            "[plan] backward step 'Square' must read a slot that forward saves, got s2.input");
}

// ---- Python steps

TEST(Lower, PythonOpHasNoInstructions) {
  auto ops = nodes({"Square"});
  ops.push_back(toy::python_node("Custom", /*parameters=*/2));
  EXPECT_EQ(to_text(toy::plan(ops)), R"(plan 4
op 0 Square training=true
op 1 Custom native=false training=true
parameters p1.0 p1.1
gradients g0 dp1.0 dp1.1
first_backward 0
forward Square ops=[0]
  x1 = square(x0)
  save s0.input=x0
forward Custom ops=[1] python=1
backward Square ops=[0]
  g0 = square_backward(g1, s0.input)
backward Custom ops=[1] python=1
)");
}

TEST(Lower, PythonBackwardGetsEverySlotOfItsOps) {
  const ScopedUserFusion user("user", Pass::Backward);
  const auto ops = nodes({"Norm", "Product"});
  const Planned planned =
      make_plan(ops, toy::key(ops),
                [](const Fusion&, const std::vector<StepGroup>&) -> std::vector<StepGroup> {
                  return {{.first = 0, .count = 2, .python = 2, .name = "Mine"}};
                });
  EXPECT_EQ(steps_text(planned.plan), R"(first_backward 0
forward Norm ops=[0]
  x1, s0.rstd = norm(x0, 1e-05)
  save s0.input=x0, s0.rstd=s0.rstd
forward Product ops=[1]
  x2 = product(x1, p1.weight)
  save s1.input=x1, s1.weight=p1.weight
backward Mine ops=[0, 1] python=2
)");
}

TEST(Lower, IsTheSameEveryTime) {
  const ScopedRule forward(toy::forward_rule()), joint(toy::joint_rule());
  const auto ops = nodes({"Square", "Product", "Shift", "Square", "Product", "Shift", "Square"});
  EXPECT_EQ(to_text(toy::plan(ops)), to_text(toy::plan(ops)));
}

}  // namespace
}  // namespace transformer_ops
