// Outputs of products that backward recomputes (recompute="products").
#include <gtest/gtest.h>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;
using toy::nodes;
using toy::saved_slots;
using toy::ScopedRule;
using toy::steps_text;

PlanKey products_key(const std::vector<OpNode>& ops) {
  PlanKey key = toy::key(ops);
  key.policies.recompute = Recompute::Products;
  return key;
}

Plan products_plan(const std::vector<OpNode>& ops) { return toy::plan(ops, products_key(ops)); }

bool contains(const Plan& plan, const std::string& part) {
  return to_text(plan).find(part) != std::string::npos;
}

TEST(RecomputeProducts, OneCallForEachProduct) {
  const Plan plan = products_plan(nodes({"Norm", "Product", "Square", "Product"}));
  EXPECT_EQ(steps_text(plan), R"(first_backward 0
forward Norm ops=[0]
  x1, s0.rstd = norm(x0, 1e-05)
  save s0.input=x0, s0.rstd=s0.rstd
forward Product ops=[1]
  x2 = product(x1, p1.weight)
  save s1.weight=p1.weight
forward Square ops=[2]
  x3 = square(x2)
forward Product ops=[3]
  x4 = product(x3, p3.weight)
  save s3.weight=p3.weight
backward Norm ops=[0]
  g0 = norm_backward(g1, s0.input, s0.rstd)
backward Product ops=[1]
  g1, dp1.weight = product_backward(g2, x1, s1.weight, [true, true])
backward Square ops=[2]
  g2 = square_backward(g3, x2)
backward Product ops=[3]
  x1 = recompute_norm(g4, s0.input, s0.rstd)
  x2 = recompute_product(g4, x1, p1.weight)
  x3 = recompute_square(g4, x2)
  g3, dp3.weight = product_backward(g4, x3, s3.weight, [true, true])
)");
  EXPECT_EQ(to_text(parse_plan(to_text(plan))), to_text(plan));
}

TEST(RecomputeProducts, OtherPoliciesSaveOutputsOfProducts) {
  const auto ops = nodes({"Product", "Square"});
  EXPECT_EQ(saved_slots(products_plan(ops)), "s0.input ");
  PlanKey key = products_key(ops);
  key.policies.recompute = Recompute::Cheap;
  EXPECT_EQ(saved_slots(toy::plan(ops, key)), "s0.input s1.input ");
  key.policies.recompute = Recompute::None;
  EXPECT_EQ(saved_slots(toy::plan(ops, key)), "s0.input s1.input ");
}

TEST(RecomputeProducts, AnInputIsNotSavedForIt) {
  const auto ops = nodes({"Product", "Square"});
  PlanKey key = products_key(ops);
  toy::parameter(key, ops, 0).requires_grad = false;
  EXPECT_EQ(saved_slots(toy::plan(ops, key)), "s1.input ");
}

