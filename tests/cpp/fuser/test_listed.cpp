// Parameters that are lists of tensors: names, plans, casts, texts, and what is refused.
#include <gtest/gtest.h>

#include "fuser/declaration.h"
#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;
using toy::nodes;
using toy::steps_text;
using Names = std::vector<std::string>;

OpNode blend(int64_t count, bool is_single = false) {
  return make_op("Blend",
                 {{"count", count}, {"single", is_single}, {"tallies", std::vector<int64_t>{}}});
}

TEST(Listed, HasATensorForEachNumber) {
  const OpDeclaration& row = declaration("Blend");
  EXPECT_EQ(blend(2).parameters, (Names{"weight0", "weight1", "shift0", "shift1"}));
  EXPECT_EQ(blend(2, true).parameters, (Names{"weight0", "weight1", "shift"}));
  EXPECT_EQ(row.parameter_of("weight12"), "weight");
  EXPECT_EQ(row.parameter_of("shift"), "shift");
  EXPECT_EQ(row.parameter_of("weights0"), "");
  EXPECT_FALSE(row.is_optional("weight0"));
  EXPECT_TRUE(row.is_optional("shift1"));
  EXPECT_EQ(error_of([] { blend(0); }),
            "[Blend] count must be a number of tensors, 1 to 100000, got 0");
}

TEST(Listed, IsDeclaredWithItsCount) {
  const auto error = [](OpDeclaration row) {
    row.kind = "List";
    row.parameters = {"weight"};
    return error_of([&] { checked(row); });
  };
  const std::string list = "[declaration] 'List' list 'weight' ";
  EXPECT_EQ(error({.lists = {{"weight", "count"}}}),
            list + "must have its count as an attribute, got 'count'");
  EXPECT_EQ(error({.lists = {{"weight", "count", "one"}}, .attributes = {"count"}}),
            list + "must have its flag as an attribute, got 'one'");
  EXPECT_EQ(error({.lists = {{"bias", "count"}}, .attributes = {"count"}}),
            "[declaration] 'List' list 'bias' must be one of the parameters, got none");
  EXPECT_EQ(error({.lists = {{"weight", "count"}},
                   .attributes = {"count"},
                   .forward = "f(Tensor input, Tensor weight) -> Tensor output"}),
            "[declaration] 'List' must take 'weight' as Tensor[], got Tensor");
  EXPECT_EQ(error({.forward = "f(Tensor input, Tensor[] weight) -> Tensor output"}),
            "[declaration] 'List' must take 'weight' as one tensor, got Tensor[]");
  EXPECT_EQ(error_of([] {
              checked({.kind = "List",
                       .parameters = {"weight", "weight0"},
                       .lists = {{"weight", "count"}},
                       .attributes = {"count"}});
            }),
            list + "must have its names to itself, got parameter 'weight0'");
}

TEST(Listed, IsTakenAndGivenAsAList) {
  const std::vector<OpNode> ops = {blend(3)};
  EXPECT_EQ(steps_text(toy::plan(ops)), R"(first_backward 0
forward Blend ops=[0]
  x1 = blend(x0, [p0.weight0..2], [p0.shift0..2])
  save s0.input=x0, s0.weight0..2=p0.weight0..2
backward Blend ops=[0]
  g0, [dp0.weight0..2], [dp0.shift0..2] = blend_backward(g1, s0.input, [s0.weight0..2], [p0.shift0..2], 3, [true, true, true])
)");
  const std::string text = to_text(toy::plan(ops));
  EXPECT_NE(text.find("\nparameters p0.weight0..2 p0.shift0..2\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\ngradients g0 dp0.weight0..2 dp0.shift0..2\n"), std::string::npos) << text;
  EXPECT_EQ(to_text(parse_plan(text)), text);
  EXPECT_EQ(parse_plan(text), toy::plan(ops));
}

TEST(Listed, OneTensorStandsForAll) {
  EXPECT_EQ(steps_text(toy::plan({blend(3, true)})), R"(first_backward 0
forward Blend ops=[0]
  x1 = blend(x0, [p0.weight0..2], [p0.shift])
  save s0.input=x0, s0.weight0..2=p0.weight0..2
backward Blend ops=[0]
  g0, [dp0.weight0..2], [dp0.shift] = blend_backward(g1, s0.input, [s0.weight0..2], [p0.shift], 3, [true, true, true])
)");
}

TEST(Listed, AnAbsentListIsNone) {
  const std::vector<OpNode> ops = {blend(2)};
  PlanKey key = toy::key(ops);
  key.tensors[3].is_absent = key.tensors[4].is_absent = true;
  const Plan plan = toy::plan(ops, key);
  EXPECT_EQ(steps_text(plan), R"(first_backward 0
forward Blend ops=[0]
  x1 = blend(x0, [p0.weight0..1], none)
  save s0.input=x0, s0.weight0..1=p0.weight0..1
backward Blend ops=[0]
  g0, [dp0.weight0..1], [] = blend_backward(g1, s0.input, [s0.weight0..1], none, 2, [true, true, false])
)");
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
  key.tensors[3].is_absent = false;
  EXPECT_EQ(error_of([&] { toy::plan(ops, key); }), "[Blend] shift1 must be a tensor, got None");
  key.tensors[4].is_absent = false;
  key.tensors[2].is_absent = true;
  EXPECT_EQ(error_of([&] { toy::plan(ops, key); }), "[Blend] weight1 must be a tensor, got None");
}

