#include "executor/backward_pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "fuser/fork_safe_mutex.h"

namespace transformer_ops {
namespace {

// A graph task of the autograd engine, and the backward pass that it belongs to. The task owns
// `lives`, and destroys it after both success and failure.
struct Task {
  int id;
  uint64_t pass;
  std::weak_ptr<void> lives;
};

// Several threads may run nodes of one task.
class Tasks {
 public:
  Task find_or_add(int id, uint64_t pass_of_outer) {
    if (const auto found = find(id)) return *found;
    // The engine takes a lock of its own, so this comes before ours.
    const auto lives = std::make_shared<char>();
    torch::autograd::Engine::get_default_engine().queue_callback([lives] {});
    const std::lock_guard lock(mutex_);
    const auto [row, is_new] = rows_.try_emplace(id);
    if (is_new) row->second = {id, pass_of_outer > 0 ? pass_of_outer : ++passes_, lives};
    return row->second;
  }

 private:
  std::optional<Task> find(int id) {
    const std::lock_guard lock(mutex_);
    std::erase_if(rows_, [](const auto& row) { return row.second.lives.expired(); });
    const auto row = rows_.find(id);
    return row == rows_.end() ? std::nullopt : std::optional(row->second);
  }

  ForkSafeMutex mutex_;
  std::map<int, Task> rows_;
  uint64_t passes_ = 0;
};

// It is never deleted, because a thread may run while static objects are destroyed.
Tasks& tasks = *new Tasks;

// The nested tasks that run on one thread.
class Seen {
 public:
  uint64_t pass_of(int id) {
    std::erase_if(running_, [](const Task& task) { return task.lives.expired(); });
    const auto known = std::ranges::find(running_, id, &Task::id);
    if (known != running_.end()) return known->pass;
    const Task task = tasks.find_or_add(id, pass_around(id));
    running_.push_back(task);
    last_ = task;
    return task.pass;
  }

 private:
  // Ids increase. A later task that this thread saw first ran inside this one.
  uint64_t pass_around(int id) const {
    if (!running_.empty()) return running_.back().pass;
    return last_.id > id ? last_.pass : 0;
  }

  std::vector<Task> running_;
  Task last_{-1, 0, {}};
};

Seen& seen() {
  static thread_local Seen seen;
  return seen;
}

}  // namespace

uint64_t current_backward_pass() {
  const int id = torch::autograd::get_current_graph_task_id();
  return id < 0 ? 0 : seen().pass_of(id);
}

}  // namespace transformer_ops
