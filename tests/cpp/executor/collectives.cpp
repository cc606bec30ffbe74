// Pipelines of two ranks, one thread each, over process groups that the program itself registers.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "runtime/pipeline.h"

namespace transformer_ops {
namespace {

constexpr int kRanks = 2;

// Where the ranks meet: each gives a tensor and gets those of all, in order.
class Meeting {
 public:
  std::vector<at::Tensor> exchange(int rank, const at::Tensor& given) {
    std::unique_lock lock(mutex_);
    // The last round has been left by all.
    left_.wait(lock, [&] { return !given_[rank].defined(); });
    given_[rank] = given.clone();
    if (++arrived_ == kRanks) met_.notify_all();
    met_.wait(lock, [&] { return arrived_ == kRanks; });
    std::vector<at::Tensor> all(given_, given_ + kRanks);
    if (++leaving_ == kRanks) {
      for (at::Tensor& tensor : given_) tensor.reset();
      arrived_ = leaving_ = 0;
      left_.notify_all();
    } else {
      left_.wait(lock, [&] { return leaving_ == 0; });
    }
    return all;
  }

 private:
  std::mutex mutex_;
  std::condition_variable met_, left_;
  at::Tensor given_[kRanks];
  int arrived_ = 0, leaving_ = 0;
};

class Done : public c10d::Work {
 public:
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

class ThreadBackend : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Result = c10::intrusive_ptr<c10d::Work>;

  ThreadBackend(Meeting& meeting, int rank) : Backend(rank, kRanks), meeting_(meeting) {}

  const std::string getBackendName() const override { return "threads"; }

  Result _allgather_base(at::Tensor& output, at::Tensor& input,
                         const c10d::AllgatherOptions&) override {
    output.copy_(at::cat(meeting_.exchange(getRank(), input)));
    return c10::make_intrusive<Done>();
  }
  Result allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return c10::make_intrusive<Done>();
  }
  Result _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                              const c10d::ReduceScatterOptions&) override {
    const Tensors all = meeting_.exchange(getRank(), input);
    output.copy_((all[0] + all[1]).chunk(kRanks)[getRank()]);
    return c10::make_intrusive<Done>();
  }
  Result reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                         const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i)
      _reduce_scatter_base(outputs[i], inputs[i], options);
    return c10::make_intrusive<Done>();
  }
  Result allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    for (at::Tensor& tensor : tensors) {
      const Tensors all = meeting_.exchange(getRank(), tensor);
      tensor.copy_(all[0] + all[1]);
    }
    return c10::make_intrusive<Done>();
  }
  Result allreduce_coalesced(Tensors& tensors,
                             const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

 private:
  Meeting& meeting_;
};

std::string name_of_group(int rank) { return "threads" + std::to_string(rank); }

// Registers a group for each rank, under names of their own: they are all in this process.
class Groups {
 public:
  Groups() {
    for (int rank = 0; rank < kRanks; ++rank) {
      auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, kRanks);
      group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                        c10::make_intrusive<ThreadBackend>(meeting_, rank));
      c10d::register_process_group(name_of_group(rank), group);
      groups_.push_back(std::move(group));  // the registry does not own it
    }
  }
  ~Groups() {
    for (int rank = 0; rank < kRanks; ++rank) {
      c10d::unregister_process_group(name_of_group(rank));
    }
  }

 private:
  Meeting meeting_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
};

OpNode product(int64_t in_features, int64_t out_features) {
  return make_op("BasicLinear", {{"in_features", in_features},
                                 {"out_features", out_features},
                                 {"accumulate_into_main_grad", false}});
}

OpNode collective(const char* kind, int rank) {
  return make_op(kind, {{"group_size", int64_t{kRanks}}, {"group", name_of_group(rank)}});
}

std::string steps_of(const Plan& plan) {
  std::string names;
  for (const Step& step : plan.forward) names += step.name + " ";
  return names;
}

