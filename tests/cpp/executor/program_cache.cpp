// The cache of programs: what it keeps, and its lock.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "executor/run.h"

namespace transformer_ops {
namespace {

std::string scale_text(double scale) {
  const std::string number = to_text(Attribute(scale));
  return "plan 5\nop 0 ConstantScale scale=" + number +
         "\ngradients g0\nfirst_backward 0\nforward ConstantScale ops=[0]\n  x1 = "
         "constant_scale(x0, " +
         number + ")\nbackward ConstantScale ops=[0]\n  g0 = constant_scale_backward(g1, " +
         number + ")\n";
}

TEST(ProgramCache, ATextIsCompiledOnce) {
  EXPECT_EQ(program_for(scale_text(2.5))->id, program_for(scale_text(2.5))->id);
}

TEST(ProgramCache, ForgetsTheTextThatWasAskedForLongestAgo) {
  const uint64_t kept = program_for(scale_text(0.5))->id,
                 forgotten = program_for(scale_text(0.25))->id;
  for (int i = 0; i < 2000; ++i) {
    program_for(scale_text(1.0 + i));
    EXPECT_EQ(program_for(scale_text(0.5))->id, kept);
  }
  EXPECT_NE(program_for(scale_text(0.25))->id, forgotten);
}

// A graph passes the same string at each call, which is found without the cache.
TEST(ProgramCache, KeepsATextThatOneStringAsksForAgainAndAgain) {
  const std::string kept = scale_text(0.75), forgotten = scale_text(0.375);
  const uint64_t kept_id = program_for(kept)->id, forgotten_id = program_for(forgotten)->id;
  for (int i = 0; i < 2000; ++i) {
    program_for(scale_text(20000.0 + i));
    EXPECT_EQ(program_for(kept)->id, kept_id);
  }
  EXPECT_NE(program_for(forgotten)->id, forgotten_id);
}

TEST(ProgramCache, ANodeKeepsItsProgram) {
  const at::Tensor x = at::ones({3}).requires_grad_();
  const at::Tensor y = run(program_for(scale_text(0.125)), {x})[0];
  for (int i = 0; i < 2000; ++i) program_for(scale_text(5000.0 + i));
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 0.125)));
}

TEST(ProgramCache, ThreadsShareIt) {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const double scale = 10000.0 + (i + 7 * t) % 40;
        const at::Tensor x = at::ones({4}).requires_grad_();
        const at::Tensor y = run(program_for(scale_text(scale)), {x})[0];
        y.sum().backward();
        if (x.grad()[0].item<double>() != scale) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// A child inherits no other thread, so nobody would give back what another thread held.
TEST(ProgramCache, AForkedChildFindsItFree) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the allocator of GCC 12's ASan does not survive a fork amid threads";
#endif
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; !stop; ++i) program_for(scale_text(1e6 * (t + 1) + i));
    });
  }
  int finished = 0;
  constexpr int kForks = 40;
  for (int i = 0; i < kForks; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      const bool found = program_for(scale_text(1e8 + i))->plan.size() == 1;
      _exit(found ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) ++finished;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(finished, kForks);
}

}  // namespace
}  // namespace transformer_ops
