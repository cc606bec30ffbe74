#pragma once

#include <mutex>

namespace transformer_ops {

// A mutex that a forked child finds free, whichever thread of the parent held it. While one is held
// no other lock is taken: a fork takes them all. It belongs to an object that is made while its
// library is loaded: a static object of a function has a lock of its own while it is made, which a
// forked child would wait for.
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
