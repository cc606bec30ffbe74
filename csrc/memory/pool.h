// Memory that is used again instead of going back to the system. Knows bytes, not tensors.
//
//   mapped:  | in use | idle |    in use    | idle | fresh: never touched, costs nothing |
//
// A free range joins its neighbours; a request takes the smallest idle range that holds it. Where
// none does, the huge pages of several are moved to one place. So the memory held follows the most
// that was ever in use at one time, whatever the sizes.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "memory/system.h"

namespace transformer_ops::memory {

// Bytes are whole pages.
struct Stats {
  size_t in_use_bytes = 0;
  size_t idle_bytes = 0;
  size_t peak_in_use_bytes = 0;
  size_t peak_held_bytes = 0;  // in use and idle
  size_t hits = 0;             // requests served with idle memory
  size_t misses = 0;           // requests that needed fresh memory
  size_t released_bytes = 0;   // given back to the system
};

// Thread-safe.
class Pool {
 public:
  // `limit`: the most bytes that stay idle.
  explicit Pool(size_t limit, const System& system = operating_system());
  // Nothing may be in use.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Page-aligned, contents undefined; null where the system has no memory even after a trim.
  void* allocate(size_t bytes) noexcept;
  void free(void* data) noexcept;

  // Gives all idle memory back and returns its bytes.
  size_t trim() noexcept;
  void set_limit(size_t limit) noexcept;
  size_t limit() const noexcept { return limit_.load(std::memory_order_relaxed); }
  Stats stats() const;

  // Around a fork, so that the child finds no lock that nobody will open.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  using IdleSet = std::set<std::pair<size_t, char*>>;  // by size, then address
  struct Range {
    size_t size;
    bool in_use;
    uint64_t last_use;        // in allocations
    IdleSet::node_type node;  // kept while in use: to free takes no memory
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
  // Over the last window of allocations, and the one before.
  size_t least_idle_ = 0;
  size_t peak_ = 0;
  size_t previous_peak_ = 0;
  size_t mapped_since_check_ = 0;
};

}  // namespace transformer_ops::memory
