// The functions of the operating system that the pool uses.
#pragma once

#include <cstddef>
#include <string>

namespace transformer_ops::memory {

// The size in which memory is mapped: a huge page.
inline constexpr size_t kHugePage = size_t{2} << 20;

// The size in which memory is moved. Moving less than a huge page results in small pages.
inline constexpr size_t kPiece = kHugePage / 4;

// Tests replace these functions.
struct System {
  // Returns zeroed memory that starts at a multiple of kHugePage; `bytes` is such a multiple, too.
  // Null if there is none.
  void* (*map)(size_t bytes);
  // Unmaps any part of mapped memory, in whole pages.
  void (*unmap)(void* data, size_t bytes);
  // Moves memory to another mapped address, and unmaps the old one. Both addresses and `bytes` are
  // multiples of kPiece. Returns the number of bytes from the start that were moved.
  size_t (*move)(void* from, void* to, size_t bytes);
  // The bytes that can be mapped before the machine, or the cgroup, runs short.
  size_t (*available)();
};

const System& operating_system();

// Returns what the C library's allocator has free, also between blocks in use. torch's tensors on
// the CPU are such blocks.
void trim_heap();

struct SystemMemory {
  size_t total;
  size_t available;
};

// The memory of the machine or, if that is less, of the cgroup (v1 or v2) of this process. `root`
// is the folder that contains proc/ and sys/.
SystemMemory system_memory(const std::string& root = "/");

}  // namespace transformer_ops::memory
