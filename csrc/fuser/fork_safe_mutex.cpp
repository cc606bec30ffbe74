#include "fuser/fork_safe_mutex.h"

#include <pthread.h>

#include <vector>

namespace transformer_ops {
namespace {

struct Mutexes {
  std::mutex mutex;
  std::vector<ForkSafeMutex*> list;
};

void lock_all();
void unlock_all();

Mutexes& all_mutexes() {
  // It is never deleted, because a mutex may be destroyed after every other static object.
  static Mutexes* const made = [] {
    pthread_atfork(lock_all, unlock_all, unlock_all);
    return new Mutexes;
  }();
  return *made;
}

void lock_all() {
  all_mutexes().mutex.lock();
  for (ForkSafeMutex* mutex : all_mutexes().list) mutex->lock();
}

void unlock_all() {
  for (ForkSafeMutex* mutex : all_mutexes().list) mutex->unlock();
  all_mutexes().mutex.unlock();
}

}  // namespace

ForkSafeMutex::ForkSafeMutex() {
  const std::lock_guard lock(all_mutexes().mutex);
  all_mutexes().list.push_back(this);
}

ForkSafeMutex::~ForkSafeMutex() {
  const std::lock_guard lock(all_mutexes().mutex);
  std::erase(all_mutexes().list, this);
}

}  // namespace transformer_ops
