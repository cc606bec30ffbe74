// Steps that the library cannot run itself, by a host written in C++: no Python anywhere.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <functional>
#include <stdexcept>

#include "executor/run.h"

namespace transformer_ops {
namespace {

using torch::autograd::grad;

// ConstantScale(2), Scale by its parameter (of the host), Bias(3).
constexpr const char* kPlan = R"(plan 5
op 0 ConstantScale scale=2.0
op 1 Scale native=false
op 2 Bias size=3
parameters p1.0 p2.bias
gradients g0 dp1.0 dp2.bias
first_backward 0
forward ConstantScale ops=[0]
  x1 = constant_scale(x0, 2.0)
forward Scale ops=[1] python=1
forward Bias ops=[2]
  x3 = bias(x2, p2.bias)
backward ConstantScale ops=[0]
  g0 = constant_scale_backward(g1, 2.0)
backward Scale ops=[1] python=1
backward Bias ops=[2]
  g2 = g3
  dp2.bias = bias_backward(g3)
)";

struct Scale : HostCall {
  explicit Scale(at::Tensor by) : weight(std::move(by)) {}

  Tensors forward(int step, const std::vector<at::ScalarType>& dtypes,
                  const Tensors& arguments) override {
    EXPECT_EQ(step, 0);
    EXPECT_EQ(dtypes, std::vector<at::ScalarType>{at::kFloat});
    if (fails_in_forward) throw std::runtime_error("no forward");
    input = arguments[0];
    return {input * weight};
  }
  std::vector<Tensors> saved() override { return {{}, {std::move(input), weight}, {}, {}}; }
  Tensors backward(int step, const BackwardArguments& arguments) override {
    EXPECT_EQ(step, 0);
    ++backwards;
    const Tensors& own = arguments.saved[0];
    const Tensors given = {arguments.grads[0] * own[1], (arguments.grads[0] * own[0]).sum(0)};
    return change(given);
  }
  std::string forward_method(int, bool saves) override {
    return saves ? "[Scale] save_ctx" : "[Scale] forward";
  }
  std::string parameter_name(int op, int k) override {
    return "op" + std::to_string(op) + "." + std::to_string(k);
  }
  std::optional<Accumulation> accumulation(int) override { return std::nullopt; }
  at::Tensor accumulate(int, int, const at::Tensor& gradient) override { return gradient; }
  void note_saved(std::vector<SavedSlot> slots) override { noted = std::move(slots); }
  void delay(int, std::shared_ptr<const DeferredCall>) override { FAIL() << "nothing is delayed"; }

  at::Tensor weight, input;
  bool fails_in_forward = false;
  int backwards = 0;
  std::vector<SavedSlot> noted;
  std::function<Tensors(const Tensors&)> change = [](const Tensors& given) { return given; };
};

class Host : public testing::Test {
 protected:
  Host() {
    auto host = std::make_unique<Scale>(weight_);
    scale_ = host.get();
    host_ = SharedHostCall(std::move(host));
  }

  at::Tensor call() { return run(program_, {x_, weight_, bias_}, host_)[0]; }

  // The text of the error that the call and its backward raise.
  std::string error_of_backward() {
    try {
      grad({call().sum()}, {x_, weight_}, {}, {}, false, true);
    } catch (const std::exception& error) {
      return c10::str(error.what()).substr(0, c10::str(error.what()).find('\n'));
    }
    return "none";
  }

