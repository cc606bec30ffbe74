// Before every test torch's generator has the same seed: a test draws the same numbers in each run.
#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace transformer_ops {
namespace {

struct Seed : testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { at::manual_seed(0); }
};

[[maybe_unused]] const bool appended = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new Seed);
  return true;
}();

}  // namespace
}  // namespace transformer_ops
