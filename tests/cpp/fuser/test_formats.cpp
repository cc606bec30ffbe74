// Recipes as texts, and the formats that they name.
#include <gtest/gtest.h>

#include "fuser/error.h"
#include "fuser/recipe.h"

namespace transformer_ops {
namespace {

NumberFormat named(const char* name) { return NumberFormat::named(name); }

TEST(Recipe, IsOnePointerForEachText) {
  const Recipe* const recipe = recipe_of("mx e4m3, exact, e5m2 1x128");
  EXPECT_EQ(recipe, recipe_of("mx e4m3, exact, e5m2 1x128"));
  EXPECT_NE(recipe, recipe_of("mx e4m3, exact, e5m2"));
  EXPECT_EQ(recipe->all.format("input"), named("mx e4m3"));
  EXPECT_TRUE(recipe->all.format("weight").is_exact());
  EXPECT_EQ(recipe->all.format("grad_output").name(), "e5m2 1x128");
  EXPECT_EQ(to_text(*recipe), "mx e4m3, exact, e5m2 1x128");
  const std::string chosen =
      "nvfp4 4over6 mse, nvfp4 4over6 448 16x16, nvfp4, hadamard, stochastic";
  EXPECT_EQ(to_text(*recipe_of(chosen)), chosen);
}

TEST(Recipe, MayNameSingleOps) {
  const std::string text = "mx e4m3, exact, exact; 2: exact, exact, exact; 5: e4m3, e4m3, e5m2";
  const Recipe& recipe = *recipe_of(text);
  EXPECT_EQ(recipe.of(1).input, named("mx e4m3"));
  EXPECT_TRUE(recipe.of(2).is_exact());
  EXPECT_EQ(recipe.of(5).grad_output, named("e5m2"));
  EXPECT_EQ(to_text(recipe), text);
  EXPECT_EQ(recipe_of("custom 7")->custom, 7);
  EXPECT_EQ(to_text(*recipe_of("custom 7")), "custom 7");
}

TEST(Recipe, RefusesWhatIsNone) {
  for (const char* text :
       {"", "mx e4m3", "mx e4m3, exact", "mx e4m3, exact, fp8", "exact, exact, exact, exact",
        "mx e4m3,exact,exact", "custom", "custom -1", "custom x", "exact, exact, exact; 1",
        "exact, exact, exact; x: exact, exact, exact", "exact, exact, exact; 1: exact",
        "mx e4m3, mx e4m3, mx e4m3, delayed 4", "e4m3, e4m3 pow2, e5m2, delayed 4"}) {
    EXPECT_THROW(recipe_of(text), PlanError) << text;
  }
}

TEST(ColumnFormat, TurnsBlocksThatArePartsOfARow) {
  EXPECT_EQ(named("mx e5m2").of_columns().name(), "mx e5m2 32x1");
  EXPECT_EQ(named("e4m3 1x128").of_columns().name(), "e4m3 128x1");
  EXPECT_EQ(named("nvfp4").of_columns().name(), "nvfp4 16x1");
  EXPECT_EQ(named("nvfp4 4over6").of_columns().name(), "nvfp4 4over6 16x1");
  EXPECT_EQ(named("nvfp4 4over6 mse 448").of_columns().name(), "nvfp4 4over6 mse 448 16x1");
  for (const char* same : {"", "e4m3", "e5m2 pow2", "e4m3 128x128", "nvfp4 16x16",
                           "nvfp4 4over6 16x16", "mx e5m2 32x1"}) {
    EXPECT_EQ(named(same).of_columns().name(), same);
  }
  EXPECT_THROW(named("int8 1x32").of_columns(), PlanError);
}

TEST(Formats, WithOneScaleForATensor) {
  EXPECT_EQ(NumberFormat::of_tensor(448.0f).name(), "e4m3");
  EXPECT_EQ(NumberFormat::of_tensor(57344.0f).name(), "e5m2");
  EXPECT_EQ(NumberFormat::of_tensor(6.0f).name(), "");
  for (const char* format : {"e4m3", "e4m3 pow2"}) {
    EXPECT_TRUE(named(format).has_one_scale());
    EXPECT_EQ(named(format).codes_dtype(), "float8_e4m3fn");
    // Its scale is that of no block, and a product takes it beside the codes.
    EXPECT_FALSE(are_multiplied_in_blocks({named(format), named(format)}));
    EXPECT_EQ(named(format).operand_dtype(DType::BFloat16, true), DType::BFloat16);
    EXPECT_EQ(named(format).operand_dtype(DType::BFloat16, false), DType::Float32);
  }
}

TEST(OperandDType, IsOneInWhichNumbersAreExact) {
  EXPECT_EQ(named("mx e4m3").operand_dtype(DType::BFloat16, false), DType::BFloat16);
  EXPECT_EQ(named("e5m2 128x128").operand_dtype(DType::BFloat16, false), DType::BFloat16);
  // A scale in float32 has more bits, and float16 fewer exponents.
  EXPECT_EQ(named("e4m3").operand_dtype(DType::BFloat16, false), DType::Float32);
  EXPECT_EQ(named("nvfp4").operand_dtype(DType::BFloat16, false), DType::Float32);
  EXPECT_EQ(named("e4m3").operand_dtype(DType::BFloat16, true), DType::BFloat16);
  EXPECT_EQ(named("nvfp4").operand_dtype(DType::BFloat16, true), DType::BFloat16);
  EXPECT_EQ(named("int8 1x32").operand_dtype(DType::BFloat16, true), DType::Float32);
  EXPECT_EQ(named("e4m3").operand_dtype(DType::Float16, true), DType::Float32);
  EXPECT_EQ(named("mx e4m3").operand_dtype(DType::Float16, false), DType::Float32);
  EXPECT_EQ(named("mx e4m3").operand_dtype(DType::Float64, false), DType::Float64);
  EXPECT_EQ(named("").operand_dtype(DType::Float16, false), DType::Float16);
}

TEST(NumberFormats, NameTheNearestOfAWrongText) {
  const auto error_of = [](const char* name) -> std::string {
    try {
      named(name);
    } catch (const PlanError& error) {
      return error.what();
    }
    return "none";
  };
  EXPECT_NE(error_of("mxfp8 e4m3").find("the nearest is 'mx e4m3'"), std::string::npos);
  EXPECT_NE(error_of("nvfp4 4over6 mae").find("'nvfp4 4over6"), std::string::npos);
  EXPECT_EQ(error_of(""), "none");
}

}  // namespace
}  // namespace transformer_ops
