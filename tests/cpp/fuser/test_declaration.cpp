#include <gtest/gtest.h>

#include "fuser/declaration.h"
#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;

TEST(Declaration, IsFoundByKindWithItsSchemasParsed) {
  EXPECT_TRUE(is_declared("Norm"));
  EXPECT_TRUE(declaration("Norm").forward_schema.has_result("rstd"));
  EXPECT_TRUE(declaration("Same").forward_schema.empty());
}

TEST(Declaration, NamesAnUnknownKind) {
  EXPECT_FALSE(is_declared("Nothing"));
  EXPECT_EQ(error_of([] { declaration("Nothing"); }),
            "[plan] op kind must be declared, got 'Nothing'");
}

TEST(Declaration, IsMadeOnce) {
  EXPECT_EQ(error_of([] { add_declaration({.kind = "Same"}); }),
            "[declaration] op kind must be declared once, got 'Same'");
}

TEST(Declaration, WithAWrongSchemaLeavesNothing) {
  EXPECT_EQ(error_of([] { add_declaration({.kind = "Broken", .forward = "f(Tensor x)"}); }),
            "[schema] must read 'name(...) -> ...', got 'f(Tensor x)'");
  EXPECT_FALSE(is_declared("Broken"));
}

TEST(Declaration, HasOneThingOfAName) {
  EXPECT_EQ(error_of([] {
              add_declaration({.kind = "Twice", .parameters = {"scale"}, .attributes = {"scale"}});
            }),
            "[declaration] 'Twice' must have one 'scale', got two");
  EXPECT_EQ(error_of([] {
              add_declaration({.kind = "Twice", .attributes = {"is_on"}, .flags = {"is_on"}});
            }),
            "[declaration] 'Twice' must have one 'is_on', got two");
  EXPECT_EQ(error_of([] { add_declaration({.kind = "Twice", .extra_inputs = {"input"}}); }),
            "[declaration] 'Twice' must have one 'input', got two");
  EXPECT_FALSE(is_declared("Twice"));
}

TEST(Declaration, ARecomputationTakesWhatItsOpHas) {
  const auto error_with = [](const std::string& recompute) {
    return error_of([&] {
      checked(
          {.kind = "Lost", .parameters = {"shift"}, .slots = {{"mask"}}, .recompute = recompute});
    });
  };
  const std::string start = "again(Tensor grad_output, Tensor input, ";
  EXPECT_EQ(error_with(start + "Tensor shift, Tensor mask) -> Tensor output"), "no error");
  EXPECT_EQ(error_with(start + "Tensor shifts) -> Tensor output"),
            "[declaration] recompute of 'Lost' must take input, grad_output, slots, parameters, "
            "extra inputs and attributes, got 'shifts'");
  const std::string other = start + "Tensor mask) -> (Tensor output, Tensor mask)";
  EXPECT_EQ(error_with(other),
            "[declaration] recompute of 'Lost' must return 'output' alone, got '" + other + "'");
}

TEST(Declaration, SaysWhichTensorsMayBeNoneAndWhichHoldIntegers) {
  const OpDeclaration& pick = declaration("Pick");
  EXPECT_TRUE(pick.is_optional("rows") && pick.is_optional("table"));
  EXPECT_FALSE(pick.is_optional("ids") || pick.is_optional("input"));
  EXPECT_TRUE(pick.is_integer("ids") && !pick.is_integer("rows"));
  EXPECT_EQ(error_of([] { add_declaration({.kind = "Lost", .integers = {"ids"}}); }),
            "[declaration] 'Lost' must have integers among its extra tensors, got 'ids'");
}

TEST(Declaration, AStateIsOfAParameterAndAnAttribute) {
  const OpDeclaration& tally = declaration("Tally");
  ASSERT_NE(tally.state_of("weight", {{"tallies", Attribute(true)}}), nullptr);
  EXPECT_EQ(tally.state_of("weight", {{"tallies", Attribute(true)}})->name, "total");
  EXPECT_EQ(tally.state_of("weight", {{"tallies", Attribute(false)}}), nullptr);
  EXPECT_EQ(tally.state_of("bias", {{"tallies", Attribute(true)}}), nullptr);
  EXPECT_EQ(error_of([] {
              add_declaration({.kind = "Lost", .attributes = {"on"}, .states = {{"s", "w", "on"}}});
            }),
            "[declaration] 'Lost' must have the parameter and the attribute of state 's', got 'w' "
            "and 'on'");
}

TEST(Declaration, AGradientThatIsLeftForLaterNeedsAMask) {
  const std::string backward =
      "late_backward(Tensor grad_output) -> (Tensor grad_input, Tensor grad_w)";
  EXPECT_EQ(error_of([&] {
              add_declaration({.kind = "Late",
                               .parameters = {"w"},
                               .attributes = {"on"},
                               .states = {{"s", "w", "on", /*later=*/true}},
                               .backward = backward});
            }),
            "[declaration] 'Late' must have an output_mask for state 's', got '" + backward + "'");
}

TEST(SlotBits, FollowTheNameOfTheSlot) {
  EXPECT_EQ(slot_bits(declaration("Norm"), "input", 64, 16), 64 * 16);
  EXPECT_EQ(slot_bits(declaration("Norm"), "rstd", 64, 16), 32);
  EXPECT_EQ(slot_bits(declaration("Norm"), "rstd", 64, 64), 64);
  EXPECT_EQ(slot_bits(declaration("Mask"), "mask", 64, 16), 64);
  EXPECT_EQ(slot_bits(declaration("Product"), "weight", 64, 16), 0);
}

TEST(SlotBits, AreUnknownWhereTheWidthIs) {
  EXPECT_EQ(slot_bits(declaration("Norm"), "input", -1, 16), -1);
  EXPECT_EQ(slot_bits(declaration("Norm"), "rstd", -1, 16), 32);
}

TEST(SlotBits, GiveWayToTheDeclaration) {
  OpDeclaration row{.kind = "Seeded", .slots = {{"seed"}}};
  row.slot_bits = [](const std::string&, int64_t, int64_t) { return 0; };
  EXPECT_EQ(slot_bits(row, "seed", 64, 16), 0);
}

}  // namespace
}  // namespace transformer_ops
