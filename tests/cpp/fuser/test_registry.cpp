// Order, names and version of the fusion registry.
#include <gtest/gtest.h>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;
using toy::ScopedRule;
using toy::ScopedUserFusion;

std::vector<std::string> names(Pass pass) {
  std::vector<std::string> names;
  for (const Fusion& fusion : fusions(pass)) names.push_back(fusion.name);
  return names;
}

Rule rule(const std::string& name, Pass pass, int benefit) {
  return {.name = name, .pass = pass, .benefit = benefit, .pattern = {{"Same"}}};
}

TEST(Registry, OrdersRulesByBenefitThenName) {
  const ScopedRule a(rule("b", Pass::Forward, 10)), b(rule("c", Pass::Forward, 20)),
      c(rule("a", Pass::Forward, 10));
  EXPECT_EQ(names(Pass::Forward), (std::vector<std::string>{"c", "a", "b"}));
}

TEST(Registry, RunsUsersFusionsFirst) {
  const ScopedRule native(rule("native", Pass::Forward, 1000));
  const ScopedUserFusion first("first", Pass::Forward), second("second", Pass::Forward),
      before("before", Pass::Forward, true), very_first("very_first", Pass::Forward, true);
  EXPECT_EQ(names(Pass::Forward),
            (std::vector<std::string>{"very_first", "before", "first", "second", "native"}));
}

TEST(Registry, KeepsPassesApartAndInTheirOrder) {
  const ScopedRule backward(rule("same_name", Pass::Backward, 50)),
      forward(rule("same_name", Pass::Forward, 10)), joint(rule("same_name", Pass::Joint, 1));
  EXPECT_EQ(names(Pass::Forward), std::vector<std::string>{"same_name"});
  std::vector<Pass> passes;
  for (const Fusion& fusion : fusions()) passes.push_back(fusion.pass);
  EXPECT_EQ(passes, (std::vector<Pass>{Pass::Joint, Pass::Forward, Pass::Backward}));
  EXPECT_STREQ(to_text(Pass::Joint), "forward_backward");
}

TEST(Registry, RefusesANameTwiceInAPass) {
  const ScopedRule first(rule("taken", Pass::Forward, 10));
  const int64_t version = registry_version();
  EXPECT_EQ(error_of([] { add_rule(rule("taken", Pass::Forward, 20)); }),
            "[fusion] name must be new in its pass, got 'taken'");
  EXPECT_EQ(registry_version(), version);
}

TEST(Registry, RefusesAPatternWithoutAnOpThatHasToBeThere) {
  const int64_t version = registry_version();
  Rule wrong = rule("wrong", Pass::Forward, 10);
  wrong.pattern = {};
  EXPECT_EQ(error_of([&] { add_rule(wrong); }),
            "[fusion] pattern of 'wrong' must have an op that is not optional, got 0 entries");
  wrong.pattern = {optional_op({"Same"}), optional_op({"Same"})};
  EXPECT_EQ(error_of([&] { add_rule(wrong); }),
            "[fusion] pattern of 'wrong' must have an op that is not optional, got 2 entries");
  wrong.pattern = {{"Same"}, optional_op({})};
  EXPECT_EQ(error_of([&] { add_rule(wrong); }),
            "[fusion] each entry of the pattern of 'wrong' must name a kind, got none");
  EXPECT_EQ(registry_version(), version);
}

TEST(Registry, RefusesARecomputationThatPlansCannotCall) {
  const int64_t version = registry_version();
  const auto error_with = [](const std::string& recompute, int entry, bool has_forward = true) {
    Rule wrong{.name = "wrong", .pass = Pass::Forward, .benefit = 10};
    wrong.pattern = {{"Product"}, {"Shift"}, {"Mask"}};
    if (has_forward)
      wrong.forward = "wrong(Tensor input, Tensor weight, Tensor shift) -> Tensor output";
    wrong.recompute = recompute;
    wrong.recomputed = entry;
    return error_of([&] { checked(wrong); });
  };
  const std::string place = "[fusion] recompute of 'wrong' must ";
  const std::string start = "again(Tensor input, Tensor weight, ";
  EXPECT_EQ(error_with(start + "Tensor shift) -> Tensor output", 1), "no error");
  EXPECT_EQ(error_with(start + "Tensor shifts) -> Tensor output", 1),
            place + "bind 'shifts', or take what an op that it covers has, got neither");
  // The mask belongs to an op behind the entry.
  EXPECT_EQ(error_with(start + "Tensor mask) -> Tensor output", 2), "no error");
  EXPECT_EQ(error_with(start + "Tensor mask) -> Tensor output", 1),
            place + "bind 'mask', or take what an op that it covers has, got neither");
  const std::string other = start + "Tensor shift) -> Tensor result";
  EXPECT_EQ(error_with(other, 1), place + "return 'output' alone, got '" + other + "'");
  EXPECT_EQ(error_with(start + "Tensor shift) -> Tensor output", 3),
            place + "be for an entry of the pattern, got entry 3 of 3");
  EXPECT_EQ(error_with(start + "Tensor shift) -> Tensor output", 1, false),
            place + "belong to a rule with a forward, got none");
  EXPECT_EQ(registry_version(), version);
}

TEST(Registry, ChecksARuleWithoutAddingIt) {
  const int64_t version = registry_version();
  Rule given = rule("checked", Pass::Forward, 10);
  given.forward = "checked(Tensor input) -> Tensor output";
  EXPECT_TRUE(checked(given).forward_schema.has_result("output"));
  EXPECT_EQ(registry_version(), version);
  const ScopedRule first(rule("taken", Pass::Forward, 10));
  EXPECT_EQ(error_of([] { checked(rule("taken", Pass::Forward, 20)); }),
            "[fusion] name must be new in its pass, got 'taken'");
}

TEST(Registry, NameIsFreeAgainOnceRemoved) {
  { const ScopedRule first(rule("again", Pass::Forward, 10)); }
  const ScopedRule second(rule("again", Pass::Forward, 20));
  EXPECT_EQ(names(Pass::Forward), std::vector<std::string>{"again"});
}

TEST(Registry, VersionGrowsWithEveryChange) {
  const int64_t start = registry_version();
  const int64_t id = add_user_fusion("user", Pass::Joint, "test.py:1", false);
  EXPECT_EQ(registry_version(), start + 1);
  EXPECT_TRUE(remove_fusion(id));
  EXPECT_EQ(registry_version(), start + 2);
  EXPECT_FALSE(remove_fusion(id));
  EXPECT_EQ(registry_version(), start + 2);
}

TEST(Registry, TellsOriginAndKind) {
  const ScopedUserFusion user("user", Pass::Joint);
  const ScopedRule native(rule("native", Pass::Joint, 1));
  const auto rows = fusions(Pass::Joint);
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_EQ(rows[0].rule, nullptr);
  EXPECT_EQ(rows[0].origin, "test");
  ASSERT_NE(rows[1].rule, nullptr);
  EXPECT_EQ(rows[1].rule->name, "native");
  EXPECT_NE(rows[0].id, rows[1].id);
}

}  // namespace
}  // namespace transformer_ops
