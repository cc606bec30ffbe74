// A program without Python: the text of a plan, run through the dispatcher, against plain torch.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// LayerNorm(6), Linear(6, 8), GELU, Linear(8, 5)
constexpr const char* kBlock = R"(plan 5
op 0 LayerNorm eps=1e-05 normalized_shape=[6] zero_centered_gamma=false
op 1 BasicLinear accumulate_into_main_grad=false in_features=6 out_features=8
op 2 Bias size=8
op 3 GELU
op 4 BasicLinear accumulate_into_main_grad=false in_features=8 out_features=5
op 5 Bias size=5
parameters p0.weight p0.bias p1.weight p2.bias p4.weight p5.bias
gradients g0 dp0.weight dp0.bias dp1.weight dp2.bias dp4.weight dp5.bias
first_backward 0
forward LayerNorm ops=[0]
  x1, s0.mean, s0.rstd = layer_norm(x0, p0.weight, p0.bias, [6], 1e-05, false)
  save s0.input=x0, s0.mean=s0.mean, s0.rstd=s0.rstd
forward linear_bias_activation ops=[1, 2, 3]
  x4, s3.input = linear_bias_activation(x1, p1.weight, p2.bias, "gelu", true)
  save s1.input=x1, s1.weight=p1.weight, s3.input=s3.input
forward BasicLinear ops=[4]
  x5 = linear(x4, p4.weight)
  save s4.input=x4, s4.weight=p4.weight
forward Bias ops=[5]
  x6 = bias(x5, p5.bias)
backward LayerNorm ops=[0]
  g0, dp0.weight, dp0.bias = layer_norm_backward(g1, s0.input, s0.mean, s0.rstd, p0.weight, [6], 1e-05, false, [true, true, true])
backward BasicLinear ops=[1]
  g1, dp1.weight = linear_backward(g2, s1.input, s1.weight, [true, true])
backward activation_bias ops=[2, 3]
  g2, dp2.bias = activation_bias_backward(g4, s3.input, "gelu")
backward BasicLinear ops=[4]
  g4, dp4.weight = linear_backward(g5, s4.input, s4.weight, [true, true])
backward Bias ops=[5]
  g5 = g6
  dp5.bias = bias_backward(g6)
)";

// A residual branch: Reshape, MakeExtraOutput -> RMSNorm, SwiGLU, ConstantScale -> AddExtraInput
constexpr const char* kResidual = R"(plan 5
op 0 Reshape shape=[-1, 4]
op 1 MakeExtraOutput in_place=false
op 2 RMSNorm eps=1e-05 normalized_shape=[4] zero_centered_gamma=true
op 3 BasicLinear accumulate_into_main_grad=false in_features=4 out_features=8
op 4 SwiGLU glu_interleave_size=2
op 5 ConstantScale scale=0.5
op 6 AddExtraInput in_place=false
op 7 L2Normalization eps=1e-06
parameters p2.weight p3.weight
outputs o1.extra_output
route e6.extra_input=o1.extra_output
gradients g0 dp2.weight dp3.weight
first_backward 0
forward Reshape ops=[0]
  x1 = aten::reshape(x0, [-1, 4])
forward MakeExtraOutput ops=[1]
  x2, o1.extra_output = x1
forward RMSNorm ops=[2]
  x3, s2.rstd = rms_norm(x2, p2.weight, [4], 1e-05, true)
  save s2.input=x2, s2.rstd=s2.rstd
forward BasicLinear ops=[3]
  x4 = linear(x3, p3.weight)
  save s3.input=x3, s3.weight=p3.weight
forward SwiGLU ops=[4]
  x5 = swiglu(x4, 2)
  save s4.input=x4
forward ConstantScale ops=[5]
  x6 = constant_scale(x5, 0.5)
forward AddExtraInput ops=[6]
  x7 = add_extra_input(x6, o1.extra_output)
forward L2Normalization ops=[7]
  x8, s7.rstd = l2_normalization(x7, 1e-06)
  save s7.input=x7, s7.rstd=s7.rstd
