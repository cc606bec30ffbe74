// Parameters that are held as codes and scales.
#include <gtest/gtest.h>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;
using toy::nodes;
using toy::steps_text;

// With the first parameter of an op in this format.
Plan plan_of(const std::vector<OpNode>& ops, int op, const std::string& format) {
  PlanKey key = toy::key(ops);
  toy::parameter(key, ops, op).format = NumberFormat::named(format);
  return toy::plan(ops, key);
}

TEST(Quantized, ParametersAreDecodedInBothPasses) {
  const Plan plan = plan_of(nodes({"Square", "Product"}), 1, "mx e4m3");
  EXPECT_EQ(steps_text(plan), R"(first_backward 0
forward Square ops=[0]
  x1 = square(x0)
  save s0.input=x0
forward Product ops=[1]
  t1.weight = dequantize(p1.weight.codes, p1.weight.scale, "mx e4m3", "float32", none)
  x2 = product(x1, t1.weight)
  save s1.input=x1, s1.weight=p1.weight
backward Square ops=[0]
  g0 = square_backward(g1, s0.input)
backward Product ops=[1]
  t1.weight = dequantize.saved(g2, p1.weight.codes, p1.weight.scale, "mx e4m3", "float32", none)
  g1, dp1.weight = product_backward(g2, s1.input, t1.weight, [true, true])
)");
  EXPECT_NE(to_text(plan).find("\nparameters p1.weight p1.weight.codes p1.weight.scale\n"),
            std::string::npos);
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
  EXPECT_TRUE(plan.has_quantized_parameters());
  EXPECT_EQ(plan.whole_parameters(), (std::vector<Value>{{Value::Kind::Parameter, 1, "weight"}}));
}

TEST(Quantized, ParametersAreDecodedIntoTheDTypeOfTheProduct) {
  const auto ops = nodes({"Product"});
  PlanKey key = toy::key(ops);
  key.autocast = DType::BFloat16;
  toy::parameter(key, ops, 0).format = NumberFormat::named("int8 1x32");
  const std::string text = to_text(toy::plan(ops, key));
  EXPECT_NE(text.find("\"int8 1x32\", \"bfloat16\", none)"), std::string::npos);
  EXPECT_EQ(text.find("cast(p0.weight"), std::string::npos);
}

TEST(Quantized, TheirOwnClassMayDecodeThem) {
  const Plan plan = plan_of(nodes({"Product"}), 0, "of its class");
  const std::string text = to_text(plan);
  const std::string decoding =
      "t0.weight = dequantize(p0.weight.codes, p0.weight.scale, \"of its class\"";
  EXPECT_NE(text.find(decoding), std::string::npos);
  EXPECT_EQ(parse_plan(text), plan);
  EXPECT_EQ(error_of([] { recipe_of("e4m3, of its class, e4m3"); }),
            "[recipe] format must be one that rounds, got 'e4m3, of its class, e4m3'");
}

TEST(Quantized, ParametersThatAreNoOperandsAreRefused) {
  EXPECT_EQ(error_of([] { plan_of(nodes({"Shift"}), 0, "e4m3"); }),
            "[Shift] shift must be a plain tensor, got one that is quantized as e4m3");
}

TEST(Quantized, PartsStandBehindTheirParameter) {
  const std::string text = to_text(plan_of(nodes({"Product"}), 0, "e4m3"));
  const std::string right = "parameters p0.weight p0.weight.codes p0.weight.scale";
  ASSERT_NE(text.find(right), std::string::npos);
  for (const char* wrong :
       {"parameters p0.weight p0.weight.scale p0.weight.codes", "parameters p0.weight.codes",
        "parameters p0.weight p0.weight.codes", "parameters p0.weight p0.weight.scale"}) {
    std::string changed = text;
    changed.replace(changed.find(right), right.size(), wrong);
    EXPECT_THROW(parse_plan(changed), PlanError) << wrong;
  }
  EXPECT_THROW(NumberFormat::named("e9m9"), PlanError);
  EXPECT_EQ(NumberFormat::named("nvfp4 16x16").name(), "nvfp4 16x16");
  EXPECT_EQ(NumberFormat().name(), "");
}

}  // namespace
}  // namespace transformer_ops
