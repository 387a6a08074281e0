#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "proto/coordinator.pb.h"
#include "src/base/clock.h"
#include "src/base/ids.h"

namespace rekindle::worker {

// The rounds, as the coordinator last ordered them. Pure.
class KnownRounds {
 public:
  struct Round {
    ModelVersion id;
    std::string group;  // "": all groups
    bool gathering = false;
    bool concerns(const std::string& its_group) const {
      return group.empty() || group == its_group;
    }
  };

  // A report was sent.
  void asked(TimePoint now) {
    if (!silent_since_) silent_since_ = now;
  }
  // Takes the answer to report number `sequence`. False: it is older than another answer.
  bool take(const proto::RoundOrders& orders, std::uint64_t sequence);
  // The coordinator did not answer. The next answer may be another coordinator's, which counts its
  // revisions anew.
  void unanswered() { seen_ = 0; }
  // Nobody asks for orders any more, so the known ones grow old.
  void forget();
  // Members do not hear of this version any more.
  void retired(const ModelVersion& id);

  std::uint64_t seen() const { return seen_; }  // the revision of the last orders
  bool has_answered(std::uint64_t sequence) const { return answered_ >= sequence; }
  bool is_silent(TimePoint now, Duration limit) const {
    return silent_since_ && now - *silent_since_ >= limit;
  }
  const Round* find(std::uint64_t round) const;
  // The number of the round that gathers members of this group for this version; 0: none.
  std::uint64_t gathering(const ModelVersion& id, const std::string& group) const;
  // The version that members of this group attach to now, because a round gathers for it.
  std::optional<std::uint64_t> gathers(const std::string& model, const std::string& group) const;
  // The version that a member of this group, which has `have`, moves to.
  std::optional<std::uint64_t> news_for(const std::string& group, const ModelVersion& have) const;

 private:
  struct Last {
    std::uint64_t round = 0;
    std::uint64_t version = 0;
  };
  std::map<std::uint64_t, Round> rounds_;
  std::map<std::pair<std::string, std::string>, Last> last_;  // by model and group
  std::uint64_t answered_ = 0;                                // the last report with an answer
  std::uint64_t seen_ = 0;
  std::optional<TimePoint> silent_since_;
};

}  // namespace rekindle::worker
