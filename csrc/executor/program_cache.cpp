// A cache of recently used programs, by text or by what they were made from.
#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string_view>
#include <unordered_map>

#include "executor/plan_line.h"
#include "executor/program.h"
#include "executor/unfused.h"
#include "fuser/error.h"
#include "fuser/fork_safe_mutex.h"
#include "op/dtype.h"

namespace transformer_ops {
namespace {

// more than the groups of a large model in training and in evaluation
constexpr size_t kCapacity = 1024;

// A program and the time of its last use, which is the number of a cache lookup.
struct Cached {
  SharedProgram program;
  std::shared_ptr<std::atomic<uint64_t>> asked_for = {};
};

class ProgramCache {
 public:
  template <typename Make>
  Cached find_or_make(const std::string& key, const Make& make) {
    if (Cached found = find(key); found.program) return found;
    // This runs without the lock, because it may take long.
    return add(key, share(make()));
  }

  // Records the use of a program that was found without the cache.
  void note_use(std::atomic<uint64_t>& asked_for) const {
    asked_for.store(clock_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  }

 private:
  using Rows = std::unordered_map<std::string, Cached>;

  Cached find(const std::string& key) {
    const std::lock_guard lock(mutex_);
    const auto row = rows_.find(key);
    if (row == rows_.end()) return {};
    *row->second.asked_for = ++clock_;
    return row->second;
  }

  Cached add(const std::string& key, SharedProgram made) {
    Rows::node_type evicted;  // freed after the lock is released
    const std::lock_guard lock(mutex_);
    auto used = std::make_shared<std::atomic<uint64_t>>(++clock_);
    const auto [row, is_new] = rows_.try_emplace(key, Cached{std::move(made), std::move(used)});
    const Cached found = row->second;
    if (rows_.size() > kCapacity) evicted = rows_.extract(oldest());
    return found;
  }

  Rows::const_iterator oldest() const {
    return std::ranges::min_element(
        rows_, {}, [](const Rows::value_type& row) { return row.second.asked_for->load(); });
  }

  ForkSafeMutex mutex_;
  std::atomic<uint64_t> clock_ = 0;
  Rows rows_;
};

// The last programs that a thread used by text. They are found without lock and hash, because a
// graph passes the same string at each call. The programs are not owned.
class Recent {
 public:
  SharedProgram find(std::string_view text, const ProgramCache& cache) const {
    const Entry& entry = entries_[slot(text)];
    if (entry.text != text) return {};
    SharedProgram found = entry.program.lock();
    if (found) cache.note_use(*entry.asked_for);
    return found;
  }

  void add(std::string_view text, const Cached& cached) {
    entries_[slot(text)] = {std::string(text), cached.program, cached.asked_for};
  }

 private:
  struct Entry {
    std::string text;
    WeakProgram program;
    std::shared_ptr<std::atomic<uint64_t>> asked_for;
  };

  // A hash of the whole text would take as long as the search that it spares.
  static size_t slot(std::string_view text) {
    size_t sum = text.size();
    for (size_t i = 0; i < text.size(); i += 1 + text.size() / kSampled) sum = 31 * sum + text[i];
    return sum % kSlots;
  }

  static constexpr size_t kSampled = 16;  // the number of characters

  static constexpr size_t kSlots = 64;
  std::array<Entry, kSlots> entries_;
};

// It is never deleted, because a thread may run while static objects are destroyed.
ProgramCache& cache = *new ProgramCache;

}  // namespace

SharedProgram program_for(std::string_view given) {
  static thread_local Recent recent;
  if (SharedProgram found = recent.find(given, cache)) return found;
  const std::string text(given);
  const Cached made = cache.find_or_make(text, [&] {
    try {
      const Plan plan = parse_plan(from_line(text));
      TORCH_CHECK(!plan.has_python_steps(),
                  "[plan] steps must be native to run without Python, got a Python step");
      return compile(plan);
    } catch (const PlanError& error) {
      TORCH_CHECK(false, error.what());
    }
  });
  recent.add(given, made);
  return made.program;
}

SharedProgram unfused_program_for(const Program& program, at::TensorList tensors) {
  std::vector<TensorMeta> metas;
  std::string key = "unfused " + std::to_string(program.id);
  for (const Tensor& tensor : tensors) {
    metas.push_back({to_dtype(tensor.scalar_type()), tensor.requires_grad()});
    key += std::string(" ") + to_text(metas.back().dtype) + (tensor.requires_grad() ? "+" : "");
  }
  const auto make = [&] {
    Program made = compile(unfused_plan(program.plan, metas));
    made.names = program.names;
    return made;
  };
  return cache.find_or_make(key, make).program;
}

}  // namespace transformer_ops