  SharedProgram program_ = share(compile(parse_plan(kPlan)));
  at::Tensor x_ = at::rand({4, 3}).requires_grad_();
  at::Tensor weight_ = at::rand({3}).requires_grad_();
  at::Tensor bias_ = at::rand({3}).requires_grad_();
  Scale* scale_;
  SharedHostCall host_;
};

TEST_F(Host, RunsItsStepsBetweenNativeOnes) {
  const at::Tensor got = call(), want = 2 * x_ * weight_ + bias_;
  EXPECT_TRUE(at::allclose(got, want));
  const at::Tensor given = at::rand_like(want);
  const auto inputs = Tensors{x_, weight_, bias_};
  const auto found = grad({got}, inputs, {given}), wanted = grad({want}, inputs, {given});
  for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(at::allclose(found[i], wanted[i]));
}

TEST_F(Host, KeepsWhatItsContextSaves) {
  call();
  ASSERT_EQ(scale_->noted.size(), 1);  // the parameter is kept anyway
  EXPECT_EQ(scale_->noted[0].name, "saved0");
  EXPECT_EQ(scale_->noted[0].op, 1);
  EXPECT_EQ(scale_->noted[0].bytes, 4 * 3 * 4);
}

TEST_F(Host, DiesWithTheGraph) {
  struct Counted : Scale {
    Counted(at::Tensor by, bool* died) : Scale(std::move(by)), died_(died) {}
    ~Counted() override { *died_ = true; }
    bool* died_;
  };
  bool died = false;
  at::Tensor output;
  {
    const SharedHostCall host(std::make_unique<Counted>(weight_, &died));
    output = run(program_, {x_, weight_, bias_}, host)[0];
  }
  EXPECT_FALSE(died);
  output.reset();
  EXPECT_TRUE(died);
}

TEST_F(Host, WithoutGradientsNothingIsKept) {
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(call().requires_grad());
  EXPECT_TRUE(scale_->input.defined());  // saved() was not asked for
}

TEST_F(Host, NoneMeansNoGradientForAllBefore) {
  scale_->change = [](const Tensors& given) { return Tensors{{}, given[1]}; };
  const auto found = grad({call().sum()}, {x_, weight_, bias_}, {}, {}, false, true);
  EXPECT_FALSE(found[0].defined());
  EXPECT_TRUE(found[1].defined() && found[2].defined());
}

TEST_F(Host, AGradientTakesTheShapeAndDtypeOfItsTensor) {
  scale_->change = [](const Tensors& given) {
    return Tensors{given[0].to(at::kDouble), given[1].expand({5, 3})};
  };
  const auto found = grad({call().sum()}, {x_, weight_});
  EXPECT_EQ(found[0].scalar_type(), at::kFloat);
  EXPECT_EQ(found[1].sizes(), at::IntArrayRef({3}));
}

TEST_F(Host, AWrongGradientNamesStepAndParameter) {
  scale_->change = [](const Tensors& given) { return Tensors{given[0], at::ones({1})}; };
  EXPECT_EQ(error_of_backward(),
            "[Scale] gradient of parameter 'op1.0' of op 1 must have shape (3,), got (1,)");
  scale_->change = [](const Tensors& given) {
    return Tensors{at::complex(given[0], given[0]), given[1]};
  };
  EXPECT_EQ(error_of_backward(),
            "[Scale] gradient of the input must have dtype torch.float32, got torch.complex64");
}

TEST_F(Host, ItsErrorsReachTheCallerAndNothingIsBroken) {
  scale_->fails_in_forward = true;
  EXPECT_THROW(call(), std::runtime_error);
  scale_->fails_in_forward = false;
  scale_->change = [](const Tensors&) -> Tensors { throw std::runtime_error("no backward"); };
  EXPECT_EQ(error_of_backward(), "no backward");
  scale_->change = [](const Tensors& given) { return given; };
  EXPECT_EQ(error_of_backward(), "none");
}

TEST_F(Host, HasNoSecondDerivative) {
  const at::Tensor loss = call().sum();
  EXPECT_THROW(grad({loss}, {x_}, {}, true, /*create_graph=*/true), c10::Error);
}

TEST_F(Host, RunsNoCallWithoutOne) {
  EXPECT_THROW(run(program_, {x_, weight_, bias_}), c10::Error);
}

}  // namespace
}  // namespace transformer_ops
