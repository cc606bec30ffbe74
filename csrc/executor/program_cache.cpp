// The programs that were asked for last, by text or by what they were made from.
#include <array>
#include <list>
#include <string_view>
#include <unordered_map>

#include "executor/program.h"
#include "executor/unfused.h"
#include "fuser/error.h"
#include "fuser/fork_safe_mutex.h"

namespace transformer_ops {
namespace {

// More than the groups of a large model in training and in evaluation.
constexpr size_t kCapacity = 1024;

class ProgramCache {
 public:
  template <typename Make>
  SharedProgram find_or_make(const std::string& key, const Make& make) {
    if (SharedProgram found = find(key)) return found;
    // Without the lock, which nobody may hold for long.
    return add(key, share(make()));
  }

 private:
  struct Entry {
    std::string key;
    SharedProgram program;
  };

  SharedProgram find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto row = rows_.find(key);
    if (row == rows_.end()) return {};
    entries_.splice(entries_.begin(), entries_, row->second);
    return entries_.front().program;
  }

  SharedProgram add(const std::string& key, SharedProgram made) {
    Entry evicted;  // dies without the lock
    const std::lock_guard lock(mutex_);
    const auto row = rows_.find(key);
    if (row != rows_.end()) return row->second->program;
    entries_.push_front({key, std::move(made)});
    rows_[key] = entries_.begin();
    if (entries_.size() > kCapacity) {
      rows_.erase(entries_.back().key);
      evicted = std::move(entries_.back());
      entries_.pop_back();
    }
    return entries_.front().program;
  }

  ForkSafeMutex mutex_;
  std::list<Entry> entries_;  // the one asked for last comes first
  std::unordered_map<std::string, std::list<Entry>::iterator> rows_;
};

// The programs of the texts that one thread asked for last, found without lock and without hash: a
// graph passes the same string at each call. It owns none of them.
class Recent {
 public:
  SharedProgram find(std::string_view text) const {
    const Entry& entry = entries_[slot(text)];
    return entry.text == text ? entry.program.lock() : SharedProgram();
  }

  void add(std::string_view text, const SharedProgram& program) {
    entries_[slot(text)] = {std::string(text), program};
  }

 private:
  struct Entry {
    std::string text;
    WeakProgram program;
  };

  static size_t slot(std::string_view text) {
    const auto address = reinterpret_cast<uintptr_t>(text.data());
    return (address / 64 + text.size()) % kSlots;
  }

  static constexpr size_t kSlots = 64;
  std::array<Entry, kSlots> entries_;
};

ProgramCache& cache() {
  // Never deleted: a thread may run while static objects die.
  static auto* const cache = new ProgramCache;
  return *cache;
}

}  // namespace

SharedProgram program_for(std::string_view given) {
  static thread_local Recent recent;
  if (SharedProgram found = recent.find(given)) return found;
  const std::string text(given);
  SharedProgram made = cache().find_or_make(text, [&] {
    try {
      const Plan plan = parse_plan(text);
      TORCH_CHECK(!plan.has_python_steps(),
                  "[plan] steps must be native to run without Python, got a Python step");
      return compile(plan);
    } catch (const PlanError& error) {
      TORCH_CHECK(false, error.what());
    }
  });
  recent.add(given, made);
  return made;
}

SharedProgram unfused_program_for(const Program& program, at::TensorList tensors) {
  std::vector<TensorFacts> facts;
  std::string key = "unfused " + std::to_string(program.id);
  for (const Tensor& tensor : tensors) {
    facts.push_back({to_dtype(tensor.scalar_type()), tensor.requires_grad()});
    key += std::string(" ") + to_text(facts.back().dtype) + (tensor.requires_grad() ? "+" : "");
  }
  return cache().find_or_make(key, [&] { return compile(unfused_plan(program.plan, facts)); });
}

}  // namespace transformer_ops
