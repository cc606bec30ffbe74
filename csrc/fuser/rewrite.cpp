#include "fuser/rewrite.h"

#include <algorithm>
#include <utility>

namespace transformer_ops {
namespace {

using Groups = std::vector<StepGroup>;

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
    for (StepGroup& group : joint)
      group.joint = group.rule || group.python.value_or(-1) >= first_fused;
    Groups forward = run_pass(Pass::Forward, joint);
    Groups backward = run_pass(Pass::Backward, joint);
    std::vector<NearMiss> near_misses;
    for (Miss& miss : misses_) near_misses.push_back(std::move(miss.near));
    return {std::move(forward), std::move(backward), std::move(near_misses)};
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
      // Without a host language nobody can call a user's function.
      if (!fusion.rule && !user_) continue;
      groups = fusion.rule ? apply(*fusion.rule, groups) : user_(fusion, groups);
    }
    drop_beaten(pass, groups);
    return groups;
  }

  // Nobody misses a rule where a fusion took its ops, and maybe more.
  void drop_beaten(Pass pass, const Groups& groups) {
    std::erase_if(misses_, [&](const Miss& miss) {
      if (miss.near.pass != pass) return false;
      return std::ranges::any_of(groups, [&](const StepGroup& group) {
        const int first = miss.near.ops.front();
        return group.count > 1 && group.first <= first &&
               first + miss.length <= group.first + group.count;
      });
    });
  }

  Groups apply(const Rule& rule, const Groups& groups) {
    Groups result;
    for (size_t i = 0; i < groups.size();) {
      Attempt attempt(*this, rule, groups, i);
      if (attempt.run()) {
        const int first = groups[i].first, last = groups[attempt.end() - 1].first;
        result.push_back({.first = first,
                          .count = last - first + 1,
                          .rule = &rule,
                          .name = rule.name,
                          .joint = rule.pass == Pass::Joint,
                          .places = attempt.places()});
        i = attempt.end();
      } else {
        result.push_back(groups[i++]);
      }
    }
    return result;
  }

  struct Miss {
    NearMiss near;
    int length;  // how many ops it would have taken
  };

  // One rule at one place. Of the ways to match it takes the first that the guard lets pass: an op
  // rather than none, the next op rather than one behind an idle one.
  class Attempt {
   public:
    Attempt(Rewriter& rewriter, const Rule& rule, const Groups& groups, size_t begin)
        : rewriter_(rewriter), rule_(rule), groups_(groups), begin_(begin), end_(begin) {}

    // False where there is no way; then it has noted why not where it came close.
    bool run() {
      if (match(0, begin_)) return true;
      if (!refused_ && furthest_ > begin_) note(furthest_, reason_);
      return false;
    }

    const std::vector<int>& places() const { return match_.places; }
    size_t end() const { return end_; }

   private:
    // Entries of the pattern from `entry` on with groups from `begin` on.
    bool match(size_t entry, size_t begin) {
      if (entry == rule_.pattern.size()) return accept();
      const PatternOp& wanted = rule_.pattern[entry];
      size_t at = begin;
      for (;; ++at) {
        if (is_free(at) && is_one_of(at, wanted.kinds)) {
          match_.places.push_back(groups_[at].first);
          const size_t end = std::exchange(end_, at + 1);
          if (match(entry + 1, at + 1)) return true;
          match_.places.pop_back();
          end_ = end;
        }
        if (end_ == begin_ || !may_pass(at)) break;
      }
      if (!wanted.optional) {
        if (is_last_needed(entry)) come_close(at, entry + 1);
        return false;
      }
      match_.places.push_back(-1);
      if (match(entry + 1, begin)) return true;
      match_.places.pop_back();
      return false;
    }

    bool accept() {
      const auto taken = std::ranges::count_if(match_.places, [](int place) { return place >= 0; });
      if (taken < std::min<std::ptrdiff_t>(2, std::ssize(rule_.pattern))) {
        if (taken > 0) come_close(skip_idle(end_), rule_.pattern.size());
        return false;
      }
      const auto reason = rule_.why_not ? rule_.why_not(match_) : std::nullopt;
      if (!reason) return true;
      // Of several refusals the first is told, which is that of the longest match.
      if (!std::exchange(refused_, true)) note(end_, *reason);
      return false;
    }

    const OpNode& op_at(size_t at) const { return rewriter_.ops_[groups_[at].first]; }

    // A native op that no fusion took.
    bool is_free(size_t at) const {
      return at < groups_.size() && !groups_[at].rule && !groups_[at].python;
    }

    bool is_one_of(size_t at, const std::vector<std::string>& kinds) const {
      return std::ranges::find(kinds, op_at(at).kind) != kinds.end();
    }

    // May the match go on behind this group?
    bool may_pass(size_t at) const {
      if (!is_free(at)) return false;
      const OpNode& op = op_at(at);
      const bool has_extras = !op.extra_inputs.empty() || !op.extra_outputs.empty();
      return !has_extras && rewriter_.analysis_.is_idle(groups_[at].first);
    }

    size_t skip_idle(size_t at) const {
      while (may_pass(at)) ++at;
      return at;
    }

    // Are all entries after this one optional?
    bool is_last_needed(size_t entry) const {
      return std::all_of(rule_.pattern.begin() + static_cast<std::ptrdiff_t>(entry) + 1,
                         rule_.pattern.end(), [](const PatternOp& op) { return op.optional; });
    }

    // Something is missing at `at`: an op of an entry before `end` that comes after those taken.
    void come_close(size_t at, size_t end) {
      if (end_ == begin_ || at <= furthest_) return;
      size_t entry = match_.places.size();
      while (entry > 0 && match_.places[entry - 1] < 0) --entry;
      std::vector<std::string> wanted;
      for (; entry < end; ++entry) {
        const auto& kinds = rule_.pattern[entry].kinds;
        wanted.insert(wanted.end(), kinds.begin(), kinds.end());
      }
      furthest_ = at;
      reason_ = mismatch(at, wanted);
    }

    // Why a group is no free op of these kinds.
    std::string mismatch(size_t at, const std::vector<std::string>& kinds) const {
      const auto needs = [&] { return " where it needs " + join(kinds, " or "); };
      if (at >= groups_.size()) return "the ops end" + needs();
      const StepGroup& group = groups_[at];
      const OpNode& op = op_at(at);
      const std::string place = "op " + std::to_string(group.first);
      if (!op.native && group.count == 1) return place + " is a Python op";
      if (!is_one_of(at, kinds)) return place + " is " + op.kind + needs();
      return place + " is taken by " + group.name;
    }

    // That the groups before `end`, and one more if there is none left, were not taken.
    void note(size_t end, const std::string& reason) {
      const bool shows_next = !refused_ && end < groups_.size();
      std::vector<int> ops;
      for (size_t i = begin_; i < end + (shows_next ? 1 : 0); ++i) {
        for (int k = 0; k < groups_[i].count; ++k) ops.push_back(groups_[i].first + k);
      }
      const int length = static_cast<int>(end - begin_) + (refused_ ? 0 : 1);
      rewriter_.misses_.push_back({{rule_.name, rule_.pass, std::move(ops), reason}, length});
    }

    Rewriter& rewriter_;
    const Rule& rule_;
    const Groups& groups_;
    size_t begin_;
    size_t end_;  // behind the last group taken
    Match match_{rewriter_.analysis_, {}};
    bool refused_ = false;  // by the guard
    size_t furthest_ = begin_;
    std::string reason_ = {};
  };

  const Analysis& analysis_;
  const std::vector<OpNode>& ops_;
  const UserRewrite& user_;
  std::vector<Miss> misses_;
};

}  // namespace

Rewritten rewrite(const Analysis& analysis, const UserRewrite& user) {
  return Rewriter(analysis, user).run();
}

}  // namespace transformer_ops