backward Reshape ops=[0]
  g0 = aten::reshape(g1, n0)
backward MakeExtraOutput ops=[1]
  g1 = make_extra_output_backward(g2, do1.extra_output)
backward RMSNorm ops=[2]
  g2, dp2.weight = rms_norm_backward(g3, s2.input, s2.rstd, p2.weight, [4], 1e-05, true, [true, true])
backward BasicLinear ops=[3]
  g3, dp3.weight = linear_backward(g4, s3.input, s3.weight, [true, true])
backward SwiGLU ops=[4]
  g4 = swiglu_backward(g5, s4.input, 2)
backward ConstantScale ops=[5]
  g5 = constant_scale_backward(g6, 0.5)
backward AddExtraInput ops=[6]
  g6, do1.extra_output = g7
backward L2Normalization ops=[7]
  g7 = l2_normalization_backward(g8, s7.input, s7.rstd, 1e-06)
)";

constexpr const char* kDropout = R"(plan 5
op 0 Dropout training=true p=0.25
gradients g0
first_backward 0
forward Dropout ops=[0]
  x1, s0.mask = dropout(x0, 0.25, true)
  save s0.mask=s0.mask
backward Dropout ops=[0]
  g0 = dropout_backward(g1, s0.mask, 0.25)
)";

constexpr const char* kPython = R"(plan 5
op 0 Custom native=false
gradients g0
first_backward 0
forward Custom ops=[0] python=0
backward Custom ops=[0] python=0
)";

Tensors run_plan(const std::string& plan, const Tensor& input, const Tensors& extra_inputs,
                 const Tensors& parameters) {
  using Signature = Tensors(c10::string_view, const Tensor&, at::TensorList, at::TensorList);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("transformer_ops::run_plan", "")
                             .typed<Signature>();
  return op.call(plan, input, extra_inputs, parameters);
}

// `inputs` is the main input, then the parameters.
Tensors run(const std::string& plan, const Tensors& inputs) {
  return run_plan(plan, inputs[0], {}, Tensors(inputs.begin() + 1, inputs.end()));
}

Tensors block(const Tensors& t) {
  const Tensor normed = at::layer_norm(t[0], {6}, t[1], t[2], 1e-5);
  const Tensor hidden = at::gelu(at::linear(normed, t[3], t[4]), "tanh");
  return {at::linear(hidden, t[5], t[6])};
}

Tensors residual(const Tensors& t) {
  const Tensor x = t[0].reshape({-1, 4});
  const Tensor rstd = at::rsqrt(x.square().mean(-1, true) + 1e-5);
  const Tensor pairs = at::linear(x * rstd * (1 + t[1]), t[2]).unflatten(-1, {-1, 2, 2});
  const Tensor gated = (at::silu(pairs.select(-2, 0)) * pairs.select(-2, 1)).flatten(-2);
  const Tensor sum = 0.5 * gated + x;
  return {sum * at::rsqrt(sum.square().sum(-1, true) + 1e-6), x.view_as(x)};
}

Tensors random(const std::vector<std::vector<int64_t>>& shapes,
               at::ScalarType dtype = at::kDouble) {
  at::manual_seed(7);
  Tensors tensors;
  for (const auto& shape : shapes) {
    tensors.push_back(at::randn(shape, dtype).requires_grad_());
  }
  return tensors;
}

Tensors block_inputs(at::ScalarType dtype = at::kDouble) {
  return random({{2, 3, 6}, {6}, {6}, {8, 6}, {8}, {5, 8}, {5}}, dtype);
}
Tensors residual_inputs() { return random({{2, 3, 4}, {4}, {8, 4}}); }

// A number that depends on every output in a nonlinear way.
Tensor loss(const Tensors& outputs) {
  Tensor sum = at::zeros({}, outputs[0].options());
  for (const Tensor& output : outputs) sum = sum + output.sin().sum();
  return sum;
}

Tensors grad(const Tensors& of, const Tensors& for_inputs, bool create_graph = false) {
  return torch::autograd::grad(of, for_inputs, {}, /*retain_graph=*/true, create_graph);
}

