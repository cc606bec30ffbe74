// Recycles memory instead of returning it to the system. It knows bytes, not tensors.
//
//   mapped:  | in use | idle |    in use    | idle | fresh: never touched, costs nothing |
//
// A freed range joins its idle neighbours. A request takes the smallest idle range that is large
// enough. If there is none, the huge pages of several ranges are moved together. The memory held
// therefore follows the peak of use, whatever the sizes.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "memory/system.h"

namespace transformer_ops::memory {

// Sizes are whole pages.
struct Stats {
  size_t in_use_bytes = 0;
  size_t idle_bytes = 0;
  size_t peak_in_use_bytes = 0;
  size_t peak_held_bytes = 0;  // in use and idle
  size_t hits = 0;             // requests served with idle memory
  size_t misses = 0;           // requests that needed fresh memory
  size_t released_bytes = 0;   // returned to the system
};

// The pool is thread-safe.
class Pool {
 public:
  // `limit`: the most bytes that may be idle.
  explicit Pool(size_t limit, const System& system = operating_system());
  // Nothing may be in use any more.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Returns page-aligned memory with undefined contents; null if the system has no memory even
  // after a trim.
  void* allocate(size_t bytes) noexcept;
  void free(void* data) noexcept;

  // Returns all idle memory to the system, and what the C library's heap has; the result is the
  // size of the former in bytes.
  size_t trim() noexcept;
  void set_limit(size_t limit) noexcept;
  size_t limit() const noexcept { return limit_.load(std::memory_order_relaxed); }
  Stats stats() const;

  // Call these around a fork, so that the child does not inherit a locked mutex.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  using IdleSet = std::set<std::pair<size_t, char*>>;  // by size, then address
  struct Range {
    size_t size;
    bool in_use;
    uint64_t last_use;        // counted in allocations
    IdleSet::node_type node;  // reserved while in use, so that free() allocates nothing
  };
  using Ranges = std::map<char*, Range>;

  char* take_idle(size_t size);
  void gather(size_t size);
  size_t movable(size_t bytes, size_t unit) const;
  size_t move_idle(char* to, size_t bytes, size_t unit);
  char* take_fresh(size_t size);
  Ranges::iterator idle_below_fresh();
  bool map_fresh(size_t size);
  void retire_fresh(size_t bytes);
  void drop_fresh();
  void use(Ranges::iterator range, size_t bytes);
  void set_idle(Ranges::iterator range);
  void unset_idle(Ranges::iterator range);
  void join(Ranges::iterator range);
  void cut(Ranges::iterator range, char* data, size_t bytes);
  void make_room(size_t size);
  void release(size_t bytes);
  void end_window();

  const System system_;
  std::atomic<size_t> limit_;
  mutable std::mutex mutex_;
  Ranges ranges_;
  IdleSet idle_;
  char* fresh_ = nullptr;
  size_t fresh_bytes_ = 0;
  Stats stats_;
  uint64_t allocations_ = 0;
  // These cover the last window of allocations, and the one before.
  size_t least_idle_ = 0;
  size_t peak_ = 0;
  size_t previous_peak_ = 0;
  size_t mapped_since_check_ = 0;
};

}  // namespace transformer_ops::memory
