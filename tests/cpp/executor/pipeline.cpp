// Pipelines that plan by themselves: no Python anywhere.
#include "runtime/pipeline.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <thread>

#include "executor/frozen_weights.h"
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

TEST(Pipeline, RoundsFrozenWeightsOnce) {
  Pipeline pipeline(block());
  pipeline.set_recipe(recipe_of("mx e4m3, mx e4m3, mx e5m2"));
  Given given;
  const auto step = [&] {
    std::vector<at::Tensor> all = pipeline(given.input, given.parameters);
    for (const at::Tensor& one : grad({all[0].sum()}, given.all())) all.push_back(one);
    return all;
  };
  const auto wanted = step();
  {
    const FrozenWeights region;
    for (int k = 0; k < 2; ++k) {
      const auto got = step();
      for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
    }
    {
      const at::NoGradGuard no_grad;
      given.parameters[2].mul_(2);
    }
    const auto version = given.parameters[2]._version();
    EXPECT_EQ(error_of(step),
              "[BasicLinear] weight must not be modified within frozen_weights(), got version " +
                  std::to_string(version) + " where it was rounded at version " +
                  std::to_string(version - 1) + " (op 4 of the plan)");
  }
  EXPECT_FALSE(at::equal(step()[0], wanted[0]));
}

// ---- delayed scaling

constexpr const char* kDelayed = "e4m3, e4m3, e5m2, delayed 4";
constexpr int64_t kHistory = 4;

// x W^T under delayed scaling, rounded by hand; its places are those of fp8_scale.
class Product {
 public:
  explicit Product(at::Tensor weight) : weight_(std::move(weight)) {}

  at::Tensor forward(const at::Tensor& input) {
    input_ = round(input, 0);
    rounded_weight_ = round(weight_, 1);
    return at::linear(input_, rounded_weight_);
  }
  // Gradients of input and weight.
  std::pair<at::Tensor, at::Tensor> backward(const at::Tensor& gradient) {
    const at::Tensor rounded = round(gradient, 2);
    return {rounded.mm(rounded_weight_), rounded.t().mm(input_)};
  }
  void update(const ScaleUpdate& how = {}) {
    for (Place& place : places_) {
      if (place.met < 0) continue;
      place.history.insert(place.history.begin(), std::exchange(place.met, -1.0f));
      place.history.resize(kHistory);
      const float amax = how.most_recent ? place.history[0] : std::ranges::max(place.history);
      if (amax > 0) place.scale = std::ldexp(place.largest / amax, -static_cast<int>(how.margin));
    }
  }

  at::Tensor scale() const {
    return at::tensor({places_[0].scale, places_[1].scale, places_[2].scale});
  }
  at::Tensor history() const {
    std::vector<at::Tensor> columns;
    for (const Place& place : places_) columns.push_back(at::tensor(place.history));
    return at::stack(columns, 1);
  }

 private:
  struct Place {
    at::ScalarType dtype;
    float largest;
    float scale = 1, met = -1;
    std::vector<float> history = std::vector<float>(kHistory);  // the latest first
  };

  at::Tensor round(const at::Tensor& tensor, int number) {
    Place& place = places_[number];
    place.met = std::max(place.met, tensor.abs().max().item<float>());
    const at::Tensor scaled = (tensor * place.scale).clamp(-place.largest, place.largest);
    return scaled.to(place.dtype).to(at::kFloat) * (1.0f / place.scale);
  }

  at::Tensor weight_, input_, rounded_weight_;
  Place places_[3] = {
      {at::kFloat8_e4m3fn, 448}, {at::kFloat8_e4m3fn, 448}, {at::kFloat8_e5m2, 57344}};
};

// Two products with a ReLU in between, and the same rounded by hand.
struct Delayed {
  explicit Delayed(const char* recipe = kDelayed) {
    at::manual_seed(7);
    for (const auto& [out, in] : {std::pair(kHidden, kWidth), {kWidth, kHidden}}) {
      weights.push_back(at::randn({out, in}).requires_grad_());
      products.emplace_back(weights.back().detach());
    }
    pipeline.set_recipe(recipe_of(recipe));
  }

  // Outputs and gradients of a step whose tensors are of another size each time.
  std::vector<at::Tensor> step(int k) {
    const at::Tensor output = pipeline(input(k), weights)[0];
    std::vector<at::Tensor> all = {output.detach()};
    for (const at::Tensor& one : grad({output}, weights, {gradient(k)})) all.push_back(one);
    return all;
  }
  std::vector<at::Tensor> by_hand(int k) {
    const at::Tensor hidden = products[0].forward(input(k));
    const at::Tensor output = products[1].forward(hidden.relu());
    const auto [inner, second] = products[1].backward(gradient(k));
    const auto [_, first] = products[0].backward(inner * (hidden > 0));
    return {output, first, second};
  }
  void update(const ScaleUpdate& how = {}) {
    pipeline.update_scales(how);
    for (Product& product : products) product.update(how);
  }

