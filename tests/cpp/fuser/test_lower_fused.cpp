// Plans with fused ops: which slots they fill and read, absent ops, ops that do nothing.
#include <gtest/gtest.h>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;
using toy::nodes;
using toy::ScopedRule;
using toy::steps_text;

TEST(LowerFused, ForwardFusionSavesTheSlotsOfItsOps) {
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
TEST(LowerFused, ForwardFusionHandsOutWhatASlotHolds) {
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

TEST(LowerFused, BackwardFusionReadsTheSlotsOfItsOps) {
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

TEST(LowerFused, ForwardAndBackwardFusionMeetInTheSlots) {
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

TEST(LowerFused, JointFusionKeepsWhatItLikes) {
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

TEST(LowerFused, AnAbsentOpGivesNone) {
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

TEST(LowerFused, AStepCoversTheIdleOpsInIt) {
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

TEST(LowerFused, AnArgumentOfAnAbsentOpMustBeOptional) {
  Rule rule = epilogue(Pass::Forward);
  rule.bind = nullptr;
  const ScopedRule scoped(rule);
  EXPECT_EQ(error_of([] {
              toy::plan(nodes({"Product", "Shift"}));
            }),
            "[plan] 'epilogue' must bind argument 'factor'");
}

TEST(LowerFused, FusedOpMustBindEveryArgument) {
  Rule rule = toy::backward_rule();
  rule.bind = nullptr;
  const ScopedRule scoped(rule);
  EXPECT_EQ(error_of([] {
              toy::plan(nodes({"Shift", "Square"}));
            }),
            "[plan] 'square_shift' must bind argument 'kept'");
}

TEST(LowerFused, WhatIsBoundMustBeOfAnEntryThatIsThere) {
  for (const int entry : {-1, 2}) {
    Rule rule = toy::backward_rule();
    rule.bind = [=](const Match&) { return Bindings{{"kept", Field{entry, "input"}}}; };
    const ScopedRule scoped(rule);
    EXPECT_EQ(error_of([] {
                toy::plan(nodes({"Shift", "Square"}));
              }),
              "[plan] 'square_shift' must bind 'input' to an op it covers, got entry " +
                  std::to_string(entry));
  }
}

TEST(LowerFused, FusedForwardThatFillsNoSlotIsAnError) {
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

}  // namespace
}  // namespace transformer_ops
