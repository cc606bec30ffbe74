// Bodies are functions of what their schema says; what a declaration leaves out follows from the
// rest.
#include "op/body.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include "op/defaults.h"
#include "op/op.h"

namespace transformer_ops {
namespace {

void expect_text(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

std::string error_of(TypedOp op) {
  try {
    complete(op);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

constexpr const char* kSchema =
    "body_norm(Tensor input, Tensor? weight, float eps, bool[2] mask, str name, int size) -> "
    "(Tensor output, Tensor rstd)";

TensorSpecs shape(const Tensor& input, const Tensor*, double, std::array<bool, 2>, std::string_view,
                  int64_t) {
  return {like(input), like(input)};
}
void fill(const Call&, const Tensor&, const Tensor*, double, std::array<bool, 2>, std::string_view,
          int64_t, Tensor&, Tensor&) {}
std::tuple<Tensor, Tensor> make(Tensor input, std::optional<Tensor>, double, std::array<bool, 2>,
                                std::string_view, int64_t) {
  return {input, input};
}
Tensor first_alone(const Checks&, const Tensor& input, const Tensor*, double, std::array<bool, 2>,
                   std::string_view, int64_t) {
  return input;
}

TEST(Body, MayFillOrMakeItsResults) {
  EXPECT_EQ(error_of({.schema = kSchema, .shape = shape, .bodies = {.cpu = fill, .cuda = make}}),
            "");
  EXPECT_TRUE(Body(fill).fills());
  EXPECT_FALSE(Body(make).fills());
  EXPECT_EQ(error_of({.schema = kSchema, .shape = shape, .bodies = {.decomposition = first_alone}}),
            "");
}

TEST(Body, ADifferenceShowsBothSignatures) {
  const auto wrong = [](const Tensor&, const Tensor&, double, Tensor&, Tensor&) {};
  EXPECT_EQ(error_of({.schema = kSchema, .bodies = {.cpu = wrong}}),
            std::string("[body_norm] cpu must be void(const Tensor& input, const Tensor* weight, "
                        "double eps, std::array<bool, 2> mask, std::string_view name, int64_t "
                        "size, Tensor& output, Tensor& rstd) as the schema '") +
                kSchema +
                "' says, got void(const Tensor&, const Tensor&, double, Tensor&, Tensor&)");
}

TEST(Body, EveryKindOfDifferenceIsFound) {
  const std::string schema = "body_wrong(Tensor input, float p) -> (Tensor output, Tensor mask)";
  const auto found = [&](const char* field, TypedOp op) {
    op.schema = schema;
    expect_text(error_of(std::move(op)), std::string("[body_wrong] ") + field);
  };
  // A type, the number of arguments, of results, and their order.
  found("cpu must be void(", {.bodies = {.cpu = [](const Tensor&, bool, Tensor&, Tensor&) {}}});
  found("cpu must be void(", {.bodies = {.cpu = [](const Tensor*, double, Tensor&, Tensor&) {}}});
  found("cpu must be void(", {.bodies = {.cpu = [](const Tensor&, Tensor&, Tensor&) {}}});
  found("cpu must be void(", {.bodies = {.cpu = [](const Tensor&, double, Tensor&) {}}});
  found("cpu must be void(", {.bodies = {.cpu = [](Tensor&, Tensor&, const Tensor&, double) {}}});
  found("cuda must be std::tuple<Tensor, Tensor>(",
        {.bodies = {.cuda = [](const Tensor& input, double) { return input; }}});
  found("cuda must be std::tuple<Tensor, Tensor>(",
        {.bodies = {.cuda = [](const Tensor& x, double) { return std::tuple(x, x, x); }}});
  found("decomposition must be std::tuple<Tensor, Tensor>(",
        {.bodies = {.decomposition = [](const Tensor& x, double) { return std::tuple(x, x, x); }}});
  found("shape must be TensorSpecs(",
        {.shape = [](const Tensor& input) -> TensorSpecs { return {like(input)}; }});
  // A list of results may have any number of them.
  const auto twice = [](const Tensor& x, double) { return Tensors{x, x}; };
  EXPECT_EQ(error_of({.schema = schema, .bodies = {.decomposition = twice}}), "");
}

TensorSpecs order_shape(const Checks& check, const Tensor& a, const Tensor* b, const Tensor* c,
                        double d, std::optional<double> e, std::optional<double> none, int64_t f,
                        std::optional<int64_t> g, bool h, std::string_view i, std::array<bool, 3> j,
                        c10::SymInt k, std::vector<c10::SymInt> l, std::vector<int64_t> m) {
  EXPECT_STREQ(check.op(), "body_order");
  EXPECT_EQ(a.numel(), 1);
  EXPECT_EQ(b->numel(), 2);
  EXPECT_EQ(c, nullptr);
  EXPECT_EQ(d, 0.5);
  EXPECT_EQ(e, 0.25);
  EXPECT_EQ(none, std::nullopt);
  EXPECT_EQ(f, 7);
  EXPECT_EQ(g, 8);
  EXPECT_TRUE(h);
  EXPECT_EQ(i, "text");
  EXPECT_EQ(j, (std::array<bool, 3>{true, false, true}));
  EXPECT_EQ(k, 9);
  EXPECT_EQ(l, (std::vector<c10::SymInt>{1, 2}));
  EXPECT_EQ(m, (std::vector<int64_t>{3, 4}));
  return {like(a), like(*b)};
}

// `a` and `b` are taken out of the call: nobody else holds them.
void order_body(const Call& call, Tensor a, std::optional<Tensor> b, const Tensor* c, double d,
                std::optional<double> e, std::optional<double> none, int64_t f,
                std::optional<int64_t> g, bool h, std::string_view i, std::array<bool, 3> j,
                c10::SymInt k, std::vector<c10::SymInt> l, std::vector<int64_t> m, Tensor& x,
                Tensor& y) {
  order_shape(call, a, &*b, c, d, e, none, f, g, h, i, j, k, l, m);
  EXPECT_EQ(a.use_count(), 1);
  EXPECT_EQ(b->use_count(), 1);
  x.fill_(1);
  y.fill_(2);
}

TEST(Body, GetsItsArgumentsInOrder) {
  register_typed_op(
      {.schema =
           "body_order(Tensor a, Tensor? b, Tensor? c, float d, float? e, float? none, int f, "
           "int? g, bool h, str i, bool[3] j, SymInt k, SymInt[] l, int[] m) -> "
           "(Tensor x, Tensor y)",
       .shape = order_shape,
       .bodies = {.cpu = order_body}});
  torch::jit::Stack stack = {at::ones({1}),
                             at::ones({2}),
                             c10::IValue(),
                             0.5,
                             0.25,
                             c10::IValue(),
                             7,
                             8,
                             true,
                             "text",
                             c10::List<bool>({true, false, true}),
                             9,
                             c10::List<int64_t>({1, 2}),
                             c10::List<int64_t>({3, 4})};
  c10::Dispatcher::singleton()
      .findSchemaOrThrow("transformer_ops::body_order", "")
      .callBoxed(stack);
  EXPECT_TRUE(at::equal(stack.at(0).toTensor(), at::ones({1})));
  EXPECT_TRUE(at::equal(stack.at(1).toTensor(), at::full({2}, 2.0)));
}

// ---- defaults

TEST(Defaults, OneResultIsLikeTheFirstTensor) {
  TypedOp op{.schema = "like_first(Tensor input, float p) -> Tensor output"};
  complete(op);
  std::vector<c10::IValue> values = {at::ones({2, 3}), 0.5};
  const TensorSpecs specs = op.shape(Checks("like_first"), values);
  ASSERT_EQ(specs.size(), 1u);
  EXPECT_EQ(specs[0].sizes, (c10::SymDimVector{2, 3}));
  values[0] = at::ones({2}, at::kLong);
  EXPECT_THROW(op.shape(Checks("like_first"), values), c10::Error);
  TypedOp two{.schema = "two(Tensor input) -> (Tensor output, Tensor mask)"};
  complete(two);
  EXPECT_FALSE(two.shape);
}

TypedOp scale_by(std::string schema) {
  return {.schema = std::move(schema),
          .bodies = {.decomposition = [](const Tensor& input, const Tensor& weight, double p) {
            return input * weight * p;
          }}};
}

TEST(Defaults, ABackwardFollowsFromTheSlots) {
  const TypedOp forward =
      scale_by("scale_by(Tensor input, Tensor weight, float p) -> Tensor output");
  const OpDeclaration row{.kind = "ScaleBy", .parameters = {"weight"}, .slots = {{"input"}}};
  const TypedOp backward = default_backward(row, forward);
  EXPECT_EQ(backward.schema,
            "scale_by_backward(Tensor grad_output, Tensor input, Tensor weight, float p, bool[2] "
            "output_mask) -> (Tensor grad_input, Tensor grad_weight)");
  const auto specs_of = [&](const Tensor& grad_output) {
    std::vector<c10::IValue> values = {grad_output, at::ones({2, 3}), at::ones({3}), 0.5,
                                       c10::List<bool>({false, true})};
    return backward.shape(Checks("scale_by_backward"), values);
  };
  const TensorSpecs specs = specs_of(at::ones({2, 3}));
  EXPECT_EQ(specs[0].sizes, (c10::SymDimVector{0}));
  EXPECT_EQ(specs[1].sizes, (c10::SymDimVector{3}));
  EXPECT_THROW(specs_of(at::ones({2, 4})), c10::Error);
}

TEST(Defaults, ABackwardNeedsWhatTheMeaningReads) {
  const TypedOp forward = scale_by("s(Tensor input, Tensor weight, float p) -> Tensor output");
  const auto error_of_row = [&](const OpDeclaration& row) -> std::string {
    try {
      default_backward(row, forward);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  expect_text(error_of_row({.kind = "S", .parameters = {"weight"}, .slots = {{"output"}}}),
              "[s] slots must have 'input'");
  expect_text(error_of_row({.kind = "S", .slots = {{"input"}}}), "[s] slots must have 'weight'");
  expect_text(
      error_of_row({.kind = "S", .parameters = {"weight"}, .slots = {{"input", {"weight"}}}}),
      "[s] slot 'input' must be kept for all gradients");
}

}  // namespace
}  // namespace transformer_ops