  at::Tensor input(int k) const { return sized(k, {6, kWidth}); }
  at::Tensor gradient(int k) const { return 1e-4 * sized(k + 100, {6, kWidth}); }
  static at::Tensor sized(int k, at::IntArrayRef sizes) {
    at::manual_seed(k);
    constexpr float kSizes[] = {1.0f, 30.0f, 0.2f};
    return kSizes[k % 3] * at::randn(sizes);
  }

  Pipeline pipeline = Pipeline({linear(kWidth, kHidden), make_op("ReLU"), linear(kHidden, kWidth)});
  std::vector<at::Tensor> weights;
  std::vector<Product> products;
};

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], wanted[i])) << i;
}

TEST(DelayedScaling, StepsAreThoseOfTheFormula) {
  for (const ScaleUpdate& how : {ScaleUpdate{}, {.margin = 2, .most_recent = true}}) {
    Delayed delayed;
    for (int k = 0; k < 7; ++k) {
      delayed.update(how);
      expect_equal(delayed.step(k), delayed.by_hand(k));
      const auto scales = delayed.pipeline.scales();
      ASSERT_EQ(scales.size(), 10u);
      for (int product = 0; product < 2; ++product) {
        const std::string op = std::to_string(2 * product) + ".";
        const Product& by_hand = delayed.products[product];
        EXPECT_TRUE(at::equal(scales.at(op + "fp8_scale"), by_hand.scale())) << op << k;
        EXPECT_TRUE(at::equal(scales.at(op + "fp8_amax_history"), by_hand.history())) << op << k;
      }
    }
  }
}

TEST(DelayedScaling, TakesTheLargestOfAllCallsWithGradients) {
  Delayed delayed;
  delayed.pipeline.update_scales();  // before any call there is nothing to do
  EXPECT_TRUE(delayed.pipeline.scales().empty());
  const at::Tensor kept = delayed.pipeline(delayed.input(0), delayed.weights)[0];
  delayed.pipeline(3 * delayed.input(0), delayed.weights);
  {
    const at::NoGradGuard no_grad;
    delayed.pipeline(100 * delayed.input(0), delayed.weights);
  }
  {
    const c10::InferenceMode inference;
    delayed.pipeline(100 * delayed.input(0), delayed.weights);
  }
  delayed.pipeline.update_scales();
  const at::Tensor amax = 3 * delayed.input(0).abs().max();
  const auto history = delayed.pipeline.scales().at("0.fp8_amax_history");
  EXPECT_EQ(history[0][0].item<float>(), amax.item<float>());
  EXPECT_EQ(history[0][2].item<float>(), 0);
  // Backward has the scales of its forward, and what it meets counts later.
  const auto got = grad({kept}, delayed.weights, {delayed.gradient(0)});
  const auto wanted = delayed.by_hand(0);
  expect_equal(got, {wanted[1], wanted[2]});
  delayed.pipeline.update_scales();
  EXPECT_GT(delayed.pipeline.scales().at("0.fp8_amax_history")[0][2].item<float>(), 0);
}

TEST(DelayedScaling, ReducesMagnitudesOverProcesses) {
  Delayed delayed;
  delayed.step(0);
  std::vector<int64_t> counts;
  const auto reduce = [&](at::Tensor& met) {
    counts.push_back(met.numel());
    met.fill_(7);  // of another process
  };
  delayed.pipeline.update_scales({.reduce = reduce});
  EXPECT_EQ(counts, std::vector<int64_t>({6}));
  const auto scale = delayed.pipeline.scales().at("2.fp8_scale");
  EXPECT_TRUE(at::equal(scale, at::tensor({64.0f, 64.0f, 8192.0f})));
}

TEST(DelayedScaling, ResumesBitForBit) {
  Delayed delayed, resumed;
  for (int k = 0; k < 3; ++k) {
    delayed.update();
    delayed.step(k);
  }
  const auto saved = delayed.pipeline.scales();
  resumed.pipeline.set_scales(saved);
  delayed.update();
  resumed.update();
  expect_equal(resumed.step(3), delayed.step(3));
  // They are copies: the one that goes on changes nothing of the other.
  EXPECT_FALSE(saved.at("0.fp8_amax").is_same(resumed.pipeline.scales().at("0.fp8_amax")));
  EXPECT_EQ(resumed.pipeline.scales().size(), saved.size());
}

