#include "fuser/fork_safe_mutex.h"

#include <pthread.h>

#include <vector>

namespace transformer_ops {
namespace {

struct All {
  std::mutex mutex;
  std::vector<ForkSafeMutex*> list;
};

void lock_all();
void unlock_all();

All& all() {
  // Never deleted: a mutex may die after every other static object.
  static All* const made = [] {
    pthread_atfork(lock_all, unlock_all, unlock_all);
    return new All;
  }();
  return *made;
}

void lock_all() {
  all().mutex.lock();
  for (ForkSafeMutex* mutex : all().list) mutex->lock();
}

void unlock_all() {
  for (ForkSafeMutex* mutex : all().list) mutex->unlock();
  all().mutex.unlock();
}

}  // namespace

ForkSafeMutex::ForkSafeMutex() {
  const std::lock_guard lock(all().mutex);
  all().list.push_back(this);
}

ForkSafeMutex::~ForkSafeMutex() {
  const std::lock_guard lock(all().mutex);
  std::erase(all().list, this);
}

}  // namespace transformer_ops
