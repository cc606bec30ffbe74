#include "fuser/rewrite.h"

#include <algorithm>
#include <set>
#include <utility>

#include "fuser/delay.h"
#include "fuser/quantize.h"

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
  Rewriter(const Analysis& analysis, const UserRewrite& user, const UserPattern& pattern)
      : analysis_(analysis), ops_(analysis.ops()), user_(user), pattern_(pattern) {}

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
      if (fusion.rule) {
        groups = apply(*fusion.rule, groups);
      } else if (!fusion.pattern.empty()) {
        if (pattern_) groups = apply(fusion, groups);
      } else if (user_) {  // a user's function needs the host language
        groups = user_(fusion, groups);
      }
    }
    drop_beaten(pass, groups);
    return groups;
  }

  // Drops near misses of fusions whose ops another fusion took. A user's fusion that was refused
  // stays in the report.
  void drop_beaten(Pass pass, const Groups& groups) {
    std::erase_if(misses_, [&](const Miss& miss) {
      if (miss.near.pass != pass || (miss.by_user && !miss.near.structural)) return false;
      const int first = miss.near.ops.front();
      const auto group = std::prev(std::ranges::upper_bound(groups, first, {}, &StepGroup::first));
      return group->count > 1 && first + miss.length <= group->first + group->count;
    });
  }

  // A fusion with a pattern.
  struct Candidate {
    const std::string& name;
    Pass pass;
    const std::vector<PatternOp>& pattern;
    size_t least;      // the number of ops that are not optional
    bool passes_idle;  // ops that do nothing may lie between two of its ops
    bool by_user;      // may take Python ops
    std::function<bool(size_t entry, size_t at)> fits;
    std::function<std::optional<std::string>(const Match&)> why_not;
    std::function<StepGroup(int first, int count, const std::vector<int>& places)> make;
  };

  Groups apply(const Rule& rule, const Groups& groups) {
    return apply({.name = rule.name,
                  .pass = rule.pass,
                  .pattern = rule.pattern,
                  .least = std::min<size_t>(2, rule.pattern.size()),
                  .passes_idle = true,
                  .by_user = false,
                  .fits =
                      [&](size_t entry, size_t at) {
                        const bool is_free = !groups[at].rule && !groups[at].python;
                        return is_free && is_one_of(groups[at].first, rule.pattern[entry].kinds);
                      },
                  .why_not =
                      [&](const Match& match) {
                        auto reason = quantized_product(match, rule);
                        if (!reason) reason = delayed_gradient(match, rule.pass);
                        return reason || !rule.why_not ? reason : rule.why_not(match);
                      },
                  .make =
                      [&](int first, int count, const std::vector<int>& places) {
                        return StepGroup{.first = first,
                                         .count = count,
                                         .rule = &rule,
                                         .name = rule.name,
                                         .joint = rule.pass == Pass::Joint,
                                         .places = places};
                      }},
                 groups);
  }

  Groups apply(const Fusion& fusion, const Groups& groups) {
    const UserMatcher user = pattern_(fusion, groups);
    if (user.fits.empty()) return groups;
    return apply(
        {.name = fusion.name,
         .pass = fusion.pass,
         .pattern = fusion.pattern,
         .least = 1,
         .passes_idle = false,  // its contexts are those of the ops that it names
         .by_user = true,
         .fits = [&](size_t entry, size_t at) { return user.fits[entry][at]; },
         .why_not =
             [&](const Match& match) {
               if (const auto reason = quantized_product(match)) return reason;
               return user.why_not(match.first(), match.last() - match.first() + 1);
             },
         .make = [&](int first, int count, const auto&) { return user.make(first, count); }},
        groups);
  }

  Groups apply(const Candidate& candidate, const Groups& groups) {
    Groups result;
    for (size_t i = 0; i < groups.size();) {
      Attempt attempt(*this, candidate, groups, i);
      if (attempt.run()) {
        const int first = groups[i].first, last = groups[attempt.end() - 1].first;
        result.push_back(candidate.make(first, last - first + 1, attempt.places()));
        i = attempt.end();
      } else {
        result.push_back(groups[i++]);
      }
    }
    return result;
  }

  bool is_one_of(int op, const std::vector<std::string>& kinds) const {
    return std::ranges::find(kinds, ops_[op].kind) != kinds.end();
  }

  struct Miss {
    NearMiss near;
    int length;  // the number of ops that it would have taken
    bool by_user;
  };

  // One fusion at one position. It takes the first match that the guard allows, and prefers taking
  // an op to leaving it out, and the next op to one after an idle op.
  class Attempt {
   public:
    Attempt(Rewriter& rewriter, const Candidate& candidate, const Groups& groups, size_t begin)
        : rewriter_(rewriter), candidate_(candidate), groups_(groups), begin_(begin), end_(begin) {}

    // Returns false if there is no match. A near miss is then recorded with its reason.
    bool run() {
      if (match(0, begin_)) return true;
      if (!refused_ && furthest_ > begin_) {
        note(furthest_, reason_, fitting_);
      } else if (!refused_ && candidate_.by_user && is_taken(begin_)) {
        if (!note_taken_run()) note_taken_start();
      }
      return false;
    }

    const std::vector<int>& places() const { return match_.places; }
    size_t end() const { return end_; }

   private:
    // Matches the pattern from `entry` on with the groups from `begin` on.
    bool match(size_t entry, size_t begin) {
      // Without gaps, the rest of the match depends only on where it starts.
      if (!candidate_.passes_idle && !tried_.emplace(entry, begin).second) return false;
      if (entry == candidate_.pattern.size()) return accept();
      const PatternOp& wanted = candidate_.pattern[entry];
      size_t at = begin;
      for (;; ++at) {
        if (at < groups_.size() && candidate_.fits(entry, at)) {
          match_.places.push_back(groups_[at].first);
          const size_t end = std::exchange(end_, at + 1);
          if (match(entry + 1, at + 1)) return true;
          match_.places.pop_back();
          end_ = end;
        }
        if (end_ == begin_ || !candidate_.passes_idle || !may_pass(at)) break;
      }
      if (!wanted.optional) {
        // A rule counts as a near miss only if its last op is the one that differs.
        if (candidate_.by_user || is_last_needed(entry)) come_close(at, entry + 1);
        return false;
      }
      match_.places.push_back(-1);
      if (match(entry + 1, begin)) return true;
      match_.places.pop_back();
      return false;
    }

    bool accept() {
      if (only_looks_) return taken() >= candidate_.least;
      if (taken() < candidate_.least) {
        if (taken() > 0) come_close(skip_idle(end_), candidate_.pattern.size());
        return false;
      }
      const auto reason = candidate_.why_not ? candidate_.why_not(match_) : std::nullopt;
      if (!reason) return true;
      // Only the first of several refusals is reported, which is that of the longest match.
      if (!std::exchange(refused_, true)) note(end_, *reason, taken());
      return false;
    }

    size_t taken() const {
      return std::ranges::count_if(match_.places, [](int place) { return place >= 0; });
    }

    const OpNode& op_at(size_t at) const { return rewriter_.ops_[groups_[at].first]; }

    // May the match skip this group?
    bool may_pass(size_t at) const {
      if (at >= groups_.size() || groups_[at].rule || groups_[at].python) return false;
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
      return std::all_of(candidate_.pattern.begin() + static_cast<std::ptrdiff_t>(entry) + 1,
                         candidate_.pattern.end(), [](const PatternOp& op) { return op.optional; });
    }

    // Records that an op is missing at `at`: one of the entries before `end` that are not matched
    // yet.
    void come_close(size_t at, size_t end) {
      if (end_ == begin_ || at <= furthest_) return;
      size_t entry = match_.places.size();
      while (entry > 0 && match_.places[entry - 1] < 0) --entry;
      std::vector<std::string> wanted;
      for (; entry < end; ++entry) {
        const auto& kinds = candidate_.pattern[entry].kinds;
        wanted.insert(wanted.end(), kinds.begin(), kinds.end());
      }
      furthest_ = at;
      reason_ = mismatch(at, wanted);
      fitting_ = taken();
      structural_ = !is_taken(at) || !rewriter_.is_one_of(groups_[at].first, wanted);
    }

    // Did another fusion take the ops at this position?
    bool is_taken(size_t at) const {
      if (at >= groups_.size()) return false;
      const bool by_python = groups_[at].python.value_or(groups_[at].first) != groups_[at].first;
      return groups_[at].rule || by_python;
    }

    // The reason why a group is not a free op of these kinds.
    std::string mismatch(size_t at, const std::vector<std::string>& kinds) const {
      const auto needs = [&] { return " where it needs " + join(kinds, " or "); };
      if (at >= groups_.size()) return "the ops end" + needs();
      const StepGroup& group = groups_[at];
      const OpNode& op = op_at(at);
      const std::string place = "op " + std::to_string(group.first);
      if (!op.native && group.count == 1 && !candidate_.by_user) {
        return place + " is a Python op";
      }
      if (!rewriter_.is_one_of(group.first, kinds)) {
        const bool is_idle = candidate_.by_user && may_pass(at);
        const char* const but = ", which does nothing now but has no entry in the pattern,";
        return place + " is " + op.kind + (is_idle ? but : "") + needs();
      }
      return place + " is taken by " + group.name;
    }

    // Records that the fusion would match the very ops that another user's fusion took. Returns
    // false if it would not.
    bool note_taken_run() {
      const StepGroup& group = groups_[begin_];
      if (group.rule || !fits_kinds(0, group.first, group.first + group.count)) return false;
      std::vector<int> ops;
      for (int k = 0; k < group.count; ++k) ops.push_back(group.first + k);
      rewriter_.misses_.push_back({{.fusion = candidate_.name,
                                    .pass = candidate_.pass,
                                    .ops = std::move(ops),
                                    .reason = "the ops are taken by " + group.name,
                                    .matched = group.count},
                                   group.count,
                                   candidate_.by_user});
      return true;
    }

    // Do the kinds of these ops match the pattern from `entry` on?
    bool fits_kinds(size_t entry, int op, int end) const {
      if (entry == candidate_.pattern.size()) return op == end;
      const PatternOp& wanted = candidate_.pattern[entry];
      const bool fits = op < end && rewriter_.is_one_of(op, wanted.kinds);
      return (fits && fits_kinds(entry + 1, op + 1, end)) ||
             (wanted.optional && fits_kinds(entry + 1, op, end));
    }

    // Records that the fusion would match if another fusion had not taken its first op.
    void note_taken_start() {
      const StepGroup& group = groups_[begin_];
      const int first = group.first + group.count - 1;
      if (!rewriter_.is_one_of(first, candidate_.pattern.front().kinds)) return;
      match_.places = {first};
      end_ = begin_ + 1;
      only_looks_ = true;
      tried_.clear();
      if (!match(1, end_) || taken() < 2) return;
      const std::string reason = "op " + std::to_string(first) + " is taken by " + group.name;
      std::vector<int> ops;
      for (int op = first; op <= groups_[end_ - 1].first; ++op) ops.push_back(op);
      const int length = static_cast<int>(std::ssize(ops));
      rewriter_.misses_.push_back({{.fusion = candidate_.name,
                                    .pass = candidate_.pass,
                                    .ops = std::move(ops),
                                    .reason = reason,
                                    .matched = static_cast<int>(taken())},
                                   length,
                                   candidate_.by_user});
    }

    // Records why the groups before `end` were not taken, and shows one more group unless refused.
    void note(size_t end, const std::string& reason, size_t matched) {
      const bool shows_next = !refused_ && end < groups_.size();
      std::vector<int> ops;
      for (size_t i = begin_; i < end + (shows_next ? 1 : 0); ++i) {
        for (int k = 0; k < groups_[i].count; ++k) ops.push_back(groups_[i].first + k);
      }
      const int length = static_cast<int>(end - begin_) + (refused_ ? 0 : 1);
      NearMiss miss{.fusion = candidate_.name,
                    .pass = candidate_.pass,
                    .ops = std::move(ops),
                    .reason = reason,
                    .matched = static_cast<int>(matched),
                    .structural = !refused_ && structural_};
      rewriter_.misses_.push_back({std::move(miss), length, candidate_.by_user});
    }

    Rewriter& rewriter_;
    const Candidate& candidate_;
    const Groups& groups_;
    size_t begin_;
    size_t end_;  // after the last group taken
    Match match_{rewriter_.analysis_, {}};
    bool refused_ = false;     // by the guard
    bool only_looks_ = false;  // only examines what follows an op that is taken, without asking the
                               // guard
    size_t furthest_ = begin_;
    std::string reason_ = {};
    std::set<std::pair<size_t, size_t>> tried_ = {};
    size_t fitting_ = 0;  // the number of ops of the match that came furthest
    bool structural_ = false;
  };

  const Analysis& analysis_;
  const std::vector<OpNode>& ops_;
  const UserRewrite& user_;
  const UserPattern& pattern_;
  std::vector<Miss> misses_;
};

}  // namespace

Rewritten rewrite(const Analysis& analysis, const UserRewrite& user, const UserPattern& pattern) {
  return Rewriter(analysis, user, pattern).run();
}

}  // namespace transformer_ops
