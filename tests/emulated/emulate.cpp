#undef _FORTIFY_SOURCE  // its longjmp refuses another stack
#include "emulate.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace emulated {
namespace {

constexpr size_t kStack = size_t{96} << 10;
constexpr int kMostThreads = 1024;

constexpr int kBarriers = 16;

enum class State { Ready, AtWarp, AtBarrier, AtBlock, Done };

struct Copy {
  void* to;
  const void* from;
  int bytes;
};

// Where a fiber or the scheduler goes on.
struct Point {
  ucontext_t context;
  jmp_buf jump;
  bool is_jump = false;  // of the two, the one that holds
};

struct Fiber {
  Point point;
  std::unique_ptr<char[]> stack;
  State state;
  int barrier, barrier_threads;
  std::deque<std::vector<Copy>> copies;  // groups; the last one is open
};

std::vector<Fiber> fibers;
std::vector<double> shared;
uint64_t slots[kMostThreads];
Point scheduler;
std::minstd_rand copy_order(2);
int current = 0;
const std::function<void()>* body = nullptr;
std::exception_ptr error;  // of a thread of the block

// swapcontext asks the kernel for the signal mask each time, which takes most of the time of the
// tests. The address sanitizer knows no other way to change stacks.
[[gnu::noinline]] void change(Point& from, Point& to) {
#if defined(__SANITIZE_ADDRESS__)
  swapcontext(&from.context, &to.context);
#else
  from.is_jump = true;
  if (_setjmp(from.jump) != 0) return;
  if (to.is_jump) _longjmp(to.jump, 1);
  setcontext(&to.context);
#endif
}

void enter() {
  try {
    (*body)();
  } catch (...) {
    error = std::current_exception();
  }
  fibers[current].state = State::Done;
  change(fibers[current].point, scheduler);
}

void wait(State state) {
  Fiber& fiber = fibers[current];
  fiber.state = state;
  change(fiber.point, scheduler);
}

// Sets the threads from first to last going again if all of them that still run wait there.
bool release(int first, int last, State state) {
  bool any = false;
  for (int i = first; i < last; ++i) {
    if (fibers[i].state == state) any = true;
    if (fibers[i].state != state && fibers[i].state != State::Done) return false;
  }
  for (int i = first; any && i < last; ++i) {
    if (fibers[i].state == state) fibers[i].state = State::Ready;
  }
  return any;
}

// Does the same for barriers of a number.
bool release_barriers(int threads) {
  int waiting[kBarriers] = {};
  bool any = false;
  for (int i = 0; i < threads; ++i) {
    if (fibers[i].state == State::AtBarrier) ++waiting[fibers[i].barrier];
  }
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    if (fiber.state != State::AtBarrier) continue;
    if (waiting[fiber.barrier] != fiber.barrier_threads) continue;
    fiber.state = State::Ready;
    any = true;
  }
  return any;
}

// Not inlined: getcontext may return twice, as far as the compiler knows.
[[gnu::noinline]] void prepare(Fiber& fiber) {
  if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStack);
  getcontext(&fiber.point.context);
  fiber.point.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.point.context.uc_stack.ss_size = kStack;
  fiber.point.context.uc_link = nullptr;
  makecontext(&fiber.point.context, enter, 0);
  fiber.point.is_jump = false;
  fiber.state = State::Ready;
  fiber.copies.assign(1, {});
}

void run_block(int threads, std::minstd_rand& random) {
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) {
    order[i] = i;
    prepare(fibers[i]);
  }
  uint64_t late = 0;  // warps that stand still for a while, so that others get ahead
  for (;;) {
    if (random() % 16 == 0) late = random();
    std::shuffle(order.begin(), order.end(), random);
    for (const int i : order) {
      if (fibers[i].state != State::Ready || (late >> (i / 32) & 1) != 0) continue;
      current = i;
      threadIdx = {static_cast<unsigned>(i), 0, 0};
      change(scheduler, fibers[i].point);
    }
    bool any = false;
    for (int warp = 0; warp < threads; warp += 32) any |= release(warp, warp + 32, State::AtWarp);
    any |= release_barriers(threads);
    if (!any) any = release(0, threads, State::AtBlock);
    if (any) continue;
    if (late != 0) {
      late = 0;
      continue;
    }
    const bool done = std::all_of(fibers.begin(), fibers.begin() + threads,
                                  [](const Fiber& fiber) { return fiber.state == State::Done; });
    if (done) return;
    throw std::logic_error("[emulated] all threads must reach the same barrier");
  }
}

}  // namespace

void* shared_memory() { return shared.data(); }
void wait_for_block() { wait(State::AtBlock); }
void wait_for_warp() { wait(State::AtWarp); }
void* slot(unsigned thread) { return &slots[thread]; }

void wait_for_threads(int barrier, int threads) {
  if (barrier < 1 || barrier >= kBarriers || threads % 32 != 0) {
    throw std::logic_error("[emulated] barriers must be 1 to 15, of whole warps");
  }
  fibers[current].barrier = barrier;
  fibers[current].barrier_threads = threads;
  wait(State::AtBarrier);
}

void copy_async(void* to, const void* from, int bytes) {
  if (copy_order() % 2 == 0) {
    std::memcpy(to, from, bytes);
  } else {
    fibers[current].copies.back().push_back({to, from, bytes});
  }
}

void commit_copies() { fibers[current].copies.emplace_back(); }

void wait_for_copies(int pending) {
  auto& groups = fibers[current].copies;
  while (std::ssize(groups) > pending + 1) {
    for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    groups.pop_front();
  }
}

void run(int64_t blocks, int threads, int64_t shared_bytes, const std::function<void()>& kernel) {
  // There is one GPU: threads of a program take turns.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (threads < 32 || threads > kMostThreads || threads % 32 != 0) {
    throw std::logic_error("[emulated] blocks must be whole warps, up to 1024 threads");
  }
  fibers.resize(kMostThreads);
  body = &kernel;
  blockDim = {static_cast<unsigned>(threads), 1, 1};
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  std::minstd_rand random(1);
  for (int64_t block = 0; block < blocks; ++block) {
    shared.assign((shared_bytes + 15) / 16 * 2, std::numeric_limits<double>::quiet_NaN());
    blockIdx = {static_cast<unsigned>(block), 0, 0};
    run_block(threads, random);
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }
}

}  // namespace emulated

float __bfloat162float(__nv_bfloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

__nv_bfloat16 __float2bfloat16_rn(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

float __half2float(__half x) {
  _Float16 value;
  std::memcpy(&value, &x.bits, 2);
  return static_cast<float>(value);
}

__half __float2half_rn(float x) {
  const auto value = static_cast<_Float16>(x);
  __half half;
  std::memcpy(&half.bits, &value, 2);
  return half;
}
