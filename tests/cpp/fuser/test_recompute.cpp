// What backward computes again instead of reading it from a slot.
#include <gtest/gtest.h>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::nodes;
using toy::saved_slots;
using toy::ScopedRule;
using toy::steps_text;

PlanKey recomputing(const std::vector<OpNode>& ops) {
  PlanKey key = toy::key(ops);
  key.policies.recompute = Recompute::Cheap;
  return key;
}

Plan recomputing_plan(const std::vector<OpNode>& ops) { return toy::plan(ops, recomputing(ops)); }

TEST(Recompute, TheStepThatReadsAnOutputComputesIt) {
  const Plan plan = recomputing_plan(nodes({"Norm", "Product", "Square", "Product"}));
  EXPECT_EQ(steps_text(plan), R"(first_backward 0
forward Norm ops=[0]
  x1, s0.rstd = norm(x0, 1e-05)
  save s0.input=x0, s0.rstd=s0.rstd
forward Product ops=[1]
  x2 = product(x1, p1.weight)
  save s1.weight=p1.weight
forward Square ops=[2]
  x3 = square(x2)
  save s2.input=x2
forward Product ops=[3]
  x4 = product(x3, p3.weight)
  save s3.weight=p3.weight
backward Norm ops=[0]
  g0 = norm_backward(g1, s0.input, s0.rstd)
backward Product ops=[1]
  x1 = recompute_norm(g2, s0.input, s0.rstd)
  g1, dp1.weight = product_backward(g2, x1, s1.weight, [true, true])
backward Square ops=[2]
  g2 = square_backward(g3, s2.input)
backward Product ops=[3]
  x3 = recompute_square(g4, s2.input)
  g3, dp3.weight = product_backward(g4, x3, s3.weight, [true, true])
)");
  EXPECT_EQ(to_text(parse_plan(to_text(plan))), to_text(plan));
}

TEST(Recompute, IsOffUnlessAskedFor) {
  const auto ops = nodes({"Norm", "Product"});
  EXPECT_EQ(saved_slots(toy::plan(ops)), "s0.input s0.rstd s1.input ");
}

TEST(Recompute, GoesBackThroughChains) {
  const Plan plan =
      recomputing_plan(nodes({"Product", "Square", "Shift", "Same", "Mask", "Scale", "Product"}));
  EXPECT_EQ(saved_slots(plan), "s0.input s1.input s4.mask ");
  const std::string text = to_text(plan);
  EXPECT_NE(text.find(R"(backward Product ops=[6]
  x2 = recompute_square(g7, s1.input)
  x3 = recompute_shift(g7, x2, p2.shift)
  x5 = recompute_mask(g7, x3, s4.mask)
  x6 = recompute_scale(g7, x5, 2.0)
  g6, dp6.weight = product_backward(g7, x6, s6.weight, [true, true])
)"),
            std::string::npos)
      << text;
}

TEST(Recompute, IsDoneOnceForSeveralReaders) {
  const Plan plan = recomputing_plan(nodes({"Norm", "Square", "Product"}));
  EXPECT_EQ(saved_slots(plan), "s0.input s0.rstd ");
  const std::string text = to_text(plan);
  EXPECT_NE(text.find("g1 = square_backward(g2, x1)\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("x1 = recompute_norm"), text.rfind("x1 = recompute_norm")) << text;
}

TEST(Recompute, KeepsWhatNothingKeptLeadsTo) {
  // Nobody keeps the input of a Scale, a Shift or a Mask.
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Scale", "Product"}))), "s1.input ");
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Product", "Shift", "Product"}))),
            "s0.input s2.input ");
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Mask", "Product"}))), "s0.mask s1.input ");
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Add", "Product"}))), "s1.input ");
}

TEST(Recompute, SavesTheSmallInputOfAProducerInsteadOfItsOutput) {
  const Plan plan = recomputing_plan(nodes({"Repeat", "Product"}));
  EXPECT_EQ(saved_slots(plan), "s0.input ");
  const std::string text = to_text(plan);
  EXPECT_NE(text.find("\n  x1 = recompute_repeat(g2, s0.input)\n"), std::string::npos) << text;
  EXPECT_EQ(to_text(parse_plan(text)), text);
  // Also where the producer itself has no backward.
  const auto ops = nodes({"Repeat", "Product"});
  PlanKey key = recomputing(ops);
  key.tensors[0].requires_grad = false;
  EXPECT_EQ(saved_slots(toy::plan(ops, key)), "s0.input ");
  // What is kept anyway, or computed again, serves instead.
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Norm", "Repeat", "Product"}))),
            "s0.input s0.rstd ");
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Square", "Same", "Repeat", "Product"}))),
            "s0.input ");
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Repeat", "Shift"}))), "");
}

