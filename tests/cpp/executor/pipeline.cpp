// Pipelines that plan by themselves: no Python anywhere.
#include "runtime/pipeline.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "fuser/error.h"

namespace transformer_ops {
namespace {

using torch::autograd::grad;

constexpr int64_t kWidth = 8;
constexpr int64_t kHidden = 16;

OpNode linear(int64_t in_features, int64_t out_features) {
  return make_op("BasicLinear", {{"in_features", in_features},
                                 {"out_features", out_features},
                                 {"accumulate_into_main_grad", false}});
}

std::vector<OpNode> block(double p = 0.0) {
  return {linear(kWidth, kHidden), make_op("Bias", {{"size", kHidden}}), make_op("GELU"),
          make_op("Dropout", {{"p", p}}), linear(kHidden, kWidth)};
}

at::Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble).requires_grad_(); }

struct Given {
  at::Tensor input = leaf({4, kWidth});
  std::vector<at::Tensor> parameters = {leaf({kHidden, kWidth}), leaf({kHidden}),
                                        leaf({kWidth, kHidden})};

  std::vector<at::Tensor> all() const {
    return {input, parameters[0], parameters[1], parameters[2]};
  }
  at::Tensor plain() const {
    const at::Tensor hidden = at::linear(input, parameters[0], parameters[1]);
    return at::linear(at::gelu(hidden, "tanh"), parameters[2]);
  }
};

std::string steps(const CachedPlan& plan) {
  std::string names;
  for (const Step& step : plan.plan.forward) names += step.name + " ";
  return names;
}

template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const PlanError& error) {
    return error.what();
  }
  return "none";
}

TEST(Pipeline, ComputesWhatPlainTorchDoes) {
  Pipeline pipeline(block());
  const Given given;
  const at::Tensor output = pipeline(given.input, given.parameters)[0], wanted = given.plain();
  EXPECT_TRUE(at::allclose(output, wanted));
  const at::Tensor by = at::randn_like(wanted);
  const auto got = grad({output}, given.all(), {by});
  const auto plain = grad({wanted}, given.all(), {by});
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::allclose(got[i], plain[i])) << i;
  EXPECT_EQ(steps(*pipeline.last_plan()), "linear_bias_activation Dropout BasicLinear ");
  EXPECT_EQ(pipeline.parameter_names(),
            (std::vector<std::string>{"0.weight", "1.bias", "4.weight"}));
}

TEST(Pipeline, FollowsARecipe) {
  Pipeline pipeline(block());
  const Given given;
  const at::Tensor exact = pipeline(given.input, given.parameters)[0];
  pipeline.set_recipe(recipe_of("mx e4m3, mx e4m3, mx e5m2"));
  const at::Tensor output = pipeline(given.input, given.parameters)[0];
  EXPECT_FALSE(at::allclose(output, exact));
  EXPECT_LT((output - exact).norm().item<double>(), 0.1 * exact.norm().item<double>());
  EXPECT_EQ(steps(*pipeline.last_plan()), "linear_bias_activation Dropout BasicLinear ");
  for (const at::Tensor& gradient : grad({output.sum()}, given.all())) {
    EXPECT_TRUE(gradient.isfinite().all().item<bool>());
  }
  pipeline.set_recipe(nullptr);
  EXPECT_TRUE(at::equal(pipeline(given.input, given.parameters)[0], exact));
  const std::string error = error_of([&] { pipeline.set_recipe(recipe_of("custom 3")); });
  EXPECT_EQ(error, "[Pipeline] recipe must name its formats, got custom 3");
}

TEST(Pipeline, KeepsAPlanForEachKey) {
  Pipeline pipeline(block(0.5));
  const Given given;
  const auto call = [&] {
    pipeline(given.input, given.parameters);
    return pipeline.last_plan();
  };
  const auto training = call();
  EXPECT_EQ(call(), training);
  pipeline.train(false);
  const auto evaluation = call();
  EXPECT_NE(evaluation, training);
  EXPECT_NE(to_text(training->plan).find("= dropout("), std::string::npos);
  EXPECT_EQ(to_text(evaluation->plan).find("= dropout("), std::string::npos);
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(call()->plan.needs_backward());
  }
  pipeline.train();
  EXPECT_EQ(call(), training);
  EXPECT_EQ(pipeline.plans().size(), 3u);
  EXPECT_EQ(training->key.device, Device::Cpu);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto float64_left_alone = call();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(float64_left_alone->key.autocast, DType::BFloat16);
}

TEST(Pipeline, KeepsABoundedNumberOfPlans) {
  std::vector<OpNode> ops;
  for (int i = 0; i < 7; ++i) ops.push_back(make_op("Bias", {{"size", int64_t{2}}}));
  Pipeline pipeline(ops);
  std::vector<at::Tensor> parameters(7, at::zeros({2}));
  for (int flags = 0; flags < 128; ++flags) {
    for (int i = 0; i < 7; ++i) {
      parameters[i] = at::zeros({2}).requires_grad_((flags >> i & 1) != 0);
    }
    pipeline(at::zeros({2}), parameters);
  }
  EXPECT_EQ(pipeline.plans().size(), 64u);
  // The last ones are there.
  const auto last = pipeline.last_plan();
  pipeline(at::zeros({2}), parameters);
  EXPECT_EQ(pipeline.last_plan(), last);
}

