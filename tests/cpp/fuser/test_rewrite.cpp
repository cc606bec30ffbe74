// Which rule takes which ops, and what is said where none does.
#include <gtest/gtest.h>

#include "fuser/rewrite.h"
#include "toy.h"

namespace transformer_ops {
namespace {

using toy::nodes;
using toy::ScopedRule;
using toy::ScopedUserFusion;

using Groups = std::vector<StepGroup>;

Groups keep(const Fusion&, const Groups& groups) { return groups; }

Rewritten rewrite_all(const std::vector<OpNode>& ops, const UserRewrite& user = keep) {
  const PlanKey key = toy::key(ops);
  return rewrite(Analysis(ops, key), user);
}

// "name[first..last]" per group.
std::string text(const Groups& groups) {
  std::string text;
  for (const StepGroup& group : groups) {
    text += (text.empty() ? "" : " ") + group.name + "[" + std::to_string(group.first) + ".." +
            std::to_string(group.first + group.count - 1) + "]";
  }
  return text;
}

Rule rule(const std::string& name, int benefit, std::vector<PatternOp> pattern,
          Pass pass = Pass::Forward) {
  return {.name = name, .pass = pass, .benefit = benefit, .pattern = std::move(pattern)};
}

TEST(Rewrite, LeavesOpsAloneWithoutRules) {
  const Rewritten result = rewrite_all(nodes({"Square", "Same"}));
  EXPECT_EQ(text(result.forward), "Square[0..0] Same[1..1]");
  EXPECT_EQ(text(result.backward), "Square[0..0] Same[1..1]");
  EXPECT_TRUE(result.near_misses.empty());
}

TEST(Rewrite, TakesEveryPlaceFromLeftToRightWithoutOverlap) {
  const ScopedRule pair(rule("pair", 10, {{"Same"}, {"Same"}}));
  const auto ops = nodes({"Same", "Same", "Same", "Square", "Same", "Same"});
  EXPECT_EQ(text(rewrite_all(ops).forward), "pair[0..1] Same[2..2] Square[3..3] pair[4..5]");
}

TEST(Rewrite, MatchesAnyOfTheKindsOfAPlace) {
  const ScopedRule either(rule("either", 10, {{"Square", "Scale"}, {"Same"}}));
  EXPECT_EQ(text(rewrite_all(nodes({"Scale", "Same", "Square", "Same"})).forward),
            "either[0..1] either[2..3]");
}

TEST(Rewrite, PrefersBenefitThenName) {
  const ScopedRule low(rule("a_low", 10, {{"Same"}, {"Square"}}));
  const ScopedRule tie(rule("c_high", 20, {{"Square"}, {"Same"}}));
  const ScopedRule high(rule("b_high", 20, {{"Square"}, {"Scale"}}));
  EXPECT_EQ(text(rewrite_all(nodes({"Same", "Square", "Same"})).forward),
            "Same[0..0] c_high[1..2]");
  EXPECT_EQ(text(rewrite_all(nodes({"Same", "Square", "Scale"})).forward),
            "Same[0..0] b_high[1..2]");
}

// Product, [Shift], [Scale], [Add]
Rule optional_rule() {
  return rule("epilogue", 10,
              {{"Product"}, optional_op({"Shift"}), optional_op({"Scale"}), optional_op({"Add"})});
}

TEST(Optional, TakesAsManyAsThereAre) {
  const ScopedRule optional(optional_rule());
  const auto forward = [](const std::vector<std::string>& kinds) {
    return text(rewrite_all(nodes(kinds)).forward);
  };
  EXPECT_EQ(forward({"Product", "Shift", "Scale", "Add"}), "epilogue[0..3]");
  EXPECT_EQ(forward({"Product", "Shift", "Add"}), "epilogue[0..2]");
  EXPECT_EQ(forward({"Product", "Add", "Scale"}), "epilogue[0..1] Scale[2..2]");
  EXPECT_EQ(forward({"Product", "Scale", "Product", "Shift"}), "epilogue[0..1] epilogue[2..3]");
  // One op alone is no fusion.
  EXPECT_EQ(forward({"Product", "Norm", "Add"}), "Product[0..0] Norm[1..1] Add[2..2]");
}

TEST(Optional, MayComeFirst) {
  const ScopedRule rule_(rule("first", 10, {optional_op({"Shift"}), {"Square"}, {"Product"}}));
  EXPECT_EQ(text(rewrite_all(nodes({"Shift", "Square", "Product", "Square", "Product"})).forward),
            "first[0..2] first[3..4]");
}

TEST(Optional, SaysWhichPlacesAreTaken) {
  const ScopedRule optional(optional_rule());
  const Rewritten result = rewrite_all(nodes({"Norm", "Product", "Scale"}));
  EXPECT_EQ(result.forward[1].places, (std::vector<int>{1, -1, 2, -1}));
}

TEST(Optional, TakesFewerWhereTheGuardRefusesAll) {
  Rule guarded = optional_rule();
  guarded.why_not = [](const Match& match) -> std::optional<std::string> {
    if (match.has(3)) return "no sums";
    return std::nullopt;
  };
  const ScopedRule optional(guarded);
  const Rewritten result = rewrite_all(nodes({"Product", "Scale", "Add"}));
  EXPECT_EQ(text(result.forward), "epilogue[0..1] Add[2..2]");
  ASSERT_EQ(result.near_misses.size(), 1u);
  EXPECT_EQ(result.near_misses[0].reason, "no sums");
  EXPECT_EQ(result.near_misses[0].ops, (std::vector<int>{0, 1, 2}));
}

// ---- ops that do nothing

TEST(Idle, IsPassedOverBetweenTwoOps) {
  const ScopedRule forward(rule("pair", 10, {{"Product"}, {"Square"}}));
  const auto ops = nodes({"Product", "Mask", "Same", "Square", "Same"});
  PlanKey key = toy::key(ops);
  EXPECT_EQ(text(rewrite(Analysis(ops, key), keep).forward),
            "Product[0..0] Mask[1..1] Same[2..2] Square[3..3] Same[4..4]");
  key.training.assign(5, false);
  const Rewritten result = rewrite(Analysis(ops, key), keep);
  EXPECT_EQ(text(result.forward), "pair[0..3] Same[4..4]");
  EXPECT_EQ(result.forward[0].places, (std::vector<int>{0, 3}));
}

TEST(Idle, MayBeTakenAsWhatItIs) {
  const ScopedRule forward(rule("mask", 10, {{"Product"}, {"Mask"}, {"Square"}}));
  const auto ops = nodes({"Product", "Same", "Mask", "Mask", "Square"});
  PlanKey key = toy::key(ops);
  key.training.assign(5, false);
  const Rewritten result = rewrite(Analysis(ops, key), keep);
  EXPECT_EQ(text(result.forward), "mask[0..4]");
  EXPECT_EQ(result.forward[0].places, (std::vector<int>{0, 2, 4}));
}

// The guard refuses the idle one; the one behind it is another way to match.
TEST(Idle, IsPassedOverWhereTheGuardWantsAnother) {
  Rule active = rule("mask", 10, {{"Product"}, {"Mask"}});
  active.why_not = [](const Match& match) -> std::optional<std::string> {
    if (match.is_idle(1)) return "off";
    return std::nullopt;
  };
  const ScopedRule forward(active);
  const auto ops = nodes({"Product", "Mask", "Mask"});
  PlanKey key = toy::key(ops);
  key.training = {true, false, true};
  EXPECT_EQ(rewrite(Analysis(ops, key), keep).forward[0].places, (std::vector<int>{0, 2}));
}

TEST(Idle, IsNotPassedOverOnceAFusionTookIt) {
  const ScopedRule forward(rule("pair", 10, {{"Product"}, {"Square"}}));
  const ScopedUserFusion user("user", Pass::Forward);
  const auto result = rewrite_all(
      nodes({"Product", "Same", "Square"}), [](const Fusion&, const Groups& groups) -> Groups {
        return {groups[0], {.first = 1, .python = 3, .name = "Mine"}, groups[2]};
      });
  EXPECT_EQ(text(result.forward), "Product[0..0] Mine[1..1] Square[2..2]");
}

TEST(Rewrite, BothPassesStartFromTheJointOne) {
  const ScopedRule joint(rule("joint", 1, {{"Square"}, {"Product"}}, Pass::Joint));
  const ScopedRule forward(rule("forward", 99, {{"Product"}, {"Shift"}}));
  const ScopedRule backward(rule("backward", 99, {{"Shift"}, {"Same"}}, Pass::Backward));
  const Rewritten result = rewrite_all(nodes({"Square", "Product", "Shift", "Same"}));
  EXPECT_EQ(text(result.forward), "joint[0..1] Shift[2..2] Same[3..3]");
  EXPECT_EQ(text(result.backward), "joint[0..1] backward[2..3]");
  EXPECT_TRUE(result.forward[0].joint);
  EXPECT_TRUE(result.backward[0].joint);
  EXPECT_FALSE(result.backward[1].joint);
}

// ---- near misses

std::string reason(const Rewritten& result) {
  if (result.near_misses.size() != 1) {
    return std::to_string(result.near_misses.size()) + " near misses";
  }
  return result.near_misses[0].reason;
}

TEST(NearMiss, TellsTheGuardsReason) {
  const ScopedRule backward(toy::backward_rule());
  const auto ops = nodes({"Same", "Shift", "Square"});
  PlanKey key = toy::key(ops);
  toy::parameter(key, ops, 1).requires_grad = false;
  const Rewritten result = rewrite(Analysis(ops, key), keep);
  EXPECT_EQ(text(result.backward), "Same[0..0] Shift[1..1] Square[2..2]");
  EXPECT_EQ(reason(result), "the shift needs no gradient");
  EXPECT_EQ(result.near_misses[0].fusion, "square_shift");
  EXPECT_EQ(result.near_misses[0].pass, Pass::Backward);
  EXPECT_EQ(result.near_misses[0].ops, (std::vector<int>{1, 2}));
}

TEST(NearMiss, IsAllButTheLastOp) {
  const ScopedRule forward(toy::forward_rule());
  EXPECT_EQ(reason(rewrite_all(nodes({"Product", "Shift", "Scale"}))),
            "op 2 is Scale where it needs Square");
  EXPECT_EQ(reason(rewrite_all(nodes({"Product", "Shift"}))), "the ops end where it needs Square");
  EXPECT_TRUE(rewrite_all(nodes({"Product", "Square", "Shift"})).near_misses.empty());
  EXPECT_TRUE(rewrite_all(nodes({"Product"})).near_misses.empty());
}

TEST(NearMiss, NamesAllThatAnOptionalOpLeavesOpen) {
  const ScopedRule optional(optional_rule());
  EXPECT_EQ(reason(rewrite_all(nodes({"Product", "Norm"}))),
            "op 1 is Norm where it needs Shift or Scale or Add");
  EXPECT_EQ(reason(rewrite_all(nodes({"Product", "Same"}))),
            "the ops end where it needs Shift or Scale or Add");
  EXPECT_TRUE(rewrite_all(nodes({"Product", "Shift", "Norm"})).near_misses.empty());
}

TEST(NearMiss, IsAtTheFurthestOp) {
  const ScopedRule forward(rule("sandwich", 10, {{"Product"}, optional_op({"Shift"}), {"Square"}}));
  EXPECT_EQ(reason(rewrite_all(nodes({"Product", "Shift", "Same", "Scale"}))),
            "op 3 is Scale where it needs Square");
  EXPECT_EQ(reason(rewrite_all(nodes({"Product", "Scale"}))),
            "op 1 is Scale where it needs Shift or Square");
}

// All that the rule would have taken lies in one step.
TEST(NearMiss, IsNoneInsideALargerFusion) {
  const ScopedRule fired(rule("three", 20, {{"Square"}, {"Shift"}, {"Scale"}}));
  const ScopedRule inside(rule("pair", 30, {{"Shift"}, {"Norm"}}));
  EXPECT_TRUE(rewrite_all(nodes({"Square", "Shift", "Scale"})).near_misses.empty());
}

TEST(NearMiss, NamesWhoTookTheOp) {
  const ScopedRule joint(toy::joint_rule());
  const ScopedRule forward(rule("shift_square", 10, {{"Shift"}, {"Square"}}));
  EXPECT_EQ(reason(rewrite_all(nodes({"Shift", "Square", "Product"}))),
            "op 1 is taken by square_product");
}

// A longer rule would have taken more, and is missed.
TEST(NearMiss, IsNoneWhereAFusionTookAsManyOps) {
  const ScopedRule fired(rule("square_shift", 20, {{"Square"}, {"Shift"}}));
  const ScopedRule as_long(rule("square_scale", 30, {{"Square"}, {"Scale"}}));
  const ScopedRule longer(rule("square_shift_norm", 30, {{"Square"}, {"Shift"}, {"Norm"}}));
  const Rewritten result = rewrite_all(nodes({"Square", "Shift"}));
  EXPECT_EQ(reason(result), "the ops end where it needs Norm");
}

TEST(NearMiss, NamesAPythonOp) {
  const ScopedRule forward(rule("shift_square", 10, {{"Shift"}, {"Square"}}));
  auto ops = nodes({"Shift"});
  ops.push_back(toy::python_node("Square"));
  EXPECT_EQ(reason(rewrite_all(ops)), "op 1 is a Python op");
}

// ---- users' functions

TEST(UserRewrite, RunsInEveryPassBeforeTheRules) {
  const ScopedRule forward(rule("native", 99, {{"Same"}, {"Same"}}));
  const ScopedUserFusion joint("user_joint", Pass::Joint), user("user", Pass::Forward),
      backward("user_backward", Pass::Backward);
  std::vector<std::string> calls;
  const auto result =
      rewrite_all(nodes({"Same", "Same"}), [&](const Fusion& fusion, const Groups& groups) {
        calls.push_back(fusion.name + ": " + text(groups));
        return groups;
      });
  EXPECT_EQ(calls, (std::vector<std::string>{"user_joint: Same[0..0] Same[1..1]",
                                             "user: Same[0..0] Same[1..1]",
                                             "user_backward: Same[0..0] Same[1..1]"}));
  EXPECT_EQ(text(result.forward), "native[0..1]");
}

TEST(UserRewrite, TakesOpsAwayFromRules) {
  const ScopedRule native(rule("native", 99, {{"Same"}, {"Square"}}));
  const ScopedUserFusion user("user", Pass::Forward);
  const auto result = rewrite_all(
      nodes({"Same", "Square", "Scale"}), [](const Fusion&, const Groups& groups) -> Groups {
        return {groups[0], {.first = 1, .count = 2, .python = 3, .name = "Mine"}};
      });
  EXPECT_EQ(text(result.forward), "Same[0..0] Mine[1..2]");
  EXPECT_EQ(text(result.backward), "Same[0..0] Square[1..1] Scale[2..2]");
  EXPECT_EQ(reason(result), "op 1 is taken by Mine");
  EXPECT_FALSE(result.forward[1].joint);
}

TEST(UserRewrite, KeepsANativeOpThatItTookAlone) {
  const ScopedRule native(rule("native", 99, {{"Same"}, {"Square"}}));
  const ScopedUserFusion user("user", Pass::Forward);
  const auto result =
      rewrite_all(nodes({"Same", "Square"}), [](const Fusion&, const Groups& groups) -> Groups {
        return {groups[0], {.first = 1, .python = 2, .name = "Mine"}};
      });
  EXPECT_EQ(text(result.forward), "Same[0..0] Mine[1..1]");
}

TEST(UserRewrite, IsJointInTheJointPass) {
  const ScopedUserFusion user("user", Pass::Joint);
  auto ops = nodes({"Same", "Square"});
  ops.push_back(toy::python_node("Custom"));
  const auto result = rewrite_all(ops, [](const Fusion&, const Groups& groups) -> Groups {
    return {{.first = 0, .count = 2, .python = 3, .name = "Mine"}, groups[2]};
  });
  EXPECT_EQ(text(result.forward), "Mine[0..1] Custom[2..2]");
  EXPECT_TRUE(result.forward[0].joint);
  EXPECT_TRUE(result.backward[0].joint);
  EXPECT_FALSE(result.forward[1].joint);
}

TEST(UserRewrite, ErrorsPassThrough) {
  const ScopedUserFusion user("user", Pass::Joint);
  EXPECT_THROW(rewrite_all(nodes({"Same"}),
                           [](const Fusion&, const Groups&) -> Groups {
                             throw std::invalid_argument("mine");
                           }),
               std::invalid_argument);
}

// ---- users' patterns

// Takes ops by their kinds, as the patterns of a host language do.
UserPattern by_kind(const std::vector<OpNode>& ops, std::optional<std::string> reason = {}) {
  return [=](const Fusion& fusion, const Groups& groups) {
    UserMatcher user;
    for (const PatternOp& entry : fusion.pattern) {
      auto& row = user.fits.emplace_back();
      for (const StepGroup& group : groups) {
        const bool is_free = group.count == 1 && !group.rule;
        row.push_back(is_free && std::ranges::count(entry.kinds, ops[group.first].kind) > 0);
      }
    }
    user.why_not = [=](int, int count) { return count > 2 ? reason : std::nullopt; };
    user.make = [](int first, int count) {
      return StepGroup{.first = first, .count = count, .python = 9, .name = "Mine"};
    };
    return user;
  };
}

Rewritten rewrite_with(const std::vector<std::string>& kinds, std::optional<std::string> why = {}) {
  const std::vector<OpNode> ops = nodes(kinds);
  const PlanKey key = toy::key(ops);
  return rewrite(Analysis(ops, key), keep, by_kind(ops, std::move(why)));
}

TEST(UserPattern, TakesOptionalOpsAndGoesBeforeTheRules) {
  const ScopedRule native(rule("native", 99, {{"Product"}, {"Shift"}}));
  const ScopedUserFusion user("user", Pass::Forward, false,
                              {{"Product"}, optional_op({"Shift"}), {"Square", "Scale"}});
  EXPECT_EQ(text(rewrite_with({"Product", "Shift", "Scale", "Product", "Square"}).forward),
            "Mine[0..2] Mine[3..4]");
  EXPECT_EQ(text(rewrite_with({"Product", "Shift", "Norm"}).forward), "native[0..1] Norm[2..2]");
}

TEST(UserPattern, TakesOneOpAlone) {
  const ScopedUserFusion user("user", Pass::Forward, false, {{"Square"}, optional_op({"Scale"})});
  EXPECT_EQ(text(rewrite_with({"Square", "Scale", "Square"}).forward), "Mine[0..1] Mine[2..2]");
}

TEST(UserPattern, IsToldOfWhereItWasRefusedAlsoWhereARuleTookTheOps) {
  const ScopedRule native(rule("native", 99, {{"Product"}, {"Shift"}, {"Square"}}));
  const ScopedUserFusion user("user", Pass::Forward, false, {{"Product"}, {"Shift"}, {"Square"}});
  const Rewritten result = rewrite_with({"Product", "Shift", "Square"}, "too many");
  EXPECT_EQ(text(result.forward), "native[0..2]");
  ASSERT_EQ(result.near_misses.size(), 1u);
  const NearMiss& miss = result.near_misses[0];
  EXPECT_EQ(miss.fusion, "user");
  EXPECT_EQ(miss.reason, "too many");
  EXPECT_EQ(miss.matched, 3);
  EXPECT_FALSE(miss.structural);
}

TEST(UserPattern, SaysHowFarItCame) {
  const ScopedUserFusion user("user", Pass::Forward, false, {{"Product"}, {"Shift"}, {"Square"}});
  const Rewritten result = rewrite_with({"Product", "Shift", "Norm"});
  ASSERT_EQ(result.near_misses.size(), 1u);
  EXPECT_EQ(result.near_misses[0].matched, 2);
  EXPECT_TRUE(result.near_misses[0].structural);
}

TEST(UserPattern, NeedsAHost) {
  const ScopedUserFusion user("user", Pass::Forward, false, {{"Square"}});
  EXPECT_EQ(text(rewrite_all(nodes({"Square"})).forward), "Square[0..0]");
}

}  // namespace
}  // namespace transformer_ops
