#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/round.h"
#include "recovery/coordinator/core/update_plan.h"

namespace rekindle::coordinator {

// An update that has nobody to update.
Error no_member(const ModelVersion& id, const std::string& group);

// All broadcast rounds (docs/internals/rounds.md), running and remembered, and the last reports of
// the nodes that have members. Routes reports and time to the rounds, and tells each node its
// orders.
class Rounds {
 public:
  explicit Rounds(RoundTiming timing = {}) : timing_(timing) {}

  // The caller sees that the version is READY. kNotFound: no member of the group, and none is
  // awaited. kUnavailable: a round of this model and group (or of all groups) runs.
  Result<RoundId> begin(const ModelVersion& id, const Digest& root, const std::string& group,
                        const Gathering& gathering, std::uint64_t epoch, TimePoint now);
  // kStale: older than the last report of this incarnation.
  Result<void> report(const RoundReport& report, TimePoint now);
  // Deadlines, and members whose node is no longer alive or is another incarnation.
  void advance(const Membership& members, TimePoint now);
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);

  std::vector<RoundOrder> orders_for(const std::string& node_id) const;
  // Contents of the node's members that nobody has described yet.
  std::vector<Digest> undescribed_of(const std::string& node_id) const;
  const KnownPieces& pieces() const { return pieces_; }
  // As Round::copies_that_share(), of the rounds that bring this version.
  std::size_t copies_that_share(const ModelVersion& id) const;
  // The workers of the model in this group ("": in any), as last reported.
  std::vector<UpdateMember> members_of(const std::string& model, const std::string& group) const;
  // Grows whenever the orders of any node may have changed, or a round has ended.
  std::uint64_t revision() const { return revision_; }
  // nullptr: it is not known, or not any more.
  const Round* find(RoundId round) const;
  const std::map<RoundId, Round>& all() const { return rounds_; }

 private:
  void lose(const std::string& node_id, const std::string& why, TimePoint now);
  void move_on(Round& round, TimePoint now);
  void forget(TimePoint now);
  void take(const std::vector<DescribedContents>& described);

  const RoundTiming timing_;
  // By id; the nodes with members.
  std::map<std::string, RoundNode> nodes_;
  std::map<RoundId, Round> rounds_;
  Communicators communicators_;
  KnownPieces pieces_;
  TimePoint next_look_{};
  RoundId last_round_ = 0;
  std::uint64_t revision_ = 1;
};

}  // namespace rekindle::coordinator