void check_scales_of_groups(bool is_single) {
  Pipeline pipeline({make_op("GroupedLinear", {{"num_groups", int64_t{2}},
                                               {"in_features", kWidth},
                                               {"out_features", kHidden},
                                               {"single_grouped_weight", is_single},
                                               {"single_grouped_bias", is_single},
                                               {"accumulate_into_main_grad", false},
                                               {"delay_wgrad_compute", false}})});
  pipeline.set_recipe(recipe_of(kDelayed));
  const at::Tensor input = at::randn({6, kWidth}), splits = at::tensor({6, 0}, at::kLong);
  const at::Tensor weight = at::randn({2, kHidden, kWidth}).requires_grad_();
  std::vector<at::Tensor> parameters = {weight, at::Tensor()};
  if (!is_single) parameters = {weight[0], weight[1], at::Tensor(), at::Tensor()};
  pipeline(input, parameters, {splits, at::Tensor()});
  pipeline.update_scales();
  const auto scale = pipeline.scales().at("0.fp8_scale");
  ASSERT_EQ(scale.sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(scale[0][0].item<float>(), (448 / input.abs().max()).item<float>());
  EXPECT_EQ(scale[0][1].item<float>(), 1);  // it had no rows
  EXPECT_EQ(scale[1][1].item<float>(), (448 / weight[1].abs().max()).item<float>());
}

TEST(DelayedScaling, KeepsScalesOfEachGroup) { check_scales_of_groups(/*is_single=*/true); }

TEST(DelayedScaling, KeepsScalesOfEachOfAList) { check_scales_of_groups(/*is_single=*/false); }

TEST(DelayedScaling, ThreadsShareScales) {
  Delayed delayed;
  const at::Tensor input = delayed.input(1);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < 20; ++k) {
        if (i == 0 && k % 4 == 0) delayed.pipeline.update_scales();
        delayed.pipeline(input, delayed.weights)[0].sum().backward();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  delayed.pipeline.update_scales();
  const at::Tensor amax = input.abs().max();
  const auto scale = delayed.pipeline.scales().at("0.fp8_scale");
  EXPECT_EQ(scale[0].item<float>(), (448 / amax).item<float>());
}

TEST(DelayedScaling, RefusesWhatDoesNotFit) {
  Delayed delayed;
  Pipeline& pipeline = delayed.pipeline;
  delayed.step(0);
  EXPECT_EQ(error_of([&] { pipeline.update_scales({.margin = -64}); }),
            "[Pipeline] margin must be an integer below 64, got -64");
  pipeline.set_recipe(recipe_of("e4m3, e4m3, e4m3, delayed 4"));
  EXPECT_EQ(error_of([&] { delayed.step(1); }),
            "[BasicLinear] scales must be for the recipe 'e4m3, e4m3, e4m3, delayed 4', got those "
            "for 'e4m3, e4m3, e5m2, delayed 4'; reset_scales() drops them");
  const auto saved = pipeline.scales();
  pipeline.reset_scales();
  EXPECT_TRUE(pipeline.scales().empty());
  delayed.step(1);
  pipeline.set_recipe(recipe_of("e4m3, e4m3, e4m3"));
  EXPECT_EQ(error_of([&] { pipeline.update_scales(); }),
            "[Pipeline] recipe must have delayed scales where they are updated, got 'e4m3, e4m3, "
            "e4m3'");
  pipeline.set_recipe(nullptr);
  EXPECT_EQ(error_of([&] { pipeline.update_scales(); }),
            "[Pipeline] recipe must have delayed scales where they are updated, got none");

  const auto refuses = [&](const std::string& name, const at::Tensor& tensor,
                           const std::string& message) {
    auto wrong = saved;
    wrong[name] = tensor;
    EXPECT_EQ(error_of([&] { pipeline.set_scales(wrong); }), "[Pipeline] " + message);
  };
  const std::string named =
      "scales must be named 'op.name', for an op that takes rounded tensors, got ";
  refuses("1.fp8_scale", at::ones({3}), named + "'1.fp8_scale'");
  refuses("9.fp8_scale", at::ones({3}), named + "'9.fp8_scale'");
  refuses("fp8_scale", at::ones({3}), named + "'fp8_scale'");
  refuses("0.scale", at::ones({3}), named + "'0.scale'");
  refuses("2.fp8_amax", {}, "scales of an op must be set together, got none of 2.fp8_amax");
  refuses("2.fp8_amax", at::ones({2}),
          "fp8_amax must hold 3 rows in float32, got Float of shape [2]");
  refuses("0.fp8_largest", at::ones({3}),
          "fp8_largest must hold the largest numbers of formats, got 1");
  EXPECT_EQ(pipeline.scales().at("0.fp8_largest")[2].item<float>(), 448);
  pipeline.set_scales(saved);
  EXPECT_EQ(pipeline.scales().at("0.fp8_largest")[2].item<float>(), 57344);
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
  EXPECT_TRUE(at::equal(outputs[0], input + bias + input + extra));
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
              make_op("Bias", {{"size", int64_t{4}}, {"cache_quantized_input", true}});
            }),
            "[Bias] attributes must be declared, got 'cache_quantized_input'");
  EXPECT_EQ(error_of([] { Pipeline pipeline({}); }), "[Pipeline] ops must not be empty, got none");

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
