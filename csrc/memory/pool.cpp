#include "memory/pool.h"

#include <algorithm>
#include <limits>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#endif
#endif
// Poisons idle memory for the address sanitizer, so that it detects use after free although nothing
// is returned to the system.
#ifndef ASAN_POISON_MEMORY_REGION
#define ASAN_POISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(data, bytes) ((void)(data), (void)(bytes))
#endif

namespace transformer_ops::memory {
namespace {

constexpr size_t kPage = 4096;
// Smaller requests than a quarter of this share one mapping, so that they use huge pages too.
constexpr size_t kChunk = size_t{64} << 20;
// Memory that stays idle for this number of allocations, some tens of training steps, is returned.
constexpr uint64_t kWindow = 4096;
// If the system has less than this, idle memory is returned before fresh memory is taken.
constexpr size_t kReserve = size_t{256} << 20;
// Querying the system's memory takes as long as touching a quarter of a megabyte.
constexpr size_t kCheckEvery = size_t{16} << 20;
constexpr size_t kAll = std::numeric_limits<size_t>::max();

size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

// The whole units within a range.
struct Units {
  Units(char* data, size_t bytes, size_t unit) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    before = round_up(address, unit) - address;
    first = data + before;
    size = bytes < before ? 0 : (bytes - before) / unit * unit;
  }

  size_t before;
  char* first;
  size_t size;
};

}  // namespace

Pool::Pool(size_t limit, const System& system) : system_(system), limit_(limit) {}

Pool::~Pool() {
  release(kAll);
  drop_fresh();
}

