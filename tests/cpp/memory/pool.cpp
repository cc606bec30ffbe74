// The pool on the real system and on one whose memory the tests count, limit and refuse.
#include "memory/pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace transformer_ops::memory {
namespace {

constexpr size_t kMega = size_t{1} << 20;
constexpr size_t kNoLimit = size_t{1} << 40;

// ---- a system that counts

struct Counts {
  std::atomic<size_t> mapped{0};
  std::atomic<int> maps{0};
  std::atomic<size_t> most{kNoLimit};  // bytes mapped at one time
  std::atomic<size_t> available{kNoLimit};
  std::atomic<size_t> movable{kNoLimit};
};
Counts counts;

System counting() {
  return {.map = [](size_t bytes) -> void* {
            EXPECT_EQ(bytes % kHugePage, 0u);
            if (counts.mapped + bytes > counts.most) return nullptr;
            void* const data = operating_system().map(bytes);
            EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kHugePage, 0u);
            counts.mapped += bytes;
            ++counts.maps;
            return data;
          },
          .unmap =
              [](void* data, size_t bytes) {
                counts.mapped -= bytes;
                operating_system().unmap(data, bytes);
              },
          .move =
              [](void* from, void* to, size_t bytes) {
                const size_t moved =
                    operating_system().move(from, to, std::min<size_t>(bytes, counts.movable));
                counts.mapped -= moved;
                counts.movable -= moved;
                return moved;
              },
          .available = [] { return counts.available.load(); }};
}

class PoolTest : public testing::Test {
 protected:
  void SetUp() override {
    counts.mapped = 0;
    counts.maps = 0;
    counts.most = kNoLimit;
    counts.available = kNoLimit;
    counts.movable = kNoLimit;
  }
  void TearDown() override {
    EXPECT_EQ(pool.stats().in_use_bytes, 0u);
    pool.trim();
    EXPECT_EQ(pool.stats().idle_bytes, 0u);
    EXPECT_EQ(counts.mapped, 0u) << "leaked";
  }

  void* take(size_t bytes) {
    void* const data = pool.allocate(bytes);
    EXPECT_NE(data, nullptr);
    return data;
  }

  Pool pool{kNoLimit, counting()};
};

// ---- recycling

TEST_F(PoolTest, FreedMemoryServesTheNextRequest) {
  void* const first = take(3 * kMega);
  std::memset(first, 1, 3 * kMega);
  pool.free(first);
  EXPECT_EQ(pool.stats().idle_bytes, 3 * kMega);
  void* const second = take(3 * kMega);
  EXPECT_EQ(first, second);
  EXPECT_EQ(pool.stats().hits, 1u);
  EXPECT_EQ(pool.stats().misses, 1u);
  pool.free(second);
}

// Three requests of 20 MiB, of which the outer ones are idle again: 9 whole huge pages each, or 10.
class GatherTest : public PoolTest {
 protected:
  void SetUp() override {
    PoolTest::SetUp();
    void* const first = take(20 * kMega);
    middle = take(20 * kMega);
    void* const last = take(20 * kMega);
    std::memset(middle, 7, 20 * kMega);
    pool.free(first);
    pool.free(last);
    held = pool.stats().idle_bytes + pool.stats().in_use_bytes;
  }
  void TearDown() override {
    for (size_t i = 0; i < 20 * kMega; ++i) ASSERT_EQ(static_cast<char*>(middle)[i], 7);
    pool.free(middle);
    PoolTest::TearDown();
  }

  size_t held_now() const { return pool.stats().idle_bytes + pool.stats().in_use_bytes; }

  void* middle;
  size_t held;
};

TEST_F(GatherTest, IdleRangesServeALargerRequestTogether) {
  void* const data = take(30 * kMega + 5000);
  std::memset(data, 1, 30 * kMega + 5000);
  EXPECT_EQ(held_now(), held);
  EXPECT_EQ(pool.stats().hits, 1u);
  EXPECT_EQ(pool.stats().released_bytes, 0u);
  pool.free(data);
  EXPECT_EQ(held_now(), held);
}

