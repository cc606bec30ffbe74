#pragma once

#include <mutex>

namespace transformer_ops {

// A mutex that is free in a forked child, whichever thread of the parent held it. A fork takes all
// these mutexes, so no other lock may be taken while one is held. It must be made while its library
// is loaded: a static object of a function has a lock of its own during its construction, for which
// a forked child would wait forever.
class ForkSafeMutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

}  // namespace transformer_ops