// An MLP whose hidden features and whose rows are split over the ranks, against the whole one.
TEST(Collectives, TensorAndSequenceParallelPipelines) {
  const Groups groups;
  const at::Tensor x = at::randn({6, 8}, at::kDouble), up = at::randn({16, 8}, at::kDouble);
  const at::Tensor down = at::randn({8, 16}, at::kDouble), grad = at::randn({6, 8}, at::kDouble);
  const at::Tensor inputs[] = {x.clone().requires_grad_(), up.clone().requires_grad_(),
                               down.clone().requires_grad_()};
  const at::Tensor whole =
      at::linear(at::gelu(at::linear(inputs[0], inputs[1]), "tanh"), inputs[2]);
  const auto want = torch::autograd::grad({whole}, {inputs[0], inputs[1], inputs[2]}, {grad});

  std::vector<at::Tensor> outputs(kRanks);
  std::vector<std::vector<at::Tensor>> grads(kRanks);
  std::vector<std::string> steps(kRanks);
  const auto run_rank = [&](int rank) {
    Pipeline block({collective("AllGather", rank), product(8, 8), make_op("GELU"), product(8, 8),
                    collective("ReduceScatter", rank)});
    const at::Tensor rows = x.chunk(kRanks)[rank].clone().requires_grad_();
    const at::Tensor mine = up.chunk(kRanks)[rank].clone().requires_grad_();
    const at::Tensor columns = down.chunk(kRanks, 1)[rank].clone().requires_grad_();
    outputs[rank] = block(rows, {mine, columns})[0];
    grads[rank] =
        torch::autograd::grad({outputs[rank]}, {rows, mine, columns}, {grad.chunk(kRanks)[rank]});
    steps[rank] = steps_of(block.last_plan()->plan);
  };
  std::thread other([&] { run_rank(1); });
  run_rank(0);
  other.join();

  const auto join = [](const at::Tensor& a, const at::Tensor& b, int64_t dim) {
    return at::cat({a, b}, dim);
  };
  EXPECT_TRUE(at::allclose(join(outputs[0], outputs[1], 0), whole));
  EXPECT_TRUE(at::allclose(join(grads[0][0], grads[1][0], 0), want[0]));
  EXPECT_TRUE(at::allclose(join(grads[0][1], grads[1][1], 0), want[1]));
  EXPECT_TRUE(at::allclose(join(grads[0][2], grads[1][2], 1), want[2]));
  // The fuser has put the collectives beside their products.
  EXPECT_EQ(steps[0], "gather_linear GELU linear_scatter ");
  EXPECT_EQ(steps[1], steps[0]);
}

TEST(Collectives, AllReduceAndItsTranspose) {
  const Groups groups;
  const at::Tensor x = at::randn({kRanks, 4}, at::kDouble);
  std::vector<at::Tensor> outputs(kRanks), grads(kRanks);
  const auto run_rank = [&](int rank) {
    Pipeline block(
        {collective("ReduceGradient", rank), make_op("ReLU"), collective("AllReduce", rank)});
    const at::Tensor row = x.slice(0, rank, rank + 1).clone().requires_grad_();
    outputs[rank] = block(row, {})[0];
    grads[rank] = torch::autograd::grad({outputs[rank]}, {row}, {at::ones({1, 4}, at::kDouble)})[0];
  };
  std::thread other([&] { run_rank(1); });
  run_rank(0);
  other.join();
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(at::allclose(outputs[rank], x.relu().sum(0, true)));
  }
  // What each rank hands back is masked by its own row, then summed.
  const at::Tensor want = (x > 0).to(at::kDouble).sum(0, true);
  EXPECT_TRUE(at::allclose(grads[0], want));
  EXPECT_TRUE(at::allclose(grads[1], want));
}

TEST(Collectives, AGroupThatNobodyRegistered) {
  Pipeline block({collective("AllReduce", 0)});
  try {
    block(at::ones({2, 4}), {});
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what_without_backtrace())
                  .find("[AllReduce] process group 'threads0' must exist in this process"),
              std::string::npos)
        << error.what_without_backtrace();
  }
}

}  // namespace
}  // namespace transformer_ops
