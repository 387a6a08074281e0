#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/round_place.h"

namespace rekindle::coordinator {

enum class RoundPhase { kGathering, kMeeting, kSpreading, kLoading, kOver };
std::string_view to_string(RoundPhase phase);

struct RoundTiming {
  Duration gather = std::chrono::seconds(5);
  Duration meet = std::chrono::seconds(10);
  // For a party without any progress.
  Duration spread = std::chrono::seconds(30);
  // A live node with members is lost after this long without a report.
  Duration report_silence = std::chrono::seconds(5);
  // From the end of the last party.
  Duration load = std::chrono::minutes(10);
  // A round that is over is remembered for this long.
  Duration remember = std::chrono::minutes(10);
};

// How a round gathers its workers: those that are known at its start, and as many as `members`.
struct Gathering {
  // nullopt: as RoundTiming says.
  std::optional<Duration> longest;
  std::uint32_t members = 0;
};

// The last report of a node with members.
struct RoundNode {
  Incarnation incarnation;
  std::uint64_t sequence = 0;
  std::string device_life;
  std::vector<RoundMember> members;
  // Or the end of its wait for an answer.
  TimePoint last_heard;
};

// One broadcast round: it gathers the ranks of a group that attach to the version, forms parties,
// follows their spread, and is over when each place is ready or has failed.
class Round {
 public:
  struct Begin {
    RoundId number = 0;
    ModelVersion id;
    Digest root;
    // "": every group.
    std::string group;
    Duration gather{};
    std::uint32_t members = 0;
    std::uint64_t epoch = 0;
  };
  Round(Begin begin, TimePoint now);

  // Expects each rank of the node that is attached with the model and a group of the round.
  void expect(const std::string& node_id, const RoundNode& node);
  // Takes a report. Returns whether the round may have to move on because of it.
  bool follow(const std::string& node_id, const RoundNode& node, TimePoint now);
  // Takes the phases that its members report after its end. Returns whether there are any new ones.
  bool take_phases(const std::string& node_id, const RoundNode& node);
  // The node is lost. Returns whether that concerns the round.
  bool lose(const std::string& node_id, const Incarnation& incarnation, const std::string& why);
  // The first rank of a party reports the communicator's id, or the reason why there is none.
  // Returns whether it was asked for it.
  bool take_id(const RoundReport& report, const MeetingId& meeting, TimePoint now);
  bool gathering_is_over(TimePoint now) const;
  // Forms the parties. A device in `busy` is in a party of another round.
  void end_gathering(std::set<std::string> busy, const KnownPieces& known,
                     Communicators& communicators, TimePoint now);
  // Goes from phase to phase, as far as the reports and the deadlines allow.
  void move_on(const RoundTiming& timing, Communicators& communicators, TimePoint now);
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);

  // Returns whether the node takes part in the round, and fills `order` if it does.
  bool order_for(const std::string& node_id, const RoundNode& node, RoundOrder& order) const;
  bool concerns(const RoundMember& member) const;
  // Copies that hosts fill with their shares, or may have to, until the spread is over.
  std::size_t copies_that_share() const;
  // Devices that are in a running party.
  void add_busy_devices(std::set<std::string>& busy) const;
  // The number of changes since the last call: the orders of a node may have changed, or the round
  // has ended.
  std::uint64_t take_changes() { return std::exchange(changes_, 0); }

  RoundId number() const { return begin_.number; }
  const ModelVersion& id() const { return begin_.id; }
  const std::string& group() const { return begin_.group; }
  RoundPhase phase() const { return phase_; }
  bool over() const { return phase_ == RoundPhase::kOver; }
  TimePoint phase_began() const { return phase_began_; }
  // Of the phases that are past.
  const std::map<RoundPhase, Duration>& took() const { return took_; }
  // By node.
  const std::vector<RoundPlace>& places() const { return places_; }
  const std::vector<Party>& parties() const { return parties_; }

 private:
  std::span<RoundPlace> places_of(const std::string& node_id);
  std::span<const RoundPlace> places_of(const std::string& node_id) const;
  const RoundMember* find_member(const RoundPlace& place, const RoundNode& node) const;
  bool admit(const std::string& node_id, const RoundNode& node);
  bool watch(RoundPlace& place, const RoundNode& node, TimePoint now);
  // A place that may be in a party, which brings it these pieces; empty: all.
  struct Seat {
    std::size_t place = 0;
    PieceRuns pieces = {};
  };
  // What the parties that are being formed have to know.
  struct Forming {
    std::set<std::string> busy;
    Communicators& communicators;
    TimePoint now;
  };
  void form_party(std::vector<Seat> seats, std::uint64_t bytes, Forming& forming);
  void form_common_parties(std::vector<std::size_t> lonely, const KnownPieces& known,
                           Forming& forming);
  void give_up_mates();
  void enter(RoundPhase phase, TimePoint now);
  bool is_left_behind(const RoundPlace& place, const RoundNode& node) const;
  void add_asides(const std::string& node_id, const RoundNode& node, RoundOrder& order) const;

  const Begin begin_;
  RoundPhase phase_ = RoundPhase::kGathering;
  TimePoint phase_began_;
  std::map<RoundPhase, Duration> took_;
  std::vector<RoundPlace> places_;
  std::vector<Party> parties_;
  std::uint64_t changes_ = 0;
};

}  // namespace rekindle::coordinator
