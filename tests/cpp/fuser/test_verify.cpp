// Every way in which a plan can be wrong.
#include <gtest/gtest.h>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;
using toy::nodes;
using toy::ScopedRule;

Plan good() { return toy::plan(nodes({"Norm", "Product", "Scale"})); }

// The error after a change of a good plan.
template <typename Change>
std::string error_after(Change&& change, Plan plan = good()) {
  verify(plan);
  change(plan);
  return error_of([&] { verify(plan); });
}

Value value(const std::string& text) { return parse_value(text); }

TEST(Verify, StepsCoverEveryOpOnceInOrder) {
  EXPECT_EQ(error_after([](Plan& plan) { plan.forward.pop_back(); }),
            "[plan] forward steps must cover all 3 ops, got 2");
  EXPECT_EQ(error_after([](Plan& plan) { std::swap(plan.backward[0], plan.backward[1]); }),
            "[plan] backward steps must cover op 0 next, got op 1 in step 'Product'");
  EXPECT_EQ(error_after([](Plan& plan) {
              plan.forward[2].ops = {1, 2};
            }),
            "[plan] forward steps must cover op 2 next, got op 1 in step 'Scale'");
  EXPECT_EQ(error_after([](Plan& plan) { plan.forward[1].ops.clear(); }),
            "[plan] forward step 'Product' must cover an op");
}

TEST(Verify, ForwardReadsWhatWasWrittenBefore) {
  EXPECT_EQ(
      error_after([](Plan& plan) { plan.forward[1].instructions[0].arguments[0] = value("x3"); }),
      "[plan] step 'Product' must read what was written before, got x3");
  EXPECT_EQ(error_after([](Plan& plan) { plan.forward[0].instructions.clear(); }),
            "[plan] step 'Norm' must read what was written before, got s0.rstd");
  EXPECT_EQ(error_after([](Plan& plan) { plan.forward[2].instructions.clear(); }),
            "[plan] step 'outputs' must read what was written before, got x3");
}

TEST(Verify, BackwardReadsWhatForwardSaved) {
  EXPECT_EQ(error_after([](Plan& plan) { plan.forward[1].saves.clear(); }),
            "[plan] backward step 'Product' must read a slot that forward saves, got s1.input");
  EXPECT_EQ(error_after([](Plan& plan) { plan.forward[1].saves[0].source = value("x2"); }),
            "no error");
  EXPECT_EQ(error_after([](Plan& plan) { plan.forward[0].saves[0].source = value("x2"); }),
            "[plan] step 'Norm' must read what was written before, got x2");
  EXPECT_EQ(error_after([](Plan& plan) { plan.backward[2].instructions.clear(); }),
            "[plan] step 'Product' must read what was written before, got g2");
}

TEST(Verify, BackwardIsNotReadWithoutGradients) {
  EXPECT_EQ(error_after([](Plan& plan) {
              plan.first_backward = 3;
              plan.gradients.clear();
              plan.forward[1].saves.clear();
            }),
            "no error");
}

TEST(Verify, ExtraOutputsAreThoseOfTheOp) {
  auto ops = nodes({"Fork", "Add"});
  toy::connect(ops, 0, 1);
  EXPECT_EQ(error_after([](Plan& plan) { plan.routes[0].output.name = "x"; }, toy::plan(ops)),
            "[plan] op 0 (Fork) must have the tensor that is named, got o0.x");
}

TEST(Verify, StepsSaveSlots) {
  EXPECT_EQ(error_after([](Plan& plan) { plan.forward[1].saves[0].slot = value("x3"); }),
            "[plan] step 'Product' must save slots, got x3");
}

TEST(Verify, AStateIsUpdatedWhereTheOpSaysSo) {
  auto ops = nodes({"Tally"});
  ops[0].attributes["tallies"] = Attribute(true);
  const auto with_result = [&](const char* text) {
    return error_after(
        [&](Plan& plan) { plan.backward[0].instructions[0].results[1] = value(text); },
        toy::plan(ops));
  };
  EXPECT_EQ(with_result("st0.total"), "no error");
  EXPECT_EQ(with_result("dp0.weight"),
            "[plan] backward must yield the gradients that the plan names, got no st0.total");
  EXPECT_EQ(with_result("st0.sum"),
            "[plan] op 0 (Tally) must update the state that is named, got st0.sum");
  ops[0].attributes["tallies"] = Attribute(false);
  EXPECT_EQ(with_result("st0.total"),
            "[plan] op 0 (Tally) must update the state that is named, got st0.total");
}

TEST(Verify, BackwardYieldsTheGradientsThatThePlanNames) {
  EXPECT_EQ(error_after([](Plan& plan) {
              std::get<Value>(plan.backward[1].instructions[0].results[1]).name = "x";
            }),
            "[plan] op 1 (Product) must have the tensor that is named, got dp1.x");
  EXPECT_EQ(error_after([](Plan& plan) {
              plan.backward[1].instructions[0].results[1] = value("t1.unused");
            }),
            "[plan] backward must yield the gradients that the plan names, got no dp1.weight");
  EXPECT_EQ(error_after([](Plan& plan) { plan.backward[0].instructions.clear(); }),
            "[plan] backward must yield the gradients that the plan names, got no g0");
  EXPECT_EQ(error_after([](Plan& plan) { plan.gradients.push_back(value("dp2.weight")); }),
            "[plan] op 2 (Scale) must have the tensor that is named, got dp2.weight");
  EXPECT_EQ(error_after([](Plan& plan) { plan.gradients.push_back(value("g1")); }),
            "[plan] gradients must be those of the plan's inputs, got g1");
  EXPECT_EQ(error_after([](Plan& plan) { plan.gradients.clear(); }),
            "[plan] gradients must be named where a backward is needed, and only there, got 0 with "
            "first_backward 0");
  EXPECT_EQ(error_after([](Plan& plan) { plan.first_backward = 3; }),
            "[plan] gradients must be named where a backward is needed, and only there, got 2 with "
            "first_backward 3");
}