void* Pool::allocate(size_t bytes) noexcept {
  if (bytes > kAll / 2) return nullptr;
  const size_t size = round_up(std::max<size_t>(bytes, 1), kPage);
  const std::lock_guard lock(mutex_);
  if (++allocations_ % kWindow == 0) end_window();
  try {
    const size_t held = stats_.in_use_bytes + stats_.idle_bytes;
    char* data = take_idle(size);
    if (data == nullptr) {
      // With huge pages, the rest of the page in which fresh memory begins is already in memory.
      const size_t rest = Units(fresh_, fresh_bytes_, kHugePage).before;
      if (stats_.idle_bytes + rest <= limit()) retire_fresh(rest);
      data = take_idle(size);
    }
    if (data == nullptr) {
      gather(size);
      data = take_idle(size);
    }
    if (data == nullptr) data = take_fresh(size);
    if (data == nullptr) return nullptr;
    ++(stats_.in_use_bytes + stats_.idle_bytes == held ? stats_.hits : stats_.misses);
    ASAN_UNPOISON_MEMORY_REGION(data, bytes);
    return data;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void Pool::free(void* data) noexcept {
  const std::lock_guard lock(mutex_);
  const auto range = ranges_.find(static_cast<char*>(data));
  ASAN_POISON_MEMORY_REGION(data, range->second.size);
  stats_.in_use_bytes -= range->second.size;
  range->second.last_use = allocations_;
  join(range);
  const size_t limit = this->limit();
  if (stats_.idle_bytes > limit) release(stats_.idle_bytes - limit);
}

size_t Pool::trim() noexcept {
  trim_heap();
  const std::lock_guard lock(mutex_);
  const size_t idle = stats_.idle_bytes;
  release(kAll);
  drop_fresh();
  return idle;
}

void Pool::set_limit(size_t limit) noexcept {
  const std::lock_guard lock(mutex_);
  limit_.store(limit, std::memory_order_relaxed);
  if (stats_.idle_bytes > limit) release(stats_.idle_bytes - limit);
}

Stats Pool::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

// The low end of the smallest idle range that is large enough, or null.
char* Pool::take_idle(size_t size) {
  const auto found = idle_.lower_bound({size, nullptr});
  if (found == idle_.end()) return nullptr;
  const auto range = ranges_.find(found->second);
  char* const rest = range->first + size;
  const size_t rest_size = range->second.size - size;
  if (rest_size > 0) {
    // Everything that may throw comes before any change.
    IdleSet node;
    node.emplace(rest_size, rest);
    ranges_.emplace(rest, Range{rest_size, false, range->second.last_use, {}});
    idle_.insert(node.extract(node.begin()));
    stats_.idle_bytes += rest_size;
  }
  unset_idle(range);
  use(range, size);
  return range->first;
}

// Makes an idle range of `size` from pieces of several ranges, or from their huge pages and fresh
// ones if the pieces do not suffice. Moving a huge page took 7 us; touching a fresh one takes 400
// or more.
void Pool::gather(size_t size) {
  if (size <= kPiece) return;
  const size_t bytes = round_up(size, kHugePage);
  const size_t exact = round_up(size, kPiece);
  const bool suffices = movable(exact, kPiece) == exact;
  if (!suffices) {
    const size_t idle = movable(bytes, kHugePage);
    // Requests that would waste much of a huge page share one with their neighbours.
    const bool fits = bytes - size <= size / 8;
    if (size < kHugePage || (idle == 0 && !fits)) return;
    make_room(bytes - idle);
  }
  char* const to = static_cast<char*>(system_.map(bytes));
  if (to == nullptr) return;
  auto range = ranges_.end();
  size_t have = bytes;
  try {
    IdleSet node;
    node.emplace(bytes, to);
    range = ranges_.emplace(to, Range{bytes, true, allocations_, {}}).first;
    range->second.node = node.extract(node.begin());
    size_t moved = move_idle(to, exact / kHugePage * kHugePage, kHugePage);
    moved += move_idle(to + moved, exact - moved, kPiece);
    if (moved == exact) have = exact;
  } catch (const std::bad_alloc&) {
    // If nothing was moved, the new mapping is not needed.
    if (range == ranges_.end()) return system_.unmap(to, bytes);
  }
  if (have < bytes) system_.unmap(to + have, bytes - have);
  ASAN_POISON_MEMORY_REGION(to, have);
  range->second.size = have;
  join(range);
}

// The number of `bytes` that whole units of idle memory can supply.
size_t Pool::movable(size_t bytes, size_t unit) const {
  size_t found = 0;
  for (auto row = idle_.rbegin(); row != idle_.rend() && found < bytes; ++row) {
    if (row->first < unit) break;
    found += Units(row->second, row->first, unit).size;
  }
  return std::min(found, bytes);
}

// Moves whole units, from the largest idle ranges first; returns the number of bytes moved.
size_t Pool::move_idle(char* to, size_t bytes, size_t unit) {
  size_t moved = 0;
  for (auto row = idle_.rbegin(); moved < bytes && row != idle_.rend() && row->first >= unit;) {
    const Units units(row->second, row->first, unit);
    const size_t size = std::min(units.size, bytes - moved);
    if (size == 0) {
      ++row;
      continue;
    }
    // This takes the high end, because requests take the low end.
    char* const from = units.first + units.size - size;
    cut(ranges_.find(row->second), from, size);
    ASAN_UNPOISON_MEMORY_REGION(from, size);
    const size_t done = system_.move(from, to + moved, size);
    moved += done;
    if (done < size) {
      system_.unmap(from + done, size - done);
      stats_.released_bytes += size - done;
      break;
    }
    row = idle_.rbegin();
  }
  return moved;
}

// The idle range that ends where fresh memory begins, or none.
Pool::Ranges::iterator Pool::idle_below_fresh() {
  auto range = fresh_ == nullptr ? ranges_.begin() : ranges_.lower_bound(fresh_);
  if (range == ranges_.begin()) return ranges_.end();
  --range;
  const bool ends_there = range->first + range->second.size == fresh_;
  return ends_there && !range->second.in_use ? range : ranges_.end();
}

// Takes fresh memory, after idle memory directly below it; returns null if there is none.
char* Pool::take_fresh(size_t size) {
  auto below = idle_below_fresh();
  size_t have = below == ranges_.end() ? 0 : below->second.size;
  if (fresh_bytes_ < size - have) {
    if (!map_fresh(size)) return nullptr;
    below = idle_below_fresh();
    have = below == ranges_.end() ? 0 : below->second.size;
  }
  const size_t more = size - have;
  if (below == ranges_.end()) {
    IdleSet node;
    node.emplace(size, fresh_);
    below = ranges_.emplace(fresh_, Range{size, false, 0, {}}).first;
    below->second.node = node.extract(node.begin());
  } else {
    unset_idle(below);
  }
  fresh_ += more;
  fresh_bytes_ -= more;
  use(below, size);
  return below->first;
}

bool Pool::map_fresh(size_t size) {
  make_room(size);
  drop_fresh();
  const size_t least = round_up(size, kHugePage);
  size_t bytes = size < kChunk / 4 ? kChunk : least;
  void* data = system_.map(bytes);
  if (data == nullptr && bytes != least) data = system_.map(bytes = least);
  if (data == nullptr) {
    release(kAll);
    data = system_.map(bytes);
  }
  if (data == nullptr) return false;
  ASAN_POISON_MEMORY_REGION(data, bytes);
  fresh_ = static_cast<char*>(data);
  fresh_bytes_ = bytes;
  return true;
}

void Pool::retire_fresh(size_t bytes) {
  if (bytes == 0) return;
  IdleSet node;
  node.emplace(bytes, fresh_);
  const auto range = ranges_.emplace(fresh_, Range{bytes, false, allocations_, {}}).first;
  range->second.node = node.extract(node.begin());
  fresh_bytes_ -= bytes;
  fresh_ = fresh_bytes_ == 0 ? nullptr : fresh_ + bytes;
  join(range);
}

void Pool::drop_fresh() {
  if (fresh_bytes_ == 0) return;
  char* const data = std::exchange(fresh_, nullptr);
  const size_t bytes = std::exchange(fresh_bytes_, 0);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  system_.unmap(data, bytes);
}

void Pool::use(Ranges::iterator range, size_t bytes) {
  range->second.size = bytes;
  range->second.in_use = true;
  stats_.in_use_bytes += bytes;
  stats_.peak_in_use_bytes = std::max(stats_.peak_in_use_bytes, stats_.in_use_bytes);
  stats_.peak_held_bytes =
      std::max(stats_.peak_held_bytes, stats_.in_use_bytes + stats_.idle_bytes);
  peak_ = std::max(peak_, stats_.in_use_bytes);
  least_idle_ = std::min(least_idle_, stats_.idle_bytes);
}

void Pool::set_idle(Ranges::iterator range) {
  Range& row = range->second;
  row.in_use = false;
  row.node.value() = {row.size, range->first};
  idle_.insert(std::move(row.node));
  stats_.idle_bytes += row.size;
}

void Pool::unset_idle(Ranges::iterator range) {
  range->second.node = idle_.extract({range->second.size, range->first});
  stats_.idle_bytes -= range->second.size;
}

// Joins a range with its idle neighbours.
void Pool::join(Ranges::iterator range) {
  const auto absorb_next = [this](Ranges::iterator first) {
    const auto next = std::next(first);
    if (next == ranges_.end() || next->second.in_use) return;
    if (first->first + first->second.size != next->first) return;
    unset_idle(next);
    first->second.size += next->second.size;
    first->second.last_use = std::max(first->second.last_use, next->second.last_use);
    ranges_.erase(next);
  };
  absorb_next(range);
  set_idle(range);
  if (range == ranges_.begin()) return;
  const auto previous = std::prev(range);
  if (previous->second.in_use || previous->first + previous->second.size != range->first) return;
  unset_idle(previous);
  absorb_next(previous);
  set_idle(previous);
}

// Takes memory out of an idle range.
void Pool::cut(Ranges::iterator range, char* data, size_t bytes) {
  char* const rest = data + bytes;
  const size_t rest_size = range->first + range->second.size - rest;
  Ranges::iterator after = ranges_.end();
  if (rest_size > 0) {
    // Everything that may throw comes before any change.
    IdleSet node;
    node.emplace(rest_size, rest);
    after = ranges_.emplace(rest, Range{rest_size, false, range->second.last_use, {}}).first;
    after->second.node = node.extract(node.begin());
  }
  unset_idle(range);
  if (data == range->first) {
    ranges_.erase(range);
  } else {
    range->second.size = data - range->first;
    set_idle(range);
  }
  if (after != ranges_.end()) set_idle(after);
}

// Returns idle memory that did not fit a request, to make room for fresh memory: what exceeds 1.25
// times the recent peak of use, and more if the system is short of memory.
void Pool::make_room(size_t size) {
  const size_t held = stats_.in_use_bytes + stats_.idle_bytes;
  const size_t peak = std::max({peak_, previous_peak_, stats_.in_use_bytes + size});
  const size_t most = peak + peak / 4;
  if (held + size > most) release(held + size - most);
  mapped_since_check_ += size;
  if (mapped_since_check_ < kCheckEvery) return;
  mapped_since_check_ = 0;
  const size_t available = system_.available();
  if (available < size + kReserve) release(size + kReserve - available);
}

// Returns idle memory to the system, the least recently used first.
void Pool::release(size_t bytes) {
  const auto last_use = [this](const auto& idle) {
    return ranges_.find(idle.second)->second.last_use;
  };
  while (bytes > 0 && !idle_.empty()) {
    const auto oldest = bytes >= stats_.idle_bytes
                            ? idle_.begin()
                            : std::ranges::min_element(idle_, std::less{}, last_use);
    const auto range = ranges_.find(oldest->second);
    const size_t size = range->second.size;
    // This takes the high end, because requests take the low end.
    const size_t part = bytes >= size ? size : std::min(size, round_up(bytes, kHugePage));
    char* const data = range->first + size - part;
    cut(range, data, part);
    ASAN_UNPOISON_MEMORY_REGION(data, part);
    system_.unmap(data, part);
    stats_.released_bytes += part;
    bytes -= std::min(bytes, part);
  }
}

void Pool::end_window() {
  release(least_idle_);
  least_idle_ = stats_.idle_bytes;
  previous_peak_ = std::exchange(peak_, stats_.in_use_bytes);
}

}  // namespace transformer_ops::memory
