// The allocations of a training step for Python: transformer_ops/reports/step_bytes.py.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "python/group.h"

namespace transformer_ops::python {
namespace {

using torch::profiler::impl::ActiveProfilerType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;
using torch::profiler::impl::ProfilerStateBase;

struct Event {
  size_t address;
  int64_t bytes;  // negative if they are freed
  c10::Device device;
};

// The allocators of torch and the pool report to it, as they report to a profiler of memory, on
// this thread and on the threads of backward. No operator is profiled.
class Listener final : public ProfilerStateBase {
 public:
  Listener()
      : ProfilerStateBase(ProfilerConfig(ProfilerState::Disabled, false, /*profile_memory=*/true)) {
  }

  ActiveProfilerType profilerType() override { return ActiveProfilerType::NONE; }

  void reportMemoryUsage(void* data, int64_t bytes, size_t, size_t, c10::Device device) override {
    const std::lock_guard lock(mutex_);
    events_.push_back({reinterpret_cast<size_t>(data), bytes, device});
  }

  size_t count() {
    const std::lock_guard lock(mutex_);
    return events_.size();
  }

  std::vector<Event> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(events_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Event> events_;
};

// Begins and ends on one thread.
class AllocationLog {
 public:
  void begin() {
    TORCH_CHECK(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) == nullptr,
                "[memory] step_bytes must run without a profiler, got one that is active");
    listener_ = std::make_shared<Listener>();
    guard_.emplace(c10::DebugInfoKind::PROFILER_STATE, listener_);
  }

  size_t count() { return listener_->count(); }

  std::vector<std::tuple<size_t, int64_t, std::string>> end() {
    guard_.reset();
    std::vector<std::tuple<size_t, int64_t, std::string>> found;
    for (const Event& event : listener_->take()) {
      found.emplace_back(event.address, event.bytes, event.device.str());
    }
    return found;
  }

 private:
  std::shared_ptr<Listener> listener_;
  std::optional<c10::DebugInfoGuard> guard_;
};

}  // namespace

void bind_allocations(py::module_& module) {
  py::class_<AllocationLog>(module, "AllocationLog")
      .def(py::init<>())
      .def("begin", torch::wrap_pybind_function(&AllocationLog::begin))
      .def("count", &AllocationLog::count)
      .def("end", &AllocationLog::end);
}

}  // namespace transformer_ops::python