TEST(RecomputeProducts, TheWeightIsCastAsInForward) {
  const auto ops = nodes({"Product", "Square", "Product"});
  PlanKey key = products_key(ops);
  key.autocast = DType::BFloat16;
  const Plan plan = toy::plan(ops, key);
  EXPECT_TRUE(contains(plan, R"(
  t0.weight = cast(p0.weight, "bfloat16")
  x1 = recompute_product(g3, s0.input, t0.weight)
)")) << to_text(plan);
}

TEST(RecomputeProducts, OneTensorOfAListIsCast) {
  const auto ops = nodes({"Blend", "Square"});
  PlanKey key = products_key(ops);
  TensorMeta* const weights = &toy::parameter(key, ops, 0);
  weights[1].dtype = DType::BFloat16;
  const Plan plan = toy::plan(ops, key);
  EXPECT_TRUE(contains(plan, R"(
  t0.weight1 = cast(p0.weight1, "float32")
  x1 = recompute_blend(g2, s0.input, [p0.weight0, t0.weight1, p0.weight2], [p0.shift0..2])
)")) << to_text(plan);
  EXPECT_EQ(to_text(parse_plan(to_text(plan))), to_text(plan));
}

TEST(RecomputeProducts, RoundedOperandsAreNotThereInBackward) {
  const auto ops = nodes({"Product", "Square"});
  PlanKey key = products_key(ops);
  key.recipe = recipe_of("mx e4m3, mx e4m3, mx e4m3");
  EXPECT_EQ(saved_slots(toy::plan(ops, key)), "s0.input s1.input ");
}

TEST(RecomputeProducts, AWeightIsDecodedAgain) {
  const auto ops = nodes({"Product", "Square"});
  PlanKey key = products_key(ops);
  toy::parameter(key, ops, 0).format = NumberFormat::named("mx e4m3");
  const Plan plan = toy::plan(ops, key);
  EXPECT_EQ(saved_slots(plan), "s0.input ");
  EXPECT_TRUE(contains(plan, R"(
  t0.weight = dequantize.saved(g2, p0.weight.codes, p0.weight.scale, "mx e4m3", "float32", none)
  x1 = recompute_product(g2, s0.input, t0.weight)
)")) << to_text(plan);
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
}

TEST(RecomputeProducts, OpsWithoutACallForItAreSaved) {
  EXPECT_EQ(saved_slots(products_plan(nodes({"Tally", "Square"}))), "s0.input s1.input ");
}

// ---- fused forward steps

Rule fused_rule() {
  Rule rule = toy::forward_rule();
  rule.recompute =
      "recompute_product_shift(Tensor grad_output, Tensor input, Tensor weight, "
      "Tensor shift) -> Tensor output";
  rule.recomputed = 1;
  return rule;
}

TEST(RecomputeProducts, OneCallForWhatAFusedStepComputes) {
  const ScopedRule forward(fused_rule());
  const Plan plan = products_plan(nodes({"Norm", "Product", "Shift", "Square"}));
  EXPECT_EQ(saved_slots(plan), "s0.input s0.rstd ");
  EXPECT_TRUE(contains(plan, R"(
  x1 = recompute_norm(g4, s0.input, s0.rstd)
  x3 = recompute_product_shift(g4, x1, p1.weight, p2.shift)
  g3 = square_backward(g4, x3)
)")) << to_text(plan);
  EXPECT_TRUE(contains(plan, "product_shift_square(x1, p1.weight, p2.shift, false)"));
  EXPECT_EQ(to_text(parse_plan(to_text(plan))), to_text(plan));
}

TEST(RecomputeProducts, AFusedCallCastsAllItsParameters) {
  const ScopedRule forward(fused_rule());
  const auto ops = nodes({"Product", "Same", "Shift", "Square"});
  PlanKey key = products_key(ops);
  key.autocast = DType::BFloat16;
  const Plan plan = toy::plan(ops, key);
  EXPECT_TRUE(contains(plan, R"(
  t0.weight = cast(p0.weight, "bfloat16")
  t2.shift = cast(p2.shift, "bfloat16")
  x3 = recompute_product_shift(g4, s0.input, t0.weight, t2.shift)
)")) << to_text(plan);
}

TEST(RecomputeProducts, WhatAFusedStepReadsBesideItIsNotThere) {
  const ScopedRule forward({.name = "product_add",
                            .pass = Pass::Forward,
                            .benefit = 10,
                            .pattern = {{"Product"}, optional_op({"Scale"}), optional_op({"Add"})},
                            .forward = "product_add(Tensor input, Tensor weight, "
                                       "Tensor? extra_input, float factor) -> Tensor output",
                            .bind =
                                [](const Match& match) {
                                  if (match.has(1)) return Bindings();
                                  return Bindings{{"factor", Attribute(1.0)}};
                                },
                            .recompute = "recompute_product_add(Tensor grad_output, Tensor input, "
                                         "Tensor weight, Tensor? extra_input, float factor) -> "
                                         "Tensor output"});
  EXPECT_EQ(saved_slots(products_plan(nodes({"Product", "Add", "Square"}))), "s0.input s2.input ");
  const Plan scaled = products_plan(nodes({"Product", "Scale", "Square"}));
  EXPECT_EQ(saved_slots(scaled), "s0.input ");
  EXPECT_TRUE(contains(scaled, "x2 = recompute_product_add(g3, s0.input, p0.weight, none, 2.0)\n"))
      << to_text(scaled);
}

// The error of a plan whose fused step is recomputed by this schema, with these bindings.
std::string error_with(const std::string& schema, const Bindings& bindings = {}) {
  Rule rule = fused_rule();
  rule.recompute = schema;
  rule.bind = [=](const Match&) {
    Bindings all = bindings;
    all.emplace("kept", Field{2, "input"});
    return all;
  };
  const ScopedRule forward(rule);
  return error_of([] { products_plan(nodes({"Product", "Shift", "Square"})); });
}

TEST(RecomputeProducts, AFusedCallMayNameItsArgumentsOtherwise) {
  Rule rule = fused_rule();
  rule.recompute = "again(Tensor input, Tensor matrix, Tensor row, float factor) -> Tensor output";
  rule.bind = [](const Match&) {
    return Bindings{{"kept", Field{2, "input"}},
                    {"matrix", Field{0, "weight"}},
                    {"row", Field{1, "shift"}},
                    {"factor", Attribute(2.0)}};
  };
  const ScopedRule forward(rule);
  const Plan plan = products_plan(nodes({"Product", "Shift", "Square"}));
  EXPECT_TRUE(contains(plan, "x2 = again(s0.input, p0.weight, p1.shift, 2.0)\n")) << to_text(plan);
}

TEST(RecomputeProducts, EveryArgumentOfAFusedCallMustBeKnown) {
  const std::string weight = "recompute_product_shift(Tensor input, Tensor weight, ";
  EXPECT_EQ(error_with(weight + "Tensor shift) -> Tensor output"), "no error");
  EXPECT_EQ(error_with(weight + "Tensor shifts) -> Tensor output"),
            "[plan] recompute of 'product_shift_square' must bind argument 'shifts'");
  EXPECT_EQ(error_with(weight + "Tensor? shifts) -> Tensor output"),
            "[plan] recompute of 'product_shift_square' must bind argument 'shifts'");
}

TEST(RecomputeProducts, AFusedCallReadsOnlyWhatItsOpsRead) {
  const std::string error =
      "[plan] recompute of 'product_shift_square' must bind 'row' to what an op it covers reads, "
      "got ";
  const std::string schema = "again(Tensor input, Tensor weight, Tensor row) -> Tensor output";
  EXPECT_EQ(error_with(schema, {{"row", Field{1, "none"}}}), error + "'none' of entry 1");
  EXPECT_EQ(error_with(schema, {{"row", Field{1, "input"}}}), error + "'input' of entry 1");
  EXPECT_EQ(error_with(schema, {{"row", Field{2, "input"}}}), error + "'input' of entry 2");
  EXPECT_EQ(error_with(schema, {{"row", Field{3, "shift"}}}), error + "'shift' of entry 3");
}

}  // namespace
}  // namespace transformer_ops