TEST(Recompute, AnAddedInputIsSavedAsItsStepTookIt) {
  Rule rule{.name = "repeat_product",
            .pass = Pass::Forward,
            .benefit = 1,
            .pattern = {{"Repeat"}, {"Product"}},
            .forward = "repeat_product(Tensor input, Tensor weight) -> Tensor output"};
  const ScopedRule forward(std::move(rule));
  const auto ops = nodes({"Repeat", "Product"});
  PlanKey key = recomputing(ops);
  toy::parameter(key, ops, 1).dtype = DType::BFloat16;
  const std::string text = to_text(toy::plan(ops, key));
  EXPECT_NE(text.find(", s0.input=t0.input"), std::string::npos) << text;
  EXPECT_NE(text.find("\n  x1 = recompute_repeat(g2, s0.input)\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("recompute_cast"), std::string::npos) << text;
}

TEST(Recompute, AddsNoInputThatIsInsideAStep) {
  Rule rule{.name = "shift_repeat",
            .pass = Pass::Forward,
            .benefit = 1,
            .pattern = {{"Shift"}, {"Repeat"}},
            .forward = "shift_repeat(Tensor input, Tensor shift) -> Tensor output"};
  const ScopedRule forward(std::move(rule));
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Shift", "Repeat", "Product"}))), "s2.input ");
}

TEST(Recompute, KeepsWhatAProducerWithoutBackwardGives) {
  const auto ops = nodes({"Norm", "Product"});
  PlanKey key = recomputing(ops);
  key.tensors[0].requires_grad = false;
  EXPECT_EQ(saved_slots(toy::plan(ops, key)), "s1.input ");
}

TEST(Recompute, ASecondNameOfAKeptTensorStays) {
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Product", "Same", "Product", "Square", "Same"}))),
            "s0.input s2.input s3.input ");
}

TEST(Recompute, CastsWhereForwardDid) {
  const auto ops = nodes({"Square", "Product"});
  PlanKey key = recomputing(ops);
  toy::parameter(key, ops, 1).dtype = DType::BFloat16;
  const std::string text = to_text(toy::plan(ops, key));
  EXPECT_NE(text.find(R"(
  x1 = recompute_square(g2, s0.input)
  s1.input = recompute_cast(g2, x1)
  t1.grad_input, dp1.weight = product_backward(g2, s1.input, s1.weight, [true, true])
  g1 = cast(t1.grad_input, "float32"))"),
            std::string::npos)
      << text;
}

TEST(Recompute, WorksAcrossFusions) {
  const ScopedRule forward(toy::forward_rule()), backward(toy::backward_rule());
  const Plan plan = recomputing_plan(nodes({"Norm", "Product", "Shift", "Square", "Product"}));
  EXPECT_EQ(saved_slots(plan), "s0.input s0.rstd s3.input ");
  EXPECT_EQ(plan.forward[1].name, "product_shift_square");
}

TEST(Recompute, AFusedStepDoesNotReturnWhatIsRecomputed) {
  Rule rule{.name = "shift_square",
            .pass = Pass::Forward,
            .benefit = 1,
            .pattern = {{"Shift"}, {"Square"}},
            .forward =
                "shift_square(Tensor input, Tensor shift, bool save_kept) -> "
                "(Tensor output, Tensor kept)",
            .bind = [](const Match&) {
              return Bindings{{"kept", Field{1, "input"}}};
            }};
  const ScopedRule forward(std::move(rule));
  // Norm's output is recomputed, and the sum from it.
  const Plan plan = recomputing_plan(nodes({"Norm", "Shift", "Square"}));
  EXPECT_EQ(saved_slots(plan), "s0.input s0.rstd ");
  const std::string text = to_text(plan);
  EXPECT_NE(text.find("  x3, s2.input = shift_square(x1, p1.shift, false)\n"), std::string::npos)
      << text;
  EXPECT_EQ(to_text(parse_plan(text)), text);
  // Nothing leads to the sum.
  EXPECT_NE(to_text(recomputing_plan(nodes({"Shift", "Square"}))).find("p0.shift, true)"),
            std::string::npos);
}

TEST(Recompute, AJointFusionKeepsItsOwnWhereNothingLeadsToIt) {
  const ScopedRule joint(toy::joint_rule());
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Square", "Product"}))), "s1.input ");
}

TEST(Recompute, FeedsAPythonStepThroughItsSlots) {
  const auto ops = nodes({"Norm", "Product"});
  const toy::ScopedUserFusion fusion("mine", Pass::Backward);
  const auto take_product = [](const Fusion&, const std::vector<StepGroup>& groups) {
    std::vector<StepGroup> taken = groups;
    taken[1].python = 2;
    taken[1].name = "Mine";
    return taken;
  };
  const Plan plan = make_plan(ops, recomputing(ops), take_product).plan;
  EXPECT_EQ(saved_slots(plan), "s0.input s0.rstd ");
  EXPECT_NE(to_text(plan).find(R"(
backward Mine ops=[1] python=2
  x1 = recompute_norm(g2, s0.input, s0.rstd)
  s1.input = x1
)"),
            std::string::npos)
      << to_text(plan);
}

TEST(Recompute, AddsTheInputOfAProducerThatSaysSo) {
  const Plan plan = recomputing_plan(nodes({"Spread", "Product"}));
  EXPECT_EQ(saved_slots(plan), "s0.places s0.input ");
  EXPECT_NE(to_text(plan).find("x1 = recompute_spread(g2, s0.input, s0.places)"), std::string::npos)
      << to_text(plan);
  EXPECT_EQ(to_text(parse_plan(to_text(plan))), to_text(plan));
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Spread", "Square", "Product"}))),
            "s0.places s0.input ");
}

