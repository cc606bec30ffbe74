// Schemas, attributes and values as text.
#include <gtest/gtest.h>

#include <limits>

#include "fuser/attribute.h"
#include "fuser/schema.h"
#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;

TEST(Schema, ReadsNamesAndTypes) {
  const Schema schema = parse_schema(
      "f(Tensor input, Tensor? weight, bool[2] mask, int k=3) -> (Tensor output, Tensor mean)");
  EXPECT_EQ(schema.name, "f");
  ASSERT_EQ(schema.arguments.size(), 4u);
  EXPECT_EQ(schema.arguments[1].type, "Tensor?");
  EXPECT_EQ(schema.arguments[2].type, "bool[2]");
  EXPECT_EQ(schema.arguments[3].name, "k");
  ASSERT_EQ(schema.results.size(), 2u);
  EXPECT_TRUE(schema.has_result("mean"));
  EXPECT_FALSE(schema.has_result("input"));
  EXPECT_TRUE(schema.has_argument("weight"));
}

TEST(Schema, MayHaveOneResultOrNoArguments) {
  EXPECT_TRUE(parse_schema("aten::f(Tensor input) -> Tensor output").has_result("output"));
  EXPECT_TRUE(parse_schema("f() -> Tensor output").arguments.empty());
}

TEST(Schema, MayBeEmpty) { EXPECT_TRUE(parse_schema("").empty()); }

TEST(Schema, NamesWhatIsWrong) {
  EXPECT_EQ(error_of([] { parse_schema("f(Tensor input)"); }),
            "[schema] must read 'name(...) -> ...', got 'f(Tensor input)'");
  EXPECT_EQ(error_of([] { parse_schema("f(Tensor) -> Tensor output"); }),
            "[schema] every field must have a name, got 'Tensor' in 'f(Tensor) -> Tensor output'");
  EXPECT_EQ(error_of([] { parse_schema("f(Tensor input) -> Tensor"); }),
            "[schema] every field must have a name, got 'Tensor' in 'f(Tensor input) -> Tensor'");
}

TEST(Attribute, RoundTrips) {
  const std::vector<Attribute> attributes = {
      true,
      false,
      int64_t{0},
      int64_t{-7},
      std::numeric_limits<int64_t>::max(),
      1.0,
      0.1,
      1.0 / 3,
      -1e-300,
      1e300,
      std::numeric_limits<double>::denorm_min(),
      std::numeric_limits<double>::infinity(),
      -std::numeric_limits<double>::infinity(),
      std::string(),
      std::string("a \"quoted\" back\\slash, [x] (y) = z\nnext line \\n"),
      std::vector<int64_t>{},
      std::vector<int64_t>{-1, 64, 128},
      std::vector<double>{1.0, -0.5},
      std::vector<bool>{true, false},
  };
  for (const Attribute& attribute : attributes) {
    const std::string text = to_text(attribute);
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    EXPECT_EQ(parse_attribute(text), attribute) << text;
  }
}

TEST(Attribute, FloatsDoNotReadAsIntegers) {
  EXPECT_EQ(to_text(Attribute(1.0)), "1.0");
  EXPECT_EQ(to_text(Attribute(1e-5)), "1e-05");
  EXPECT_TRUE(std::holds_alternative<double>(parse_attribute(to_text(Attribute(1e22)))));
}

TEST(Attribute, NamesWhatIsWrong) {
  for (const char* text : {"", "abc", "1x", "[1", "[1, ]", "[true, 1]", "[1, 1.5]", "\"open"}) {
    EXPECT_EQ(error_of([&] { parse_attribute(text); }).substr(0, 6), "[plan]") << text;
  }
}

TEST(Value, RoundTrips) {
  for (const char* text : {"x0", "g12", "n3", "p1.weight", "dp1.weight", "e0.1", "de0.1", "o2.0",
                           "do2.0", "s4.a", "st4.a", "s4.a.codes", "s4.a.scale"}) {
    EXPECT_EQ(to_text(parse_value(text)), text);
  }
}

TEST(Value, NamesWhatIsWrong) {
  for (const char* text : {"", "x", "y1", "x1.weight", "p1", "p1.", "pweight", "s.input"}) {
    EXPECT_EQ(error_of([&] { parse_value(text); }),
              std::string("[plan] a value must read like x1, g1, p1.weight or s1.input, got '") +
                  text + "'");
  }
}

TEST(DTypes, PromoteAsAnAddition) {
  EXPECT_EQ(promote(DType::Float16, DType::BFloat16), DType::Float32);
  EXPECT_EQ(promote(DType::BFloat16, DType::BFloat16), DType::BFloat16);
  EXPECT_EQ(promote(DType::BFloat16, DType::Float64), DType::Float64);
  EXPECT_EQ(promote(DType::Float32, DType::Float16), DType::Float32);
  EXPECT_EQ(promote(DType::Unknown, DType::Float32), DType::Unknown);
}

}  // namespace
}  // namespace transformer_ops
