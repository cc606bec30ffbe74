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
  EXPECT_EQ(to_text(toy::plan(nodes({"Norm", "Product", "Shift", "Scale"}))), R"(plan 5
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
  EXPECT_EQ(to_text(toy::plan(nodes({"Fork", "Add"}))), R"(plan 5
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
  EXPECT_EQ(to_text(toy::plan(ops)), R"(plan 5
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
  EXPECT_EQ(to_text(toy::plan(ops, pick_key(ops))), R"(plan 5
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
  EXPECT_EQ(to_text(toy::plan(ops, key)), R"(plan 5
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
  EXPECT_EQ(to_text(toy::plan(ops)), R"(plan 5
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

// ---- Python steps

TEST(Lower, PythonOpHasNoInstructions) {
  auto ops = nodes({"Square"});
  ops.push_back(toy::python_node("Custom", /*parameters=*/2));
  EXPECT_EQ(to_text(toy::plan(ops)), R"(plan 5
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
