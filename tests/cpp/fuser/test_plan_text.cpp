// Plan -> text -> plan, and what is said of a wrong text.
#include <gtest/gtest.h>

#include "toy.h"

namespace transformer_ops {
namespace {

using toy::error_of;
using toy::nodes;
using toy::ScopedRule;
using toy::ScopedUserFusion;

void expect_round_trip(const Plan& plan) {
  const std::string text = to_text(plan);
  const Plan parsed = parse_plan(text);
  EXPECT_EQ(to_text(parsed), text);
  EXPECT_EQ(parsed, plan) << text;
}

TEST(PlanText, RoundTrips) {
  expect_round_trip(
      toy::plan(nodes({"Norm", "Product", "Shift", "Mask", "View", "Scale", "Same"})));
  expect_round_trip(toy::plan(nodes({"Fork", "Add"})));
}

TEST(PlanText, RoundTripsFusedSteps) {
  const ScopedRule forward(toy::forward_rule()), backward(toy::backward_rule()),
      joint(toy::joint_rule());
  expect_round_trip(toy::plan(nodes({"Product", "Shift", "Square", "Same", "Square", "Product"})));
}

TEST(PlanText, RoundTripsChannelsAutocastAndSkippedSteps) {
  auto ops = nodes({"Square", "Fork", "Product", "Add"});
  toy::connect(ops, 1, 3, /*visible=*/true);
  PlanKey key = toy::key(ops);
  key.autocast = DType::BFloat16;
  key.tensors[0].requires_grad = false;
  key.training[2] = false;
  expect_round_trip(toy::plan(ops, key));
}

TEST(PlanText, RoundTripsPythonStepsAndAttributesOfAnyText) {
  auto ops = nodes({"Same"});
  ops.push_back(toy::python_node("Custom", 1));
  ops[1].attributes = {{"text", std::string("a = [b\" (c) \\ \n d")},
                       {"flags", std::vector<bool>{true, false}},
                       {"none", std::vector<int64_t>{}},
                       {"number", 0.1}};
  expect_round_trip(toy::plan(ops));
}

TEST(PlanText, RoundTripsNamesOfAnyText) {
  for (const char* name : {"my fusion", "f(x) = \"y\"", "ops=[3]", "two\nlines", "", "<lambda>"}) {
    const ScopedUserFusion user("user", Pass::Forward);
    const auto ops = nodes({"Same", "Same"});
    expect_round_trip(
        make_plan(ops, toy::key(ops), [&](const Fusion&, const std::vector<StepGroup>&) {
          return std::vector<StepGroup>{{.first = 0, .count = 2, .python = 2, .name = name}};
        }).plan);
  }
}

TEST(PlanText, ToleratesEmptyLinesAndComments) {
  const Plan plan = toy::plan(nodes({"Same"}));
  std::string text = to_text(plan);
  text.replace(text.find("forward"), 0, "\n# a comment\n");
  EXPECT_EQ(parse_plan(text + "\n"), plan);
}

// ---- errors

constexpr const char* kGood = R"(plan 5
op 0 Scale factor=2.0
gradients g0
first_backward 0
forward Scale ops=[0]
  x1 = scale(x0, 2.0)
backward Scale ops=[0]
  g0 = scale(g1, 2.0)
)";

// kGood with line `number`, from 1, replaced.
std::string with_line(int number, const std::string& line) {
  std::string text = kGood;
  size_t begin = 0;
  for (int i = 1; i < number; ++i) begin = text.find('\n', begin) + 1;
  return text.replace(begin, text.find('\n', begin) - begin, line);
}

TEST(PlanText, GoodTextParses) { EXPECT_EQ(to_text(parse_plan(kGood)), kGood); }

TEST(PlanText, MustHaveAnOp) {
  EXPECT_EQ(error_of([] { parse_plan("plan 5\n"); }), "[plan] a plan must have an op, got none");
  EXPECT_EQ(error_of([] { toy::plan({}); }), "[plan] a plan must have an op, got none");
}

TEST(PlanText, MustBeginWithItsVersion) {
  EXPECT_EQ(error_of([] { parse_plan(with_line(1, "plan 2")); }),
            "[plan] text must begin with 'plan 5', got 'plan 2'");
  EXPECT_EQ(error_of([] { parse_plan(""); }), "[plan] text must begin with 'plan 5', got ''");
}

struct WrongLine {
  int number;
  const char* line;
  const char* error;
};

TEST(PlanText, ErrorsNameTheLine) {
  const std::vector<WrongLine> rows = {
      {2, "op 1 Scale factor=2.0", "[plan] op 0 must come next, got '1' (line 2)"},
      {2, "op zero Scale",
       "[plan] a constant must be a boolean, number, string or list, got 'zero' (line 2)"},
      {2, "op 0", "[plan] op 0 must come next, got '0' (line 2)"},
      {2, "op 0 Scale factor", "[plan] 'factor' must hold a '=' (line 2)"},
      {2, "op 0 Scale factor=[1, x]",
       "[plan] a list must hold numbers or booleans, got '[1, x]' (line 2)"},
      {2, "op 0 Scale native=maybe", "[plan] a flag must be true or false, got 'maybe' (line 2)"},
      {4, "first_backward 1.5", "[plan] an integer must stand here, got '1.5' (line 4)"},
      {4, "first_backward -1", "[plan] first_backward must not be negative (line 4)"},
      {4, "first 0", "[plan] a line must begin with a known word, got 'first' (line 4)"},
      {4, "autocast float8",
       "[plan] dtype must be one torch knows as floating, got 'float8' "
       "(line 4)"},
      {4, "parameters weight",
       "[plan] a value must read like x1, g1, p1.weight or s1.input, got 'weight' (line 4)"},
      {4, "route e0.0", "[plan] 'e0.0' must hold a '=' (line 4)"},
      {4, "  x1 = x0", "[plan] an instruction must follow a step (line 4)"},
      {4, "  save s0.input=x0", "[plan] a save must follow a step (line 4)"},
      {5, "forward Scale", "[plan] a step must have a name and ops (line 5)"},
      {5, "forward Scale joint=true", "[plan] step 'Scale' must have ops (line 5)"},
      {5, "forward Scale ops=0", "[plan] ops must be a list, got '0' (line 5)"},
      {5, "forward Scale ops=[0] colour=red",
       "[plan] a step field must be known, got 'colour' (line 5)"},
      {6, "  x1", "[plan] an instruction must read 'results = ...' (line 6)"},
      {6, "  x1 = x0, x0", "[plan] a hand-over must have one argument, got 'x1 = x0, x0' (line 6)"},
      {6, "  x1 = scale(y0, 2.0)",
       "[plan] a value must read like x1, g1, p1.weight or s1.input, got 'y0' (line 6)"},
      {6, "  save s0.input", "[plan] 's0.input' must hold a '=' (line 6)"},
      {6, " ", "[plan] a line must not be blank (line 6)"},
  };
  for (const WrongLine& row : rows) {
    EXPECT_EQ(error_of([&] { parse_plan(with_line(row.number, row.line)); }), row.error)
        << row.line;
  }
}

TEST(PlanText, IsVerified) {
  EXPECT_EQ(error_of([] { parse_plan(with_line(6, "  x1 = scale(x1, 2.0)")); }),
            "[plan] step 'Scale' must read what was written before, got x1");
  for (const char* cast : {R"(x1 = cast(x0))", R"(x1 = cast(x0, 2))", R"(x1 = cast(n0, "float32"))",
                           R"(x1 = cast(x0, "unknown"))", R"(x1, t0.b = cast(x0, "float32"))"}) {
    EXPECT_NE(error_of([&] {
                parse_plan(with_line(6, std::string("  ") + cast));
              }).find("[plan] step 'Scale' must cast one tensor to one dtype, got a cast of "),
              std::string::npos)
        << cast;
  }
}

// No cut of a good text may crash the parser.
TEST(PlanText, EveryPrefixParsesOrFails) {
  const ScopedRule forward(toy::forward_rule()), joint(toy::joint_rule());
  auto ops = nodes({"Fork", "Product", "Shift", "Square", "Mask", "Add", "Square", "Product"});
  toy::connect(ops, 0, 5);
  const std::string text = to_text(toy::plan(ops));
  for (size_t length = 0; length < text.size(); ++length) {
    try {
      parse_plan(text.substr(0, length));
    } catch (const PlanError&) {
    }
  }
}

}  // namespace
}  // namespace transformer_ops
