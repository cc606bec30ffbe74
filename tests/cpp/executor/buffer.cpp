// Results on the pool: what a failing op leaves behind, and storages in C++.
#include "op/buffer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <thread>

#include "op/typed_op.h"

namespace transformer_ops {
namespace {

// The last item of a parallel loop throws, in a worker thread where there are several.
void throw_in_worker(const Tensor& input, bool throws, Tensor& output) {
  auto* const data = output.mutable_data_ptr<float>();
  at::parallel_for(0, output.numel(), 1024, [&](int64_t begin, int64_t end) {
    std::fill(data + begin, data + end, 1.0f);
    TORCH_CHECK(end < input.numel() || !throws, "[may_throw] asked to throw");
  });
}

Tensor may_throw(const Tensor& input, bool throws) {
  static const bool registered = [] {
    register_typed_op({.schema = "may_throw(Tensor input, bool throws) -> Tensor output",
                       .bodies = {.cpu = throw_in_worker}});
    return true;
  }();
  static_cast<void>(registered);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("transformer_ops::may_throw", "");
  torch::jit::Stack stack = {input, throws};
  op.callBoxed(stack);
  return stack[0].toTensor();
}

TEST(Buffer, AWorkerThatThrowsLeaksNothing) {
  const Tensor input = at::zeros({512, 512});
  may_throw(input, false);
  const memory::Stats before = pool().stats();
  for (int i = 0; i < 5; ++i) {
    EXPECT_THROW(may_throw(input, true), c10::Error);
    EXPECT_EQ(pool().stats().in_use_bytes, before.in_use_bytes);
    EXPECT_TRUE(at::equal(may_throw(input, false), at::ones({512, 512})));
  }
  EXPECT_EQ(pool().stats().misses, before.misses);
}

TEST(Buffer, IsLikeATensorOfTorch) {
  const Tensor ours = empty_cpu({3, 0, 5}, at::kBFloat16);
  EXPECT_EQ(ours.sizes(), at::IntArrayRef({3, 0, 5}));
  const Tensor large = empty_cpu({300, 100}, at::kDouble);
  const Tensor like = at::empty({300, 100}, at::kDouble);
  EXPECT_EQ(large.strides(), like.strides());
  EXPECT_EQ(large.key_set(), like.key_set());
  EXPECT_EQ(large.storage().nbytes(), like.storage().nbytes());
  EXPECT_TRUE(large.storage().resizable());
  EXPECT_THROW(empty_cpu({-1}, at::kFloat), c10::Error);
  EXPECT_THROW(empty_cpu({int64_t{1} << 40, int64_t{1} << 40}, at::kFloat), c10::Error);
}

// Below the pool's smallest block, where memory is malloc's.
TEST(Buffer, SmallOnesLieOnTheBoundaryOfTorchsOwn) {
  Tensors kept;
  for (int64_t bytes = 1; bytes < 3000; bytes += 7) {
    const Tensor small = empty_cpu({bytes}, at::kByte);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(small.const_data_ptr()) % c10::gAlignment, 0U);
    small.fill_(bytes % 251);
    kept.push_back(small);
    if (bytes % 3 == 0) kept.erase(kept.begin());
  }
  for (const Tensor& small : kept) EXPECT_TRUE((small == small.numel() % 251).all().item<bool>());
  const Tensor grown = empty_cpu({3}, at::kFloat).fill_(2);
  grown.resize_({2000});
  EXPECT_TRUE(at::equal(grown.narrow(0, 0, 3), at::full({3}, 2.0f)));
}

TEST(Buffer, AnotherThreadMayDropTheLastReference) {
  const size_t in_use = pool().stats().in_use_bytes;
  Tensor tensor = empty_cpu({1024, 1024}, at::kFloat);
  EXPECT_EQ(pool().stats().in_use_bytes, in_use + 4194304);
  std::thread([moved = std::move(tensor)]() mutable { moved.reset(); }).join();
  EXPECT_EQ(pool().stats().in_use_bytes, in_use);
}

}  // namespace
}  // namespace transformer_ops
