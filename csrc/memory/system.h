// What the pool asks of the operating system.
#pragma once

#include <cstddef>
#include <string>

namespace transformer_ops::memory {

// The step in which memory is mapped: a huge page.
inline constexpr size_t kHugePage = size_t{2} << 20;

// The step in which it is moved: where it is less than a huge page, small pages result.
inline constexpr size_t kPiece = kHugePage / 4;

// Tests put their own functions here.
struct System {
  // Zeroed memory that starts at a multiple of kHugePage, as `bytes` is; null where there is none.
  void* (*map)(size_t bytes);
  // Any part of mapped memory, in whole pages.
  void (*unmap)(void* data, size_t bytes);
  // Puts memory at another place that is mapped, and unmaps its old one. Both start at multiples of
  // kPiece, as `bytes` is. Returns how many bytes from the start were moved.
  size_t (*move)(void* from, void* to, size_t bytes);
  // Bytes that can be mapped before the machine, or the cgroup, runs short.
  size_t (*available)();
};

const System& operating_system();

struct SystemMemory {
  size_t total;
  size_t available;
};

// Of the machine or, where that is less, of the cgroup (v1 or v2) of this process. `root` is the
// folder that holds proc/ and sys/.
SystemMemory system_memory(const std::string& root = "/");

}  // namespace transformer_ops::memory
