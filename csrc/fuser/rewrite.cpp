#include "fuser/rewrite.h"

#include <algorithm>

namespace transformer_ops {
namespace {

using Groups = std::vector<Group>;

std::string join(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

class Rewriter {
 public:
  Rewriter(const Analysis& analysis, const UserRewrite& user)
      : analysis_(analysis), ops_(analysis.ops()), user_(user) {}

  Rewritten run() {
    Groups joint = run_pass(Pass::Joint, singles());
    const int first_fused = static_cast<int>(ops_.size());
    for (Group& group : joint) group.joint = group.rule || group.python.value_or(-1) >= first_fused;
    Groups forward = run_pass(Pass::Forward, joint);
    Groups backward = run_pass(Pass::Backward, joint);
    return {std::move(forward), std::move(backward), std::move(near_misses_)};
  }

 private:
  Groups singles() const {
    Groups groups;
    for (int i = 0; i < static_cast<int>(ops_.size()); ++i) {
      const bool native = ops_[i].native;
      groups.push_back({.first = i,
                        .python = native ? std::nullopt : std::optional<int>(i),
                        .name = ops_[i].kind});
    }
    return groups;
  }

  Groups run_pass(Pass pass, Groups groups) {
    for (const Fusion& fusion : fusions(pass)) {
      groups = fusion.rule ? apply(*fusion.rule, groups) : user_(fusion, groups);
    }
    for (const Fusion& fusion : fusions(pass)) {
      if (fusion.rule) drop_beaten(*fusion.rule, groups);
    }
    return groups;
  }

  // Nobody misses a rule where a fusion took at least as many ops.
  void drop_beaten(const Rule& rule, const Groups& groups) {
    std::erase_if(near_misses_, [&](const NearMiss& miss) {
      if (miss.pass != rule.pass || miss.fusion != rule.name) return false;
      return std::ranges::any_of(groups, [&](const Group& group) {
        return group.first == miss.ops.front() &&
               group.count >= static_cast<int>(rule.pattern.size());
      });
    });
  }

  Groups apply(const Rule& rule, const Groups& groups) {
    Groups result;
    const size_t length = rule.pattern.size();
    for (size_t i = 0; i < groups.size();) {
      if (matches(rule, groups, i)) {
        result.push_back({.first = groups[i].first,
                          .count = static_cast<int>(length),
                          .rule = &rule,
                          .name = rule.name,
                          .joint = rule.pass == Pass::Joint});
        i += length;
      } else {
        result.push_back(groups[i++]);
      }
    }
    return result;
  }

  // True if the rule takes the groups from `begin`; else notes why not where it came close.
  bool matches(const Rule& rule, const Groups& groups, size_t begin) {
    for (size_t k = 0; k < rule.pattern.size(); ++k) {
      const std::string reason = mismatch(rule, groups, begin, k);
      if (reason.empty()) continue;
      // Close: all but the last op fit.
      if (k > 0 && k + 1 == rule.pattern.size()) note(rule, groups, begin, k + 1, reason);
      return false;
    }
    const Match match{analysis_, groups[begin].first};
    const auto reason = rule.why_not ? rule.why_not(match) : std::nullopt;
    if (reason) note(rule, groups, begin, rule.pattern.size(), *reason);
    return !reason;
  }

  std::string mismatch(const Rule& rule, const Groups& groups, size_t begin, size_t k) const {
    const std::string wanted = join(rule.pattern[k], " or ");
    if (begin + k >= groups.size()) return "the ops end where it needs " + wanted;
    const Group& group = groups[begin + k];
    const OpNode& op = ops_[group.first];
    const std::string place = "op " + std::to_string(group.first);
    const bool kind_fits = std::ranges::find(rule.pattern[k], op.kind) != rule.pattern[k].end();
    const bool taken = group.count > 1 || group.rule || (group.python && op.native);
    if (!op.native && !taken) return place + " is a Python op";
    if (!kind_fits) return place + " is " + op.kind + " where it needs " + wanted;
    if (taken) return place + " is taken by " + group.name;
    return "";
  }

  void note(const Rule& rule, const Groups& groups, size_t begin, size_t count,
            std::string reason) {
    std::vector<int> ops;
    for (size_t i = begin; i < std::min(begin + count, groups.size()); ++i) {
      for (int k = 0; k < groups[i].count; ++k) ops.push_back(groups[i].first + k);
    }
    near_misses_.push_back({rule.name, rule.pass, std::move(ops), std::move(reason)});
  }

  const Analysis& analysis_;
  const std::vector<OpNode>& ops_;
  const UserRewrite& user_;
  std::vector<NearMiss> near_misses_;
};

}  // namespace

Rewritten rewrite(const Analysis& analysis, const UserRewrite& user) {
  return Rewriter(analysis, user).run();
}

}  // namespace transformer_ops