TEST(Pipeline, PlansAgainWhereItsPlansAreStale) {
  Pipeline pipeline(block());
  const Given given;
  const auto call = [&] {
    pipeline(given.input, given.parameters);
    return pipeline.last_plan();
  };
  const auto first = call();
  pipeline.forget_plans();
  const auto second = call();
  EXPECT_NE(second, first);
  touch_registry();
  EXPECT_NE(call(), second);
  EXPECT_EQ(pipeline.plans().size(), 1u);
}

TEST(Pipeline, RoutesExtraTensors) {
  std::vector<OpNode> ops = {make_op("MakeExtraOutput", {{"in_place", false}}),
                             make_op("Bias", {{"size", kWidth}}),
                             make_op("AddExtraInput", {{"in_place", false}}),
                             make_op("AddExtraInput", {{"in_place", false}})};
  ops[2].sources[0] = {0, 0};
  ops[0].visible[0] = false;
  Pipeline pipeline(ops);
  const at::Tensor input = at::randn({kWidth}), bias = at::randn({kWidth}), extra = at::ones({1});
  EXPECT_EQ(pipeline.extra_inputs(), 1u);
  const auto outputs = pipeline(input, {bias}, {extra.expand({kWidth})});
  ASSERT_EQ(outputs.size(), 1u);
  EXPECT_TRUE(at::allclose(outputs[0], 2 * input + bias + 1));
}

TEST(Pipeline, ThreadsShareIt) {
  Pipeline pipeline(block());
  const Given given;
  const at::Tensor wanted = given.plain().detach();
  std::atomic<int> right = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < 20; ++k) {
        const at::AutoGradMode grad_mode((i + k) % 2 == 0);
        if (k % 5 == 0) pipeline.forget_plans();
        right += at::allclose(pipeline(given.input, given.parameters)[0], wanted) ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 80);
}

TEST(Pipeline, RefusesWhatDoesNotFit) {
  EXPECT_EQ(error_of([] { make_op("Linar"); }),
            "[Pipeline] kind must be that of a declared op, got 'Linar'");
  EXPECT_EQ(error_of([] { make_op("Dropout"); }), "[Dropout] attributes must have 'p', got none");
  EXPECT_EQ(error_of([] {
              make_op("GELU", {{"approximate", std::string("none")}});
            }),
            "[GELU] attributes must be declared, got 'approximate'");
  EXPECT_EQ(error_of([] {
              make_op("ReLU", {{"cache_quantized_input", true}});
            }),
            "[ReLU] attributes must be declared, got 'cache_quantized_input'");
  EXPECT_EQ(error_of([] { Pipeline pipeline({}); }),
            "[Pipeline] ops must be one at least, got none");

  std::vector<OpNode> ops = {make_op("AddExtraInput", {{"in_place", false}}),
                             make_op("MakeExtraOutput", {{"in_place", false}})};
  ops[0].sources[0] = {1, 0};
  EXPECT_EQ(error_of([&] { Pipeline pipeline(ops); }),
            "[AddExtraInput] an extra input must come from an op before op 0, got op 1");
  std::swap(ops[0], ops[1]);
  ops[1].sources[0] = {0, 1};
  EXPECT_EQ(error_of([&] { Pipeline pipeline(ops); }),
            "[AddExtraInput] an extra input must be one of the 1 extra outputs of "
            "MakeExtraOutput, got 1");

  Pipeline pipeline(block());
  const Given given;
  EXPECT_EQ(error_of([&] { pipeline.last_plan(); }),
            "[Pipeline] last_plan() must follow a call, got none so far");
  EXPECT_EQ(error_of([&] { pipeline(given.input, {}); }),
            "[Pipeline] parameters must be 3 (0.weight, 1.bias, 4.weight), got 0");
  EXPECT_EQ(error_of([&] { pipeline(given.input, given.parameters, {given.input}); }),
            "[Pipeline] extra_inputs must be 0, got 1");
  EXPECT_EQ(error_of([&] { pipeline({}, given.parameters); }),
            "[Pipeline] input must be a tensor, got an undefined one");
  EXPECT_NE(error_of([&] { pipeline(at::randn({4, 3}, at::kDouble), given.parameters); }), "none");
  // It goes on.
  EXPECT_EQ(pipeline(given.input, given.parameters).size(), 1u);
}

TEST(Analysis, RefusesAKeyOfOtherOps) {
  const std::vector<OpNode> ops = block();
  PlanKey key{.tensors = {4, TensorMeta{}}, .training = {}};
  EXPECT_EQ(error_of([&] { make_plan(ops, key); }),
            "key must have a training flag for each of 5 ops, got 0");
  key.tensors.pop_back();
  EXPECT_EQ(error_of([&] { make_plan(ops, key); }),
            "key must have 4 tensors: the main input, extra inputs and parameters, got 3");
}

}  // namespace
}  // namespace transformer_ops
