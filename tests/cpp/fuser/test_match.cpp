// What a guard may ask of a match.
#include <gtest/gtest.h>

#include "fuser/rule.h"
#include "toy.h"

namespace transformer_ops {
namespace {

using toy::connect;
using toy::nodes;

TEST(Match, InputRequiresGradWhereAnythingBeforeItDoes) {
  auto ops = nodes({"Product", "Fork", "Add", "Add", "Square"});
  connect(ops, 1, 2);
  Facts facts = toy::facts(ops, /*grad=*/false);
  facts.grad_enabled = true;
  const auto at = [&](int first) { return Match{ops, facts, first}.input_requires_grad(); };
  EXPECT_FALSE(at(4));
  // The only one from the caller goes into op 3.
  facts.extra_inputs[0].requires_grad = true;
  EXPECT_FALSE(at(3));
  EXPECT_TRUE(at(4));
  facts.parameters[0][0].requires_grad = true;
  EXPECT_FALSE(at(0));
  EXPECT_TRUE(at(1));
  facts.input.requires_grad = true;
  EXPECT_TRUE(at(0));
  facts.grad_enabled = false;
  EXPECT_FALSE(at(4));
}

TEST(Match, ExtraOutputIsReadByTheCallerOrAChannel) {
  auto ops = nodes({"Same", "Fork", "Add"});
  const Facts facts = toy::facts(ops);
  const auto is_read = [&] { return Match{ops, facts, 1}.extra_output_is_read(0); };
  ops[1].visible = {false};
  EXPECT_FALSE(is_read());
  connect(ops, 1, 2, /*visible=*/false);
  EXPECT_TRUE(is_read());
  ops[2].sources = {std::nullopt};
  ops[1].visible = {true};
  EXPECT_TRUE(is_read());
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

std::optional<DType> cast_of(const std::vector<OpNode>& ops, const Facts& facts) {
  for (const Step& step : toy::plan(ops, facts).backward) {
    if (step.name == "fork_square") return step.result;
  }
  ADD_FAILURE() << "the rule did not fire";
  return std::nullopt;
}

TEST(FusedExtraGradient, IsCastOnlyWhereASumIsWider) {
  const toy::ScopedRule rule(fork_square());
  auto ops = nodes({"Same", "Fork", "Square", "Add", "Add"});
  connect(ops, 1, 3);
  Facts facts = toy::facts(ops);
  EXPECT_EQ(cast_of(ops, facts), std::nullopt);
  facts.extra_inputs[0].dtype = DType::Float64;  // of the last op: after the sum
  EXPECT_EQ(cast_of(ops, facts), std::nullopt);
  ops = nodes({"Same", "Fork", "Square", "Add", "Add"});
  connect(ops, 1, 4);
  EXPECT_EQ(cast_of(ops, facts), DType::Float32);
}

}  // namespace
}  // namespace transformer_ops