TEST(Verify, ShapesAreThoseOfWhatForwardWrites) {
  const Plan plan = toy::plan(nodes({"Same", "View"}));
  EXPECT_EQ(error_after(
                [](Plan& plan) {
                  Step joined = plan.forward[1];
                  joined.ops = {0, 1};
                  joined.instructions[0].arguments[0] = value("x0");
                  plan.forward = {joined};
                },
                plan),
            "[plan] backward step 'View' must read the shape of what forward writes, got n1");
}

TEST(Verify, JointStepsArePaired) {
  const ScopedRule rule(toy::joint_rule());
  EXPECT_EQ(error_after([](Plan& plan) { plan.backward[0].joint = false; },
                        toy::plan(nodes({"Square", "Product"}))),
            "[plan] joint step 'square_product' must be in both passes; another fusion took its "
            "ops in one of them");
}

TEST(Verify, ValuesNameOpsOfThePlan) {
  EXPECT_EQ(
      error_after([](Plan& plan) { plan.backward[0].instructions[0].results = {value("g4")}; }),
      "[plan] a value must name an op of the plan, got g4 with 3 ops");
  EXPECT_EQ(error_after(
                [](Plan& plan) { plan.forward[0].instructions[0].results[1] = value("s-1.rstd"); }),
            "[plan] a value must name an op of the plan, got s-1.rstd with 3 ops");
}

TEST(Verify, RoutesLeadForward) {
  auto ops = nodes({"Fork", "Add", "Fork"});
  toy::connect(ops, 0, 1);
  const Plan plan = toy::plan(ops);
  EXPECT_EQ(error_after([](Plan& plan) { plan.routes[0].output.op = 2; }, plan),
            "[plan] a route must lead from an extra output to an extra input of a later op, got "
            "e1.extra_input=o2.extra_output");
  EXPECT_EQ(error_after([](Plan& plan) { plan.routes[0].output.op = 7; }, plan),
            "[plan] a value must name an op of the plan, got o7.extra_output with 3 ops");
  EXPECT_EQ(error_after([](Plan& plan) { plan.routes[0].output.op = 1; }, plan),
            "[plan] op 1 (Add) must have the tensor that is named, got o1.extra_output");
}

TEST(Verify, NativeOpsHaveWhatTheirKindDeclares) {
  EXPECT_EQ(error_after([](Plan& plan) { plan.ops[0].kind = "Nothing"; }),
            "[plan] op kind must be declared, got 'Nothing'");
  EXPECT_EQ(error_after([](Plan& plan) { plan.ops[2].attributes.clear(); }),
            "[plan] op 2 (Scale) must have attribute 'factor', got none");
  EXPECT_EQ(error_after([](Plan& plan) { plan.parameters.clear(); }),
            "[plan] op 1 (Product) must have parameters weight, got none");
  EXPECT_EQ(error_after([](Plan& plan) { plan.parameters[0].name = "bias"; }),
            "[plan] op 1 (Product) must have the tensor that is named, got p1.bias");
  EXPECT_EQ(error_after([](Plan& plan) { plan.extra_inputs.clear(); }, toy::plan(nodes({"Add"}))),
            "[plan] op 0 (Add) must have extra inputs extra_input, got none");
  EXPECT_EQ(
      error_after([](Plan& plan) { plan.extra_inputs[0].name = "x"; }, toy::plan(nodes({"Add"}))),
      "[plan] op 0 (Add) must have the tensor that is named, got e0.x");
  EXPECT_EQ(error_after([](Plan& plan) { plan.extra_inputs.push_back(plan.extra_inputs[0]); },
                        toy::plan(nodes({"Add"}))),
            "[plan] op 0 (Add) must have extra inputs extra_input, got extra_input, extra_input");
}

TEST(Verify, OptionalTensorsMayBeMissing) {
  const std::vector<OpNode> ops = nodes({"Pick"});
  PlanKey key = toy::key(ops);
  key.tensors[1] = {.is_absent = true};        // rows
  key.tensors[2] = {.dtype = DType::Unknown};  // ids
  key.tensors[3] = {.is_absent = true};        // table
  const Plan plan = toy::plan(ops, key);
  EXPECT_EQ(error_after([](Plan&) {}, plan), "no error");
  EXPECT_EQ(error_after([](Plan& plan) { plan.extra_inputs.clear(); }, plan),
            "[plan] op 0 (Pick) must have extra inputs rows, ids, got none");
  EXPECT_EQ(error_after(
                [](Plan& plan) {
                  plan.gradients.push_back({Value::Kind::ExtraInputGrad, 0, "ids"});
                },
                plan),
            "[plan] gradients must be of floating tensors, got de0.ids");
}

TEST(Verify, TensorsComeInTheOrderOfTheirOps) {
  EXPECT_EQ(error_after([](Plan& plan) { std::swap(plan.parameters[0], plan.parameters[1]); },
                        toy::plan(nodes({"Product", "Product"}))),
            "[plan] inputs, parameters, states and outputs must be in the order of their ops");
}

TEST(Verify, PythonStepsFillTheSlotsOfTheirOps) {
  EXPECT_EQ(error_after([](Plan& plan) {
              plan.forward[1].python = 3;
              plan.forward[1].instructions.clear();
              plan.forward[1].saves.clear();
            }),
            "no error");
}

}  // namespace
}  // namespace transformer_ops
