// What is known of a list of ops before any fusion, and what a guard may ask of a match.
#include <gtest/gtest.h>

#include "fuser/rule.h"
#include "toy.h"

namespace transformer_ops {
namespace {

using toy::connect;
using toy::nodes;

TEST(Analysis, ABoundaryNeedsAGradientWhereAnythingBeforeItDoes) {
  auto ops = nodes({"Product", "Fork", "Add", "Add", "Square"});
  connect(ops, 1, 2);
  PlanKey key = toy::key(ops, /*grad=*/false);
  key.grad_enabled = true;
  const auto at = [&](int boundary) { return Analysis(ops, key).needs_grad(boundary); };
  const auto first = [&] { return Analysis(ops, key).first_backward(); };
  EXPECT_FALSE(at(5));
  EXPECT_EQ(first(), 5);
  // The only one from the caller goes into op 3.
  key.tensors[1].requires_grad = true;
  EXPECT_FALSE(at(3));
  EXPECT_TRUE(at(4));
  EXPECT_EQ(first(), 3);
  toy::parameter(key, ops, 0).requires_grad = true;
  EXPECT_FALSE(at(0));
  EXPECT_TRUE(at(1));
  EXPECT_EQ(first(), 0);
  key.tensors[0].requires_grad = true;
  EXPECT_TRUE(at(0));
  EXPECT_EQ(first(), 0);
  key.grad_enabled = false;
  EXPECT_FALSE(at(4));
  EXPECT_EQ(first(), 5);
}

TEST(Analysis, AnExtraOutputIsReadByTheCallerOrAChannel) {
  auto ops = nodes({"Same", "Fork", "Add"});
  const auto is_read = [&] {
    const PlanKey key = toy::key(ops);
    return Analysis(ops, key).extra_output_is_read(1, 0);
  };
  const auto readers = [&] {
    const PlanKey key = toy::key(ops);
    return Analysis(ops, key).readers(1, 0);
  };
  ops[1].visible = {false};
  EXPECT_FALSE(is_read());
  connect(ops, 1, 2, /*visible=*/false);
  EXPECT_TRUE(is_read());
  EXPECT_EQ(readers(), std::vector<int>{2});
  ops[2].sources = {std::nullopt};
  ops[1].visible = {true};
  EXPECT_TRUE(is_read());
  EXPECT_TRUE(readers().empty());
}

TEST(Analysis, DtypesFollowTheOps) {
  auto ops = nodes({"Square", "Fork", "Product", "Add", "Add"});
  connect(ops, 1, 4);
  PlanKey key = toy::key(ops);
  toy::parameter(key, ops, 2).dtype = DType::BFloat16;
  key.tensors[1].dtype = DType::Float64;  // of op 3
  const Analysis analysis(ops, key);
  using enum DType;
  EXPECT_EQ(analysis.dtypes(),
            (std::vector<DType>{Float32, Float32, Float32, BFloat16, Float64, Float64}));
  EXPECT_EQ(analysis.compute_dtype(2), BFloat16);
  EXPECT_EQ(analysis.required_dtype(0), std::nullopt);
  EXPECT_EQ(analysis.extra_input_dtype(3, 0), Float64);
  EXPECT_EQ(analysis.extra_input_dtype(4, 0), Float32);
}

// ---- the dtype of a fused gradient of an extra output

Rule fork_square() {
  return {.name = "fork_square",
          .pass = Pass::Backward,
          .benefit = 10,
          .pattern = {{"Fork"}, {"Square"}},
          .backward =
              "fork_square_backward(Tensor grad_output, Tensor grad_extra_output, "
              "Tensor input) -> Tensor grad_input"};
}

// The dtype to which the fused step casts what it gives; empty where it does not.
std::string cast_of(const std::vector<OpNode>& ops, const PlanKey& key) {
  for (const Step& step : toy::plan(ops, key).backward) {
    if (step.name != "fork_square") continue;
    const Instruction& last = step.instructions.back();
    if (last.target != kCast) return "";
    return std::get<std::string>(std::get<Attribute>(last.arguments[1]));
  }
  ADD_FAILURE() << "the rule did not fire";
  return "";
}

TEST(FusedExtraGradient, IsCastOnlyWhereASumIsWider) {
  const toy::ScopedRule rule(fork_square());
  auto ops = nodes({"Same", "Fork", "Square", "Add", "Add"});
  connect(ops, 1, 3);
  PlanKey key = toy::key(ops);
  EXPECT_EQ(cast_of(ops, key), "");
  key.tensors[1].dtype = DType::Float64;  // of the last op: after the sum
  EXPECT_EQ(cast_of(ops, key), "");
  ops = nodes({"Same", "Fork", "Square", "Add", "Add"});
  connect(ops, 1, 4);
  EXPECT_EQ(cast_of(ops, key), "float32");
}

}  // namespace
}  // namespace transformer_ops