TEST_F(GatherTest, FreshPagesFillUpWhatIdleOnesCannotGive) {
  void* const data = take(50 * kMega);
  std::memset(data, 1, 50 * kMega);
  EXPECT_LE(held_now(), 70 * kMega + 2 * kHugePage);
  EXPECT_EQ(pool.stats().hits, 0u);
  pool.free(data);
}

TEST_F(GatherTest, PagesThatMayNotBeMovedChangeNothingForTheCaller) {
  for (const size_t movable : {size_t{0}, kPiece, kHugePage, 11 * kHugePage + kPiece}) {
    counts.movable = movable;
    void* const data = take(30 * kMega);
    std::memset(data, 1, 30 * kMega);
    pool.free(data);
  }
}

TEST_F(PoolTest, IsPageAlignedAndCountsWholePages) {
  void* const data = take(65537);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 4096, 0u);
  EXPECT_EQ(pool.stats().in_use_bytes, 65536u + 4096);
  pool.free(data);
}

TEST_F(PoolTest, NothingInUseOverlaps) {
  std::vector<std::pair<unsigned char*, size_t>> live;
  std::mt19937 random(1);
  for (int i = 0; i < 5000; ++i) {
    if (live.size() < 20 || random() % 2 == 0) {
      const size_t bytes = 1 + random() % (random() % 8 == 0 ? 5 * kMega : kMega / 2);
      auto* const data = static_cast<unsigned char*>(take(bytes));
      const auto mark = static_cast<unsigned char>(reinterpret_cast<uintptr_t>(data) / 4096);
      data[0] = data[bytes / 2] = data[bytes - 1] = mark;
      live.emplace_back(data, bytes);
    } else {
      std::swap(live[random() % live.size()], live.back());
      const auto [data, bytes] = live.back();
      const auto mark = static_cast<unsigned char>(reinterpret_cast<uintptr_t>(data) / 4096);
      ASSERT_TRUE(data[0] == mark && data[bytes / 2] == mark && data[bytes - 1] == mark);
      pool.free(data);
      live.pop_back();
    }
  }
  for (const auto& [data, bytes] : live) pool.free(data);
}

TEST_F(PoolTest, NeighboursJoinForALargerRequest) {
  void* const a = take(kMega);
  void* const b = take(kMega);
  void* const c = take(kMega);
  pool.free(a);
  pool.free(c);
  pool.free(b);
  EXPECT_EQ(take(3 * kMega), a);
  EXPECT_EQ(pool.stats().hits, 1u);
  EXPECT_EQ(pool.stats().idle_bytes, 0u);
  pool.free(a);
}

TEST_F(PoolTest, IdleMemoryBelowFreshMemoryGrows) {
  void* const kept = take(kMega);
  void* const a = take(kMega);
  pool.free(a);
  EXPECT_EQ(take(kMega + kMega / 2), a);
  EXPECT_EQ(pool.stats().peak_held_bytes, 2 * kMega + kMega / 2);
  EXPECT_EQ(counts.maps, 1);
  pool.free(kept);
  pool.free(a);
}

// The kernel gives fresh memory by huge pages.
TEST_F(PoolTest, TheRestOfAHugePageCountsAndServes) {
  void* const a = take(kMega);
  void* const b = take(kPiece);
  EXPECT_EQ(b, static_cast<char*>(a) + kMega);
  EXPECT_EQ(pool.stats().peak_held_bytes, kHugePage);
  void* const c = take(kPiece);
  EXPECT_EQ(pool.stats().hits, 1u);
  for (void* block : {a, b, c}) pool.free(block);
}

#if !defined(__SANITIZE_ADDRESS__)  // poisoning takes memory of its own
TEST_F(PoolTest, BlocksBeyondFourGigabytes) {
  constexpr size_t kBytes = (size_t{5} << 30) + 12345;
  auto* const data = static_cast<char*>(take(kBytes));
  data[0] = data[kBytes - 1] = 7;
  EXPECT_GE(pool.stats().in_use_bytes, kBytes);
  pool.free(data);
  EXPECT_EQ(take(kBytes), data);
  EXPECT_TRUE(data[0] == 7 && data[kBytes - 1] == 7);
  pool.free(data);
}
#endif

