#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/round.h"
#include "recovery/coordinator/core/round_messages.h"
#include "recovery/coordinator/core/types.h"

// Broadcast rounds (docs/rounds.md): who takes part, who meets whom, when it is over. Pure.
namespace rekindle::coordinator {

struct RoundTiming {
  Duration gather = std::chrono::seconds(5);
  Duration meet = std::chrono::seconds(10);
  Duration spread = std::chrono::seconds(30);         // of a party without any progress
  Duration report_silence = std::chrono::seconds(5);  // of a node with members that is alive
  Duration load = std::chrono::minutes(10);           // from the last party's end
  Duration remember = std::chrono::minutes(10);       // a round that is over
};

class Rounds {
 public:
  explicit Rounds(RoundTiming timing = {}) : timing_(timing) {}

  // The version is READY and somebody holds all of it: the caller's to see. kNotFound: no member
  // of the group. kUnavailable: a round of this model and group (or of all groups) runs.
  Result<RoundId> begin(const ModelVersion& id, const Digest& root, const std::string& group,
                        std::optional<Duration> gather, std::uint64_t epoch, TimePoint now);
  // kStale: older than what was heard of this incarnation.
  Result<void> report(const RoundReport& report, TimePoint now);
  // Deadlines, and members whose node is no longer alive or is another incarnation.
  void advance(const Membership& members, TimePoint now);
  void shift(Duration by);

  std::vector<RoundOrder> orders_for(const std::string& node_id) const;
  // Grows whenever the orders of any node may have changed, or a round's end.
  std::uint64_t revision() const { return revision_; }
  const Round* find(RoundId round) const;
  const std::map<RoundId, Round>& all() const { return rounds_; }

 private:
  struct Node {
    Incarnation incarnation;
    std::uint64_t sequence = 0;
    std::string device_life;
    std::vector<RoundMember> members;
    TimePoint last_heard;  // or when its wait ends
  };

  void expect_members(Round& round) const;
  static bool concerns(const Round& round, const RoundMember& member);
  static std::span<RoundPlace> places_of(Round& round, const std::string& node_id);
  static std::span<const RoundPlace> places_of(const Round& round, const std::string& node_id);
  static const RoundMember* find_member(const Round& round, const RoundPlace& place,
                                        const Node& node);
  static bool gather_place(const Round& round, RoundPlace& place, const Node& node);
  static bool watch_place(const Round& round, RoundPlace& place, const Node& node);
  static void watch_party_of(Round& round, RoundPlace& place, const Node& node);
  static bool admit(Round& round, const std::string& node_id, const Node& node);
  bool follow(Round& round, const std::string& node_id, const Node& node, TimePoint now);
  void lose(const std::string& node_id, const std::string& why, TimePoint now);
  void take_id(const RoundReport& report, const MeetingId& meeting, TimePoint now);

  void evolve(Round& round, TimePoint now);
  static void give_up_mates(Round& round);
  void enter(Round& round, RoundPhase phase, TimePoint now);
  void end_gathering(Round& round, TimePoint now);
  void forget(TimePoint now);

  void form_parties(Round& round, TimePoint now);
  void form_party(Round& round, std::vector<std::size_t> same, TimePoint now);
  void judge(Round& round, Party& party, TimePoint now);
  void stop(Party& party, std::string why);
  std::set<std::string> devices_in_parties() const;
  std::vector<std::string> signature_of(const Round& round, const Party& party) const;
  void name_communicator(const Round& round, Party& party);
  static PartyOrder order_for(const Round& round, const Party& party, const std::string& node_id);
  static void add_asides(const Round& round, const std::string& node_id, const Node& node,
                         RoundOrder& order);

  const RoundTiming timing_;
  std::map<std::string, Node> nodes_;  // by id; those with members
  std::map<RoundId, Round> rounds_;
  // Communicators by name, with the devices that met in each, the latest last.
  std::deque<std::pair<std::string, std::vector<std::string>>> communicators_;
  TimePoint next_look_{};
  std::uint64_t epoch_ = 0;
  std::uint64_t last_round_ = 0;
  std::uint64_t last_communicator_ = 0;
  std::uint64_t revision_ = 1;
};

}  // namespace rekindle::coordinator