void expect_close(const Tensors& actual, const Tensors& expected, double tolerance = 1e-10) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].sizes(), expected[i].sizes()) << i;
    EXPECT_EQ(actual[i].scalar_type(), expected[i].scalar_type()) << i;
    EXPECT_TRUE(at::allclose(actual[i], expected[i], tolerance, tolerance))
        << i << ": " << (actual[i] - expected[i]).abs().max();
  }
}

std::string error_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

struct Case {
  const char* name;
  const char* plan;
  Tensors (*reference)(const Tensors&);
  Tensors (*inputs)();
};

class RunPlan : public testing::TestWithParam<Case> {
 protected:
  const Tensors inputs_ = GetParam().inputs();
  Tensors run_it() const { return run(GetParam().plan, inputs_); }
  Tensors reference() const { return GetParam().reference(inputs_); }
};

TEST_P(RunPlan, Forward) { expect_close(run_it(), reference()); }

TEST_P(RunPlan, Backward) {
  expect_close(grad({loss(run_it())}, inputs_), grad({loss(reference())}, inputs_));
}

TEST_P(RunPlan, BackwardTwiceGivesTheSame) {
  const Tensor result = loss(run_it());
  const Tensors first = grad({result}, inputs_), second = grad({result}, inputs_);
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i], second[i])) << i;
}

TEST_P(RunPlan, DoubleBackward) {
  const auto second = [&](const Tensors& outputs) {
    return grad({loss(grad({loss(outputs)}, inputs_, /*create_graph=*/true))}, inputs_);
  };
  expect_close(second(run_it()), second(reference()), 1e-8);
}

TEST_P(RunPlan, WithoutGradients) {
  const at::NoGradGuard no_grad;
  const Tensors outputs = run_it();
  for (const Tensor& output : outputs) EXPECT_EQ(output.grad_fn(), nullptr);
  expect_close(outputs, reference());
}

TEST_P(RunPlan, EmptyBatch) {
  Tensors inputs = inputs_;
  inputs[0] = at::empty({0, 3, inputs_[0].size(-1)}, at::kDouble).requires_grad_();
  const Tensors outputs = run(GetParam().plan, inputs);
  expect_close(outputs, GetParam().reference(inputs));
  for (const Tensor& gradient : grad({loss(outputs)}, inputs)) {
    EXPECT_TRUE(at::equal(gradient, at::zeros_like(gradient)));
  }
}

TEST_P(RunPlan, DoesNotDependOnTheNumberOfThreads) {
  const int threads = at::get_num_threads();
  const Tensors before = grad({loss(run_it())}, inputs_);
  at::set_num_threads(1);
  const Tensors after = grad({loss(run_it())}, inputs_);
  at::set_num_threads(threads);
  for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << i;
}

INSTANTIATE_TEST_SUITE_P(, RunPlan,
                         testing::Values(Case{"Block", kBlock, block,
                                              [] { return block_inputs(); }},
                                         Case{"Residual", kResidual, residual, residual_inputs}),
                         [](const auto& info) { return info.param.name; });

TEST(RunPlanDTypes, LowerPrecisionStaysNearFloat64) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const double tolerance = dtype == at::kFloat ? 1e-5 : 5e-2;
    const Tensors inputs = block_inputs(dtype);
    Tensors exact;
    for (const Tensor& tensor : inputs) {
      exact.push_back(tensor.detach().to(at::kDouble).requires_grad_());
    }
    const Tensor output = run(kBlock, inputs)[0], expected = block(exact)[0];
    EXPECT_EQ(output.scalar_type(), dtype);
    const Tensors grads = grad({output.sum()}, inputs),
                  expected_grads = grad({expected.sum()}, exact);
    const auto expect_near = [&](const Tensor& a, const Tensor& b) {
      EXPECT_LE((a.to(at::kDouble) - b).norm().item<double>(),
                tolerance * b.norm().item<double>() + tolerance)
          << dtype;
    };
    expect_near(output, expected);
    for (size_t i = 0; i < grads.size(); ++i) expect_near(grads[i], expected_grads[i]);
  }
}

