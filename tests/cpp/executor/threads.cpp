// Threads that run plans at once, of one text and of ever new ones, and processes forked meanwhile.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/autograd.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int kThreads = 4;
constexpr int kRuns = 25;
// The activation's result has more than 64 KiB: it comes from the pool.
constexpr int64_t kRows = 400;

// Linear(6, 32), GELU, ConstantScale; each scale makes another text.
std::string plan_text(double scale) {
  const std::string number = std::to_string(scale);
  return R"(plan 5
op 0 BasicLinear accumulate_into_main_grad=false in_features=6 out_features=32
op 1 Bias size=32
op 2 GELU
op 3 ConstantScale scale=)" +
         number + R"(
parameters p0.weight p1.bias
gradients g0 dp0.weight dp1.bias
first_backward 0
forward linear_bias_activation ops=[0, 1, 2]
  x3, s2.input = linear_bias_activation(x0, p0.weight, p1.bias, "gelu", true)
  save s0.input=x0, s0.weight=p0.weight, s2.input=s2.input
forward ConstantScale ops=[3]
  x4 = constant_scale(x3, )" +
         number + R"()
backward BasicLinear ops=[0]
  g0, dp0.weight = linear_backward(g1, s0.input, s0.weight, [true, true])
backward activation_bias ops=[1, 2]
  g1, dp1.bias = activation_bias_backward(g3, s2.input, "gelu")
backward ConstantScale ops=[3]
  g3 = constant_scale_backward(g4, )" +
         number + ")\n";
}

Tensor output_of(const std::string& text, const Tensors& inputs) {
  using Signature = Tensors(c10::string_view, const Tensor&, at::TensorList, at::TensorList);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("transformer_ops::run_plan", "")
                             .typed<Signature>();
  return op.call(text, inputs[0], {}, {inputs[1], inputs[2]})[0];
}

Tensors random_inputs() {
  at::manual_seed(7);
  Tensors inputs;
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{kRows, 6}, {32, 6}, {32}}) {
    inputs.push_back(at::randn(shape, at::kDouble).requires_grad_());
  }
  return inputs;
}

Tensors gradients(const Tensor& output, const Tensors& inputs) {
  return torch::autograd::grad({output.sum()}, inputs, {}, /*retain_graph=*/true);
}

bool all_close(const Tensors& got, const Tensors& want, double scale = 1) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (!at::allclose(got[i], want[i] * scale, 1e-9, 1e-9)) return false;
  }
  return got.size() == want.size();
}

// Work of one thread; returns how many results were wrong.
template <typename Work>
int wrong_results(Work&& work) {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id) threads.emplace_back([&, id] { wrong += work(id); });
  for (std::thread& thread : threads) thread.join();
  return wrong;
}

class RunPlanThreads : public testing::Test {
 protected:
  // A text that no test had before.
  static double new_scale() {
    static std::atomic<int> made = 0;
    return 2 + 0.001 * ++made;
  }

  const Tensors inputs_ = random_inputs();
  const Tensors want_ = gradients(output_of(plan_text(1), inputs_), inputs_);
};

TEST_F(RunPlanThreads, RunOneText) {
  const std::string text = plan_text(new_scale());
  const Tensors want = gradients(output_of(text, inputs_), inputs_);
  EXPECT_EQ(0, wrong_results([&](int) {
              int wrong = 0;
              for (int i = 0; i < kRuns; ++i) {
                wrong += !all_close(gradients(output_of(text, inputs_), inputs_), want);
              }
              return wrong;
            }));
}

TEST_F(RunPlanThreads, CompileNewTexts) {
  EXPECT_EQ(0, wrong_results([&](int) {
              int wrong = 0;
              for (int i = 0; i < kRuns; ++i) {
                const double scale = new_scale();
                const Tensor output = output_of(plan_text(scale), inputs_);
                wrong += !all_close(gradients(output, inputs_), want_, scale);
              }
              return wrong;
            }));
}

TEST_F(RunPlanThreads, CompileTheSameNewText) {
  for (int i = 0; i < kRuns; ++i) {
    const double scale = new_scale();
    EXPECT_EQ(0, wrong_results([&](int) {
                const Tensor output = output_of(plan_text(scale), inputs_);
                return !all_close(gradients(output, inputs_), want_, scale);
              }));
  }
}

TEST_F(RunPlanThreads, GoBackwardThroughOneGraph) {
  const Tensor output = output_of(plan_text(1), inputs_);
  EXPECT_EQ(0, wrong_results([&](int) {
              int wrong = 0;
              for (int i = 0; i < kRuns; ++i)
                wrong += !all_close(gradients(output, inputs_), want_);
              return wrong;
            }));
}

TEST_F(RunPlanThreads, FreeWhatOthersMade) {
  std::vector<Tensor> made(kThreads * kRuns);
  EXPECT_EQ(0, wrong_results([&](int id) {
              for (int i = 0; i < kRuns; ++i)
                made[id * kRuns + i] = output_of(plan_text(1), inputs_);
              return 0;
            }));
  EXPECT_EQ(0, wrong_results([&](int id) {
              for (int i = id; i < kThreads * kRuns; i += kThreads) made[i].reset();
              return 0;
            }));
}

TEST_F(RunPlanThreads, AForkedProcessCompiles) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the allocator of GCC 12's ASan does not survive a fork amid threads";
#endif
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int id = 0; id < 2; ++id) {
    threads.emplace_back([&] {
      const at::NoGradGuard no_grad;
      while (!stop) output_of(plan_text(new_scale()), inputs_);
    });
  }
  bool hung = false;
  for (int i = 0; i < 10 && !hung; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      // Ends a child that waits for a lock which nobody will open.
      signal(SIGALRM, SIG_DFL);
      alarm(10);
      // As a worker of a DataLoader does: the team of libgomp is the parent's.
      at::set_num_threads(1);
      const at::NoGradGuard no_grad;
      output_of(plan_text(-1 - i), {at::ones({2, 6}), at::ones({32, 6}), at::ones({32})});
      _exit(0);
    }
    int status = 1;
    waitpid(child, &status, 0);
    hung = status != 0;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(hung);
}

#if defined(__SANITIZE_THREAD__)
// Two threads count without a lock, in a hook that libtorch calls: no suppression may hide that.
void race(const Tensors& inputs) {
  int calls = 0;
  wrong_results([&](int) {
    const Tensor output = output_of(plan_text(1), inputs);
    output.register_hook([&](const Tensor&) { ++calls; });
    for (int i = 0; i < 10 * kRuns; ++i) gradients(output, inputs);
    return 0;
  });
  _exit(0);
}

TEST_F(RunPlanThreads, TheSanitizerSeesARace) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(race(inputs_), testing::ExitedWithCode(66), "data race .*threads.cpp");
}
#endif

}  // namespace