TEST(Recompute, AddsNoInputThatIsThereAnyway) {
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Norm", "Spread", "Product"}))),
            "s0.input s0.rstd s1.places ");
  EXPECT_EQ(saved_slots(recomputing_plan(nodes({"Spread", "Scale"}))), "s0.places ");
  EXPECT_EQ(saved_slots(toy::plan(nodes({"Spread", "Product"}))), "s0.places s1.input ");
}

TEST(Recompute, AnOpThatHandsOnChangesNothing) {
  const Plan plan = recomputing_plan(nodes({"Norm", "Choose", "Spread", "Product"}));
  EXPECT_EQ(saved_slots(plan), "s0.input s0.rstd s2.places ");
  const std::string text = to_text(plan);
  EXPECT_NE(text.find("  x2 = x1\n  o1.ids = choose(x1)\n"), std::string::npos) << text;
  EXPECT_EQ(to_text(parse_plan(text)), text);
}

TEST(Verify, AValueComputedAgainMustBeWrittenFirst) {
  std::string text = to_text(recomputing_plan(nodes({"Norm", "Product"})));
  const std::string line = "  x1 = recompute_norm(g2, s0.input, s0.rstd)\n";
  text.erase(text.find(line), line.size());
  EXPECT_NE(toy::error_of([&] { parse_plan(text); }).find("must read what was written before"),
            std::string::npos);
}

}  // namespace
}  // namespace transformer_ops