TEST(RunPlanDropout, MaskIsThatOfTheForward) {
  const Tensors inputs = {at::ones({40, 50}, at::kDouble).requires_grad_()};
  const Tensor output = run(kDropout, inputs)[0];
  const Tensor kept = (output != 0).to(at::kDouble);
  EXPECT_TRUE(at::allclose(output, kept / 0.75));
  EXPECT_NEAR(kept.mean().item<double>(), 0.75, 0.05);
  EXPECT_TRUE(at::equal(grad({output.sum()}, inputs)[0], output));
  const Tensor first = grad({output.pow(3).sum()}, inputs, /*create_graph=*/true)[0];
  EXPECT_TRUE(at::allclose(grad({first.sum()}, inputs)[0], 6 * kept / (0.75 * 0.75 * 0.75)));
}

TEST(RunPlanDropout, RepeatsWithTheSeed) {
  const Tensors inputs = {at::ones({100}).requires_grad_()};
  const auto draw = [&] { return run(kDropout, inputs)[0]; };
  at::manual_seed(3);
  const Tensor first = draw(), second = draw();
  at::manual_seed(3);
  EXPECT_TRUE(at::equal(draw(), first));
  EXPECT_FALSE(at::equal(first, second));
}

// ---- errors

TEST(RunPlanErrors, PythonStepsNeedPython) {
  EXPECT_EQ(error_of([] { run(kPython, {at::ones({2})}); }),
            "[plan] steps must be native to run without Python, got a Python step");
}

TEST(RunPlanErrors, NameTheLineOfAWrongText) {
  std::string text = kDropout;
  text.replace(text.find("dropout(x0"), 10, "dropout(y0");
  EXPECT_EQ(error_of([&] { run(text, {at::ones({2})}); }),
            "[plan] a value must read like x1, g1, p1.weight or s1.input, got 'y0' (line 6)");
}

TEST(RunPlanErrors, NameAnUnknownOp) {
  std::string text = kDropout;
  text.replace(text.find("dropout(x0"), 7, "pickout");
  EXPECT_EQ(error_of([&] { run(text, {at::ones({2})}); }),
            "[plan] op must be registered, got 'transformer_ops::pickout'");
}

std::string error_with(const std::string& from, const std::string& to) {
  std::string text = kDropout;
  text.replace(text.find(from), from.size(), to);
  return error_of([&] { run(text, {at::ones({2}).requires_grad_()}); });
}

TEST(RunPlanErrors, ShowTheSchemaThatACallDoesNotFit) {
  const std::string schema =
      "[plan] call must fit the op's schema 'transformer_ops::dropout(Tensor input, float p, bool "
      "save_mask) -> (Tensor output, Tensor mask)', got '";
  const std::string end = "'; a plan's text belongs to the release of transformer_ops that made it";
  EXPECT_EQ(error_with("(x0, 0.25, true)", "(x0, 0.25)"),
            schema + "dropout(Tensor, float) -> (Tensor, Tensor)" + end);
  EXPECT_EQ(error_with("(x0, 0.25, true)", "(x0, 0.25, true, 1)"),
            schema + "dropout(Tensor, float, bool, int) -> (Tensor, Tensor)" + end);
  EXPECT_EQ(error_with("(x0, 0.25, true)", "(x0, 1, true)"),
            schema + "dropout(Tensor, int, bool) -> (Tensor, Tensor)" + end);
  EXPECT_EQ(error_with("(x0, 0.25, true)", "(x0, none, [true])"),
            schema + "dropout(Tensor, None, bool[]) -> (Tensor, Tensor)" + end);
  EXPECT_EQ(error_with("x1, s0.mask = ", "x1, s0.mask, x1 = "),
            schema + "dropout(Tensor, float, bool) -> (Tensor, Tensor, Tensor)" + end);
}

TEST(RunPlanErrors, NoGradientReachesAnOutputOfIntegers) {
  EXPECT_EQ(error_with("x1, s0.mask = ", "s0.mask, x1 = "),
            "[run_plan] outputs must be floating where a gradient is wanted, got Byte");
}

