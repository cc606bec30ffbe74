// Recipes as texts, and the formats that they name.
#include <gtest/gtest.h>

#include "fuser/error.h"
#include "fuser/recipe.h"

namespace transformer_ops {
namespace {

TEST(Recipe, IsOnePointerForEachText) {
  const Recipe* const recipe = recipe_of("mx e4m3, exact, e5m2 1x128");
  EXPECT_EQ(recipe, recipe_of("mx e4m3, exact, e5m2 1x128"));
  EXPECT_NE(recipe, recipe_of("mx e4m3, exact, e5m2"));
  EXPECT_EQ(recipe->all.format("input"), "mx e4m3");
  EXPECT_EQ(recipe->all.format("weight"), "");
  EXPECT_EQ(recipe->all.format("grad_output"), "e5m2 1x128");
  EXPECT_EQ(to_text(*recipe), "mx e4m3, exact, e5m2 1x128");
  const std::string chosen =
      "nvfp4 4over6 mse, nvfp4 4over6 448 16x16, nvfp4, hadamard, stochastic";
  EXPECT_EQ(to_text(*recipe_of(chosen)), chosen);
}

TEST(Recipe, MayNameSingleOps) {
  const std::string text = "mx e4m3, exact, exact; 2: exact, exact, exact; 5: e4m3, e4m3, e5m2";
  const Recipe& recipe = *recipe_of(text);
  EXPECT_EQ(recipe.of(1).input, "mx e4m3");
  EXPECT_TRUE(recipe.of(2).is_exact());
  EXPECT_EQ(recipe.of(5).grad_output, "e5m2");
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
  EXPECT_EQ(column_format("mx e5m2"), "mx e5m2 32x1");
  EXPECT_EQ(column_format("e4m3 1x128"), "e4m3 128x1");
  EXPECT_EQ(column_format("nvfp4"), "nvfp4 16x1");
  EXPECT_EQ(column_format("nvfp4 4over6"), "nvfp4 4over6 16x1");
  EXPECT_EQ(column_format("nvfp4 4over6 mse 448"), "nvfp4 4over6 mse 448 16x1");
  for (const char* same : {"", "e4m3", "e5m2 pow2", "e4m3 128x128", "nvfp4 16x16",
                           "nvfp4 4over6 16x16", "mx e5m2 32x1"}) {
    EXPECT_EQ(column_format(same), same);
  }
  EXPECT_THROW(column_format("int8 1x32"), PlanError);
}

TEST(Formats, WithOneScaleForATensor) {
  EXPECT_EQ(format_of_tensor(448.0f), "e4m3");
  EXPECT_EQ(format_of_tensor(57344.0f), "e5m2");
  EXPECT_EQ(format_of_tensor(6.0f), "");
  for (const char* format : {"e4m3", "e4m3 pow2"}) {
    EXPECT_TRUE(has_one_scale(format));
    EXPECT_EQ(codes_dtype(format), "float8_e4m3fn");
    // Its scale is that of no block, and a product takes it beside the codes.
    EXPECT_FALSE(are_multiplied_in_blocks({format, format}));
    EXPECT_EQ(operand_dtype(format, DType::BFloat16, true), DType::BFloat16);
    EXPECT_EQ(operand_dtype(format, DType::BFloat16, false), DType::Float32);
  }
}

TEST(OperandDType, IsOneInWhichNumbersAreExact) {
  EXPECT_EQ(operand_dtype("mx e4m3", DType::BFloat16, false), DType::BFloat16);
  EXPECT_EQ(operand_dtype("e5m2 128x128", DType::BFloat16, false), DType::BFloat16);
  // A scale in float32 has more bits, and float16 fewer exponents.
  EXPECT_EQ(operand_dtype("e4m3", DType::BFloat16, false), DType::Float32);
  EXPECT_EQ(operand_dtype("nvfp4", DType::BFloat16, false), DType::Float32);
  EXPECT_EQ(operand_dtype("e4m3", DType::BFloat16, true), DType::BFloat16);
  EXPECT_EQ(operand_dtype("nvfp4", DType::BFloat16, true), DType::BFloat16);
  EXPECT_EQ(operand_dtype("int8 1x32", DType::BFloat16, true), DType::Float32);
  EXPECT_EQ(operand_dtype("e4m3", DType::Float16, true), DType::Float32);
  EXPECT_EQ(operand_dtype("mx e4m3", DType::Float16, false), DType::Float32);
  EXPECT_EQ(operand_dtype("mx e4m3", DType::Float64, false), DType::Float64);
  EXPECT_EQ(operand_dtype("", DType::Float16, false), DType::Float16);
}

}  // namespace
}  // namespace transformer_ops
