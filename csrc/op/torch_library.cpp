#include "op/torch_library.h"

#include <map>
#include <mutex>

#include "fuser/fork_safe_mutex.h"

namespace transformer_ops {

bool has_namespace(const std::string& name) { return name.find("::") != std::string::npos; }

std::string torch_name(const std::string& name) {
  return has_namespace(name) ? name : "transformer_ops::" + name;
}

torch::Library& torch_library(const std::string& name) {
  static ForkSafeMutex mutex;
  static std::map<std::string, torch::Library> libraries;
  const std::string full = torch_name(name);
  const std::string space = full.substr(0, full.find("::"));
  const std::lock_guard lock(mutex);
  return libraries
      .try_emplace(space, torch::Library::FRAGMENT, space, std::nullopt, __FILE__, __LINE__)
      .first->second;
}

}  // namespace transformer_ops