TEST(RunPlanErrors, NoOpThatWritesToItsArguments) {
  EXPECT_NE(error_with("dropout_backward(g1, s0.mask, 0.25)", "aten::relu_(g1)")
                .find("[plan] call must fit"),
            std::string::npos);
}

// ---- flags of the call that the text was not made for

TEST(RunPlanFlags, GradientsThatTheTextDoesNotNameAreYielded) {
  std::string text = kBlock;
  const auto replace = [&](const std::string& from, const std::string& to) {
    text.replace(text.find(from), from.size(), to);
  };
  replace("gradients g0 dp0.weight dp0.bias", "gradients g0 dp0.bias");
  replace("g0, dp0.weight, dp0.bias = ", "g0, t0.unused, dp0.bias = ");
  const Tensors inputs = block_inputs();
  expect_close(grad({loss(run(text, inputs))}, inputs), grad({loss(block(inputs))}, inputs));
  Tensors frozen = inputs;
  frozen[1] = frozen[1].detach();
  const Tensors wanted = {frozen[0], frozen[3]};
  expect_close(grad({loss(run(text, frozen))}, wanted), grad({loss(block(frozen))}, wanted));
}

TEST(RunPlanFlags, ATextWhoseOutputIsAnExtraInputYieldsTheGradientsThatItsBackwardGives) {
  const Tensor input = at::randn({2, 3}).requires_grad_();
  const Tensor extra = at::randn({2, 3}).requires_grad_();
  const Tensors outputs = run_plan(R"(plan 5
op 0 AddExtraInput in_place=false
inputs e0.extra_input
gradients de0.extra_input
first_backward 0
forward AddExtraInput ops=[0]
  x1 = (e0.extra_input)
backward AddExtraInput ops=[0]
  g0, de0.extra_input = g1
)",
                                   input, {extra}, {});
  const Tensor by = at::randn({2, 3});
  const Tensors grads = torch::autograd::grad({outputs[0]}, {input, extra}, {by});
  EXPECT_TRUE(at::equal(grads[0], by));
  EXPECT_TRUE(at::equal(grads[1], by));
}

TEST(RunPlanFlags, OutputsThatNoLossUsesGiveNoGradient) {
  const Tensors inputs = residual_inputs();
  const auto given = [&](size_t output) {
    return torch::autograd::grad({run(kResidual, inputs)[output].sin().sum()}, inputs, {}, {},
                                 false, /*allow_unused=*/true);
  };
  const Tensors extra = given(1);
  EXPECT_TRUE(at::allclose(extra[0], inputs[0].cos()));
  EXPECT_FALSE(extra[1].defined());
  EXPECT_FALSE(extra[2].defined());
  const Tensors expected = torch::autograd::grad({residual(inputs)[0].sin().sum()}, inputs);
  expect_close(given(0), expected);
}

TEST(RunPlanErrors, CountTheTensors) {
  EXPECT_EQ(error_of([] {
              run(kBlock, {at::ones({2, 6})});
            }),
            "[run_plan] tensors must be 1 input, 0 extra inputs and 6 parameters, got 1 in all");
}

TEST(RunPlanErrors, OfAnOpNameIt) {
  Tensors inputs = block_inputs();
  inputs[0] = at::ones({2, 7}, at::kDouble);
  EXPECT_EQ(error_of([&] { run(kBlock, inputs); }),
            "[LayerNorm] input must end in dimensions [6], got shape [2, 7] (op 0 of the plan)");
}

TEST(RunPlanErrors, OfAChangedSavedTensorComeFromAutograd) {
  const Tensors inputs = block_inputs();
  const Tensor output = run(kBlock, inputs)[0];
  {
    const at::NoGradGuard no_grad;
    inputs[5].mul_(2);
  }
  EXPECT_NE(
      error_of([&] { grad({output.sum()}, inputs); }).find("modified by an inplace operation"),
      std::string::npos);
}

}  // namespace
