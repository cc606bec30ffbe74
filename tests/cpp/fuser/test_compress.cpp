// Main tensors that are kept for backward as codes and scales.
#include <gtest/gtest.h>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;
using toy::nodes;
using toy::ScopedRule;
using toy::steps_text;

PlanKey key_of(const std::vector<OpNode>& ops, SavedAs saved,
               Recompute recompute = Recompute::None) {
  PlanKey key = toy::key(ops);
  key.policies = {.recompute = recompute, .saved = saved};
  return key;
}

Plan plan_of(const std::vector<OpNode>& ops, SavedAs saved = {SavedFormat::Int8},
             Recompute recompute = Recompute::None) {
  return toy::plan(ops, key_of(ops, saved, recompute));
}

// The slots that forward saves, parameters left out.
std::string saved(const Plan& plan) {
  std::string text;
  for (const Step& step : plan.forward) {
    for (const Save& save : step.saves) {
      if (save.source.kind != Value::Kind::Parameter) text += to_text(save.slot) + " ";
    }
  }
  return text;
}

TEST(Compress, EncodesBehindTheWriterAndDecodesBeforeTheReader) {
  const Plan plan = plan_of(nodes({"Norm", "Square"}));
  EXPECT_EQ(steps_text(plan), R"(first_backward 0
saved int8
forward Norm ops=[0]
  x1, s0.rstd = norm(x0, 1e-05)
  save s0.input=x0, s0.rstd=s0.rstd
forward Square ops=[1]
  x2 = square(x1)
  s1.input.codes, s1.input.scale = quantize(x1, "int8 1x128")
  save s1.input.codes=s1.input.codes, s1.input.scale=s1.input.scale
backward Norm ops=[0]
  g0 = norm_backward(g1, s0.input, s0.rstd)
backward Square ops=[1]
  s1.input = dequantize.saved(g2, s1.input.codes, s1.input.scale, "int8 1x128", "float32", none)
  g1 = square_backward(g2, s1.input)
)");
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
}

TEST(Compress, LeavesOutWhatBelongsToTheExactTensor) {
  const auto ops = nodes({"Product", "Square", "Soft"});
  EXPECT_EQ(saved(plan_of(ops, {})), "s0.input s1.input s2.input s2.sum ");
  EXPECT_NE(to_text(plan_of(ops, {})).find("soft_backward(g3, s2.input, s2.sum)"),
            std::string::npos);
  // Decoded, and computed again from what is decoded.
  const Plan plan = plan_of(ops);
  EXPECT_EQ(saved(plan), "s0.input s1.input.codes s1.input.scale s2.input.codes s2.input.scale ");
  EXPECT_NE(to_text(plan).find("soft_backward(g3, s2.input, none)"), std::string::npos);
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
  const Plan again = plan_of(ops, {SavedFormat::Int8}, Recompute::Cheap);
  EXPECT_EQ(saved(again), "s0.input s1.input.codes s1.input.scale ");
  EXPECT_NE(to_text(again).find("soft_backward(g3, x2, none)"), std::string::npos);
  // An exact input has its own.
  EXPECT_EQ(saved(plan_of(nodes({"Soft", "Product"}))),
            "s0.input s0.sum s1.input.codes s1.input.scale ");
}

TEST(Compress, TakesTheCallersTensorsWhereAsked) {
  const Plan plan = plan_of(nodes({"Norm", "Square"}), {SavedFormat::Fp8, true});
  EXPECT_EQ(saved(plan), "s0.input.codes s0.input.scale s0.rstd s1.input.codes s1.input.scale ");
  EXPECT_NE(to_text(plan).find("\nsaved fp8 inputs=true\n"), std::string::npos);
  EXPECT_NE(to_text(plan).find("quantize(x0, \"e4m3 1x128\")"), std::string::npos);
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
}

TEST(Compress, KnowsTheCallersTensorsByWhateverName) {
  // A hand-over, a view, and an extra output that the caller gets.
  EXPECT_EQ(saved(plan_of(nodes({"Same", "Square"}))), "s1.input ");
  EXPECT_EQ(saved(plan_of(nodes({"View", "Square"}))), "s1.input ");
  EXPECT_EQ(saved(plan_of(nodes({"Square", "Fork", "Square"}))), "s0.input s2.input ");
  auto ops = nodes({"Square", "Fork", "Square", "Add"});
  toy::connect(ops, 1, 3);
  EXPECT_EQ(saved(plan_of(ops)), "s0.input s2.input.codes s2.input.scale ");
}

TEST(Compress, TakesACopyThatACastMade) {
  const auto ops = nodes({"Product"});
  PlanKey key = key_of(ops, {SavedFormat::Fp8});
  key.autocast = DType::BFloat16;
  const std::string text = to_text(toy::plan(ops, key));
  EXPECT_NE(text.find("s0.input.codes, s0.input.scale = quantize(t0.input, "), std::string::npos)
      << text;
  EXPECT_NE(text.find("s0.input.scale, \"e4m3 1x128\", \"bfloat16\", none)"), std::string::npos)
      << text;
}