// Gradients and dtypes are known for each tensor separately.
TEST(Listed, TensorsOfAListDiffer) {
  const std::vector<OpNode> ops = {blend(3)};
  PlanKey key = toy::key(ops);
  key.tensors[0].requires_grad = false;
  key.tensors[2] = {DType::BFloat16, false};
  const Plan plan = toy::plan(ops, key);
  EXPECT_EQ(steps_text(plan), R"(first_backward 0
forward Blend ops=[0]
  t0.weight1 = cast(p0.weight1, "float32")
  x1 = blend(x0, [p0.weight0, t0.weight1, p0.weight2], [p0.shift0..2])
  save s0.input=x0
backward Blend ops=[0]
  t0.unused, [dp0.weight0, t0.unused, dp0.weight2], [dp0.shift0..2] = blend_backward(g1, s0.input, none, [p0.shift0..2], 3, [false, true, true])
)");
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
}

TEST(Listed, EachHasAStateOfItsOwn) {
  OpNode op = blend(2);
  op.attributes["tallies"] = true;
  const Plan plan = toy::plan({op});
  // What writes to buffers gives no other list.
  const std::string text = to_text(plan);
  EXPECT_NE(text.find("  g0, [st0.total0..1], [] = blend_backward(g1, s0.input, [s0.weight0..1], "
                      "[p0.shift0..1], 2, [true, true, false])\n"
                      "  t0.unused, [], [dp0.shift0..1] = blend_backward(g1, none, none, "
                      "[p0.shift0..1], 2, [false, false, true])\n"),
            std::string::npos)
      << text;
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
}

TEST(Listed, AsManyAsTheAttributeSays) {
  std::vector<OpNode> ops = {blend(3)};
  ops[0].parameters.erase(ops[0].parameters.begin() + 2);
  EXPECT_EQ(error_of([&] { toy::plan(ops); }),
            "[Blend] weight must be a list of 3 tensors, as count says, got 2");
}

// What a text may not say.
TEST(Listed, TextsAreVerified) {
  const std::string text = to_text(toy::plan({blend(3)}));
  const auto error = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    const size_t at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return error_of([&] { parse_plan(changed.replace(at, from.size(), to)); });
  };
  EXPECT_EQ(error("parameters p0.weight0..2", "parameters p0.weight0..1"),
            "[plan] op 0 (Blend) must have parameters weight0, weight1, weight2, shift0, shift1, "
            "shift2, got weight0, weight1, shift0, shift1, shift2");
  EXPECT_EQ(error("parameters p0.weight0..2", "parameters p0.weight0..3"),
            "[plan] op 0 (Blend) must have the tensor that is named, got p0.weight3");
  EXPECT_EQ(error("[p0.weight0..2]", "[p0.weight0, p0.weight1]"),
            "[plan] op 0 (Blend) must have a list of all 3 tensors of 'weight' in step 'Blend', "
            "got [p0.weight0..1]");
  EXPECT_EQ(error("[p0.weight0..2]", "[p0.weight2, p0.weight1, p0.weight0]"),
            "[plan] op 0 (Blend) must have a list of all 3 tensors of 'weight' in step 'Blend', "
            "got [p0.weight2, p0.weight1, p0.weight0]");
  EXPECT_EQ(error("[dp0.weight0..2]", "[dp0.weight0..1]"),
            "[plan] op 0 (Blend) must have a list of all 3 tensors of 'weight' in step 'Blend', "
            "got [dp0.weight0..1]");
  EXPECT_EQ(error("[p0.weight0..2]", "[p0.weight0..x]").substr(0, 78),
            "[plan] a run of values must read like p1.weight0..3, got 'p0.weight0..x' (line");
  EXPECT_EQ(error("[p0.weight0..2]", "[p0.weight2..0]").substr(0, 51),
            "[plan] a run of values must read like p1.weight0..3");
  EXPECT_EQ(error("[p0.weight0..2]", "[p0.weight0..999999]").substr(0, 51),
            "[plan] a run of values must read like p1.weight0..3");
  EXPECT_EQ(error("s0.weight0..2=p0.weight0..2", "s0.weight0..2=p0.weight0..1").substr(0, 51),
            "[plan] a save must have a source for each slot, got");
  EXPECT_EQ(error("count=3", "count=-1"),
            "[Blend] count must be a number of tensors, 1 to 100000, got -1");
}

}  // namespace
}  // namespace transformer_ops