// A step of training in which forward, backward and the optimizer use different sizes.
void step(Pool& pool, size_t unit) {
  std::vector<void*> saved, grads;
  for (int layer = 0; layer < 6; ++layer) {
    saved.push_back(pool.allocate(unit * 3));
    void* const passing = pool.allocate(unit * 8);
    saved.push_back(pool.allocate(unit * 4));
    pool.free(passing);
  }
  while (!saved.empty()) {
    void* const grad = pool.allocate(unit * 8);
    grads.push_back(pool.allocate(unit * 5));
    pool.free(saved.back());
    saved.pop_back();
    pool.free(grad);
  }
  for (void* grad : grads) pool.free(grad);
}

TEST_F(PoolTest, AStepNeedsFreshMemoryOnlyAtFirst) {
  step(pool, kMega);
  step(pool, kMega);
  const Stats before = pool.stats();
  for (int i = 0; i < 5; ++i) step(pool, kMega);
  const Stats after = pool.stats();
  EXPECT_EQ(after.misses, before.misses);
  EXPECT_EQ(after.hits, before.hits + 5 * 42);
  // Sizes share memory: what is held follows what is in use.
  EXPECT_LE(after.peak_held_bytes, after.peak_in_use_bytes * 5 / 4 + kHugePage);
}

// ---- giving back

TEST_F(PoolTest, LimitBoundsIdleMemory) {
  pool.set_limit(4 * kMega);
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(take(2 * kMega));
  for (void* block : blocks) {
    pool.free(block);
    EXPECT_LE(pool.stats().idle_bytes, 4 * kMega);
  }
  EXPECT_EQ(pool.stats().idle_bytes, 4 * kMega);
  EXPECT_EQ(pool.stats().released_bytes, 12 * kMega);
  pool.set_limit(kMega);
  EXPECT_LE(pool.stats().idle_bytes, kMega);
}

TEST_F(PoolTest, LimitZeroKeepsNothing) {
  pool.set_limit(0);
  // Through the end of a mapping, too.
  std::vector<void*> blocks;
  for (int i = 0; i < 21; ++i) blocks.push_back(take(3 * kMega));
  blocks.push_back(take(kMega + kMega / 4));
  blocks.push_back(take(kPiece));
  EXPECT_EQ(pool.stats().idle_bytes, 0u);
  for (void* block : blocks) pool.free(block);
  EXPECT_EQ(pool.stats().idle_bytes, 0u);
  EXPECT_EQ(pool.limit(), 0u);
}

TEST_F(PoolTest, TheOldestGoesFirst) {
  void* const old = take(20 * kMega);
  void* const wall = take(kMega);  // so that the two do not join
  void* const recent = take(20 * kMega);
  pool.free(old);
  void* const later = take(30 * kMega);
  pool.free(recent);
  pool.set_limit(21 * kMega);
  const size_t misses = pool.stats().misses;
  void* const again = take(20 * kMega);
  EXPECT_EQ(again, recent);
  EXPECT_EQ(pool.stats().misses, misses);
  for (void* block : {again, wall, later}) pool.free(block);
}

TEST_F(PoolTest, TrimGivesAllIdleMemoryBack) {
  void* const kept = take(kMega);
  pool.free(take(40 * kMega));
  EXPECT_EQ(pool.trim(), 40 * kMega);
  EXPECT_EQ(pool.stats().idle_bytes, 0u);
  EXPECT_EQ(counts.mapped, kMega);
  EXPECT_EQ(pool.trim(), 0u);
  std::memset(kept, 1, kMega);
  pool.free(kept);
}

TEST_F(PoolTest, MemoryThatNobodyNeedsForLongGoesBack) {
  pool.free(take(100 * kMega));
  for (int i = 0; i < 3 * 4096; ++i) pool.free(take(kMega));
  EXPECT_LE(pool.stats().idle_bytes, 2 * kMega);
  EXPECT_GE(pool.stats().released_bytes, 98 * kMega);
}

TEST_F(PoolTest, UnfittingIdleMemoryMakesRoom) {
  for (size_t size = 16; size <= 128; size += 16) pool.free(take(size * kMega));
  EXPECT_LE(pool.stats().peak_held_bytes, 160 * kMega);
}