// Two slots of one tensor: each reader finds it under its own name.
TEST(Compress, KeepsOneTensorOnce) {
  const Plan plan = plan_of(nodes({"Root", "Same", "Square", "Square"}));
  EXPECT_EQ(saved(plan), "s0.output.codes s0.output.scale s3.input.codes s3.input.scale ");
  EXPECT_NE(to_text(plan).find(R"(
backward Square ops=[2]
  s0.output = dequantize.saved(g3, s0.output.codes, s0.output.scale, "int8 1x128", "float32", none)
  s2.input = s0.output
  g2 = square_backward(g3, s2.input)
)"),
            std::string::npos)
      << to_text(plan);
}

TEST(Compress, WhatIsComputedAgainIsComputedFromWhatIsDecoded) {
  const Plan plan =
      plan_of(nodes({"Product", "Square", "Product"}), {SavedFormat::Int8}, Recompute::Cheap);
  EXPECT_EQ(saved(plan), "s0.input s1.input.codes s1.input.scale ");
  EXPECT_NE(to_text(plan).find(R"(
backward Product ops=[2]
  s1.input = dequantize.saved(g3, s1.input.codes, s1.input.scale, "int8 1x128", "float32", none)
  x2 = recompute_square(g3, s1.input)
)"),
            std::string::npos)
      << to_text(plan);
}

TEST(Compress, LeavesWhatAPythonOpGives) {
  auto ops = nodes({"Square", "Square", "Square"});
  ops[0] = toy::python_node("Mine");
  EXPECT_EQ(saved(plan_of(ops)), "s1.input s2.input ");
}

TEST(Compress, FeedsAPythonStepThroughItsSlots) {
  const auto ops = nodes({"Square", "Square"});
  const toy::ScopedUserFusion fusion("mine", Pass::Backward);
  const auto take_last = [](const Fusion&, const std::vector<StepGroup>& groups) {
    std::vector<StepGroup> taken = groups;
    taken[1].python = 2;
    taken[1].name = "Mine";
    return taken;
  };
  const Plan plan = make_plan(ops, key_of(ops, {SavedFormat::Int8}), take_last).plan;
  EXPECT_NE(to_text(plan).find(R"(
backward Mine ops=[1] python=2
  s1.input = dequantize.saved(g2, s1.input.codes, s1.input.scale, "int8 1x128", "float32", none)
)"),
            std::string::npos)
      << to_text(plan);
}

TEST(Compress, WorksAcrossFusions) {
  const ScopedRule forward(toy::forward_rule()), backward(toy::backward_rule());
  const Plan plan = plan_of(nodes({"Product", "Shift", "Square"}));
  EXPECT_NE(to_text(plan).find("s2.input.codes, s2.input.scale = quantize(s2.input, "),
            std::string::npos)
      << to_text(plan);
}

TEST(Compress, OneOpAsksForCodesOfItsInput) {
  auto ops = nodes({"Square", "Square", "Root", "Square"});
  for (OpNode& op : ops) {
    if (op.kind == "Square") op.attributes[kCacheQuantizedInput] = true;
  }
  // Whoever holds the tensor; but the last one's input is kept as it is, for Root.
  const Plan plan = plan_of(ops, {});
  EXPECT_EQ(saved(plan),
            "s0.input.codes s0.input.scale s1.input.codes s1.input.scale s2.output s3.input ");
  EXPECT_NE(to_text(plan).find("op 0 Square training=true cache_quantized_input=true\n"),
            std::string::npos);
  EXPECT_NE(to_text(plan).find("quantize(x0, \"e4m3\")"), std::string::npos);
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
  EXPECT_TRUE(plan.saves_codes());

  // The policy takes what the op does not ask for.
  ops[1].attributes.clear();
  const Plan both = plan_of(ops);
  EXPECT_NE(to_text(both).find("quantize(x0, \"e4m3\")"), std::string::npos);
  EXPECT_NE(to_text(both).find("quantize(x1, \"int8 1x128\")"), std::string::npos);
  ops[0].attributes[kCacheQuantizedInput] = int64_t{1};
  EXPECT_EQ(error_of([&] { plan_of(ops); }),
            "[plan] op 0 (Square) must have attribute 'cache_quantized_input' of type bool, got 1");
}

TEST(Compress, NothingIsKeptWithoutGradients) {
  const auto ops = nodes({"Norm", "Square"});
  PlanKey key = toy::key(ops, /*grad=*/false);
  key.policies.saved = {SavedFormat::Int8};
  EXPECT_EQ(to_text(toy::plan(ops, key)).find("quantize"), std::string::npos);
}

TEST(PlanText, PartsAreThoseOfSlots) {
  std::string text = to_text(plan_of(nodes({"Norm", "Square"})));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    return error_of([&] { parse_plan(changed); });
  };
  EXPECT_NE(with("s1.input.codes,", "s1.input.bits,").find("[plan] a part must be codes or scale"),
            std::string::npos);
  EXPECT_NE(with("quantize(x1", "quantize(t1.x.codes").find("[plan] a part must be one of a slot"),
            std::string::npos);
  EXPECT_NE(with("saved int8", "saved int4").find("[plan] saved must be exact, fp8 or int8"),
            std::string::npos);
  EXPECT_NE(with("saved int8", "saved int8 often").find("[plan] saved must be a format"),
            std::string::npos);
}

}  // namespace
}  // namespace transformer_ops
