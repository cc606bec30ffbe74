// How much memory there is, read from folders that stand for /proc and /sys.
#include "memory/system.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace transformer_ops::memory {
namespace {

constexpr size_t kGiga = size_t{1} << 30;

class SystemMemoryTest : public testing::Test {
 protected:
  SystemMemoryTest() : root_(testing::TempDir() + "pool_XXXXXX") {
    EXPECT_NE(mkdtemp(root_.data()), nullptr);
    root_ += "/";
    write("proc/meminfo", "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n");
  }
  ~SystemMemoryTest() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  void expect(size_t total, size_t available) {
    const SystemMemory memory = system_memory(root_);
    EXPECT_EQ(memory.total, total);
    EXPECT_EQ(memory.available, available);
  }

  std::string root_;
};

TEST_F(SystemMemoryTest, Machine) { expect(8 * kGiga, 4 * kGiga); }

TEST_F(SystemMemoryTest, UnlimitedCgroup) {
  write("proc/self/cgroup", "0::/user/job\n");
  write("sys/fs/cgroup/user/job/memory.max", "max\n");
  expect(8 * kGiga, 4 * kGiga);
}

TEST_F(SystemMemoryTest, CgroupVersion2) {
  write("proc/self/cgroup", "0::/user/job\n");
  write("sys/fs/cgroup/user/job/memory.max", "2147483648\n");
  write("sys/fs/cgroup/user/job/memory.current", "1610612736\n");
  write("sys/fs/cgroup/user/job/memory.stat", "anon 5\ninactive_file 536870912\n");
  expect(2 * kGiga, kGiga);
}

TEST_F(SystemMemoryTest, TheTightestAncestorCounts) {
  write("proc/self/cgroup", "0::/user/job\n");
  write("sys/fs/cgroup/user/job/memory.max", "max\n");
  write("sys/fs/cgroup/user/memory.max", "1073741824\n");
  write("sys/fs/cgroup/user/memory.current", "2147483648\n");
  expect(kGiga, 0);
}

TEST_F(SystemMemoryTest, CgroupVersion1) {
  write("proc/self/cgroup", "12:cpu,cpuacct:/a\n4:memory:/b\n");
  write("sys/fs/cgroup/memory/b/memory.limit_in_bytes", "3221225472\n");
  write("sys/fs/cgroup/memory/b/memory.usage_in_bytes", "1073741824\n");
  expect(3 * kGiga, 2 * kGiga);
}

TEST_F(SystemMemoryTest, Container) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", "1073741824\n");
  write("sys/fs/cgroup/memory.current", "0\n");
  expect(kGiga, kGiga);
}

TEST_F(SystemMemoryTest, ThisMachine) {
  const SystemMemory memory = system_memory();
  EXPECT_GT(memory.total, 0u);
  EXPECT_LE(memory.available, memory.total);
}

}  // namespace
}  // namespace transformer_ops::memory
