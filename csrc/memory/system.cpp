#include "memory/system.h"

#include <sys/mman.h>
#if __has_include(<malloc.h>)
#include <malloc.h>
#endif

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace transformer_ops::memory {
namespace {

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

void* map_anonymous(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

// Linux aligns such mappings itself since 6.7; for older versions, a longer mapping is cut.
void* map_aligned(size_t bytes) {
  void* const data = map_anonymous(bytes);
  if (data == nullptr || reinterpret_cast<uintptr_t>(data) % kHugePage == 0) return data;
  munmap(data, bytes);
  auto* const longer = static_cast<char*>(map_anonymous(bytes + kHugePage));
  if (longer == nullptr) return nullptr;
  const size_t before = kHugePage - reinterpret_cast<uintptr_t>(longer) % kHugePage;
  munmap(longer, before);
  if (before < kHugePage) munmap(longer + before + bytes, kHugePage - before);
  return longer + before;
}

void* map(size_t bytes) {
  void* const data = map_aligned(bytes);
#ifdef MADV_HUGEPAGE
  // Writing 64 MiB for the first time takes 34 ms with small pages and 8 ms with huge ones.
  if (data != nullptr) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  return data;
}

void unmap(void* data, size_t bytes) {
  // A process has a limited number of mappings, and a hole makes two of one. If munmap() fails,
  // only the pages are released and the addresses stay mapped.
  if (munmap(data, bytes) != 0) madvise(data, bytes, MADV_DONTNEED);
}

size_t move(void* from, void* to, size_t bytes) {
  size_t moved = 0;
#ifdef MREMAP_FIXED
  const auto move_next = [&](size_t size) {
    void* const target = static_cast<char*>(to) + moved;
    const int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
    if (mremap(static_cast<char*>(from) + moved, size, size, flags, target) == MAP_FAILED) {
      return false;
    }
    moved += size;
    return true;
  };
  // One call moves memory of one mapping only, and a huge page may have several.
  while (moved < bytes && (move_next(std::min(bytes - moved, kHugePage)) || move_next(kPiece))) {
  }
#else
  (void)from, (void)to, (void)bytes;
#endif
  return moved;
}

size_t available() { return system_memory().available; }

// The number after `key` in lines of "key number ...".
std::optional<size_t> field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line, name;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    size_t value = 0;
    if (words >> name && name == key && words >> value) return value;
  }
  return std::nullopt;
}

// Reads a file with one number, or "max".
std::optional<size_t> number(const std::string& path) {
  std::ifstream file(path);
  size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

struct Names {
  const char *most, *used, *cache;
};
constexpr Names kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file"};
constexpr Names kVersion2 = {"memory.max", "memory.current", "inactive_file"};

// Applies the limits of a cgroup and of all its parents. A container sees its own as the topmost.
void narrow(const std::string& mount, std::string group, const Names& names, SystemMemory& memory) {
  for (;;) {
    const std::string folder = mount + group + "/";
    const size_t most = number(folder + names.most).value_or(kUnlimited);
    if (most < memory.total) memory.total = most;
    if (most != kUnlimited) {
      const size_t used = number(folder + names.used).value_or(0);
      // The kernel drops these pages before it refuses memory.
      const size_t cache = std::min(used, field(folder + "memory.stat", names.cache).value_or(0));
      memory.available = std::min(memory.available, most - std::min(most, used - cache));
    }
    if (group.empty()) return;
    group.erase(group.rfind('/'));
  }
}

}  // namespace

void trim_heap() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

const System& operating_system() {
  static constexpr System system = {map, unmap, move, available};
  return system;
}

// See https://docs.kernel.org/admin-guide/cgroup-v2.html, "memory.max"; cgroup-v1/memory.html
SystemMemory system_memory(const std::string& root) {
  const std::string meminfo = root + "proc/meminfo";
  SystemMemory memory = {kUnlimited, kUnlimited};
  if (const auto kilobytes = field(meminfo, "MemTotal:")) memory.total = *kilobytes * 1024;
  if (const auto kilobytes = field(meminfo, "MemAvailable:")) memory.available = *kilobytes * 1024;
  std::ifstream groups(root + "proc/self/cgroup");  // id:controllers:/path
  std::string line;
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers == ",,") narrow(root + "sys/fs/cgroup", path, kVersion2, memory);
    if (controllers.find(",memory,") != std::string::npos) {
      narrow(root + "sys/fs/cgroup/memory", path, kVersion1, memory);
    }
  }
  return memory;
}

}  // namespace transformer_ops::memory