TEST_F(PoolTest, IdleMemoryGoesFirstWhereTheSystemIsShort) {
  std::vector<void*> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(take(20 * kMega));
  for (int i = 0; i < 8; i += 2) pool.free(blocks[i]);
  EXPECT_EQ(pool.stats().idle_bytes, 80 * kMega);
  counts.available = 0;
  void* const data = take(104 * kMega);
  EXPECT_EQ(pool.stats().idle_bytes, 0u);
  pool.free(data);
  for (int i = 1; i < 8; i += 2) pool.free(blocks[i]);
}

// ---- failure

TEST_F(PoolTest, AFailedRequestTrimsAndTriesAgain) {
  counts.most = 100 * kMega;
  void* const a = take(40 * kMega);
  void* const b = take(40 * kMega);
  pool.free(a);
  EXPECT_EQ(pool.allocate(90 * kMega), nullptr);
  EXPECT_EQ(pool.stats().in_use_bytes, 40 * kMega);
  void* const c = take(60 * kMega);
  EXPECT_EQ(pool.stats().idle_bytes, 0u);
  pool.free(b);
  pool.free(c);
}

TEST_F(PoolTest, AShortSystemGetsExactMappings) {
  counts.most = 4 * kMega;
  void* const data = take(3 * kMega);
  EXPECT_EQ(counts.mapped, 4 * kMega);
  pool.free(data);
}

TEST_F(PoolTest, EveryFailureLeavesThePoolUsable) {
  for (size_t most = 0; most < 140 * kMega; most += 2 * kMega) {
    pool.trim();
    counts.most = most;
    std::vector<void*> blocks;
    for (const size_t size : {3, 8, 30, 1, 17, 40, 5}) {
      if (void* const data = pool.allocate(size * kMega)) {
        std::memset(data, 1, size * kMega);
        blocks.push_back(data);
      }
      if (blocks.size() == 3) {
        pool.free(blocks[1]);
        blocks.erase(blocks.begin() + 1);
      }
    }
    EXPECT_LE(counts.mapped, most);
    for (void* block : blocks) pool.free(block);
    EXPECT_EQ(pool.stats().in_use_bytes, 0u);
  }
  EXPECT_EQ(pool.allocate(SIZE_MAX), nullptr);
  EXPECT_EQ(pool.allocate(SIZE_MAX / 2), nullptr);
}

// ---- threads and processes

TEST_F(PoolTest, ThreadsFreeWhatOthersAllocated) {
  constexpr int kThreads = 4;
  std::vector<std::atomic<int*>> boxes(kThreads);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(id);
      for (int i = 0; i < 2000; ++i) {
        const size_t words = 16384 + random() % 100000;
        auto* data = static_cast<int*>(pool.allocate(4 * words));
        data[0] = data[words - 1] = static_cast<int>(words);
        data = boxes[random() % kThreads].exchange(data);
        if (data == nullptr) continue;
        if (data[data[0] - 1] != data[0]) ++wrong;
        pool.free(data);
        if (i % 500 == 0) pool.trim();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  for (auto& box : boxes) {
    if (int* const data = box) pool.free(data);
  }
}

TEST_F(PoolTest, AForkedProcessHasAPoolOfItsOwn) {
  auto* const shared = static_cast<char*>(take(kMega));
  shared[0] = 1;
  pool.free(take(2 * kMega));
  pool.lock();
  const pid_t child = fork();
  pool.unlock();
  if (child == 0) {
    shared[0] = 2;
    pool.free(shared);
    void* const data = pool.allocate(kMega);
    _exit(data != nullptr && pool.stats().hits == 1 && pool.trim() > 0 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(shared[0], 1);
  EXPECT_EQ(pool.stats().in_use_bytes, kMega);
  pool.free(shared);
}

#if defined(__SANITIZE_ADDRESS__)
TEST_F(PoolTest, TheSanitizerSeesUseAfterFree) {
  auto* const data = static_cast<volatile char*>(take(kMega));
  data[5] = 1;
  pool.free(const_cast<char*>(data));
  EXPECT_DEATH(data[5] = 2, "use-after-poison");
}

TEST_F(PoolTest, TheSanitizerSeesUseBeyondTheEnd) {
  auto* const data = static_cast<volatile char*>(take(kMega + 8));
  EXPECT_DEATH(data[kMega + 8] = 2, "use-after-poison");
  pool.free(const_cast<char*>(data));
}
#endif

}  // namespace
}  // namespace transformer_ops::memory
