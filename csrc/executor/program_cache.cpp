// The programs that were asked for last, by text or by what they were made from.
#include <list>
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
    return add(key, SharedProgram(make()));
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

ProgramCache& cache() {
  // Never deleted: a thread may run while static objects die.
  static auto* const cache = new ProgramCache;
  return *cache;
}

}  // namespace

SharedProgram program_for(const std::string& text) {
  return cache().find_or_make(text, [&] {
    try {
      return compile(parse_plan(text));
    } catch (const PlanError& error) {
      TORCH_CHECK(false, error.what());
    }
  });
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
