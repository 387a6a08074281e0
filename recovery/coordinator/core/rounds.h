#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/types.h"

// Broadcast rounds (docs/rounds.md): who takes part, who meets whom, when it is over. Pure.
namespace rekindle::coordinator {

using RoundId = std::uint64_t;  // of one reign above those of earlier ones

enum class RoundMemberState { kServing, kJoined, kSpreading, kAlone, kFilled, kReady, kFailed };
enum class RoundPhase { kGathering, kMeeting, kSpreading, kLoading, kOver };
enum class PartyState { kMeeting, kSpreading, kStopped };
std::string_view to_string(RoundPhase phase);
// Of a place: expected, joined, spreading, alone, filled, ready, failed, left out.
struct RoundPlace;
std::string_view state_name(const RoundPlace& place);

// What an agent says of one of its workers; fields as in proto/coordinator.proto, RoundMember.
struct RoundMember {
  std::uint64_t session = 0;
  std::string group;
  std::string instance;
  std::uint32_t rank = 0;
  ModelVersion id;
  std::string device;
  RoundMemberState state = RoundMemberState::kServing;
  RoundId round = 0;
  Digest128 root;
  Digest128 contents;
  std::uint64_t payload_bytes = 0;
  std::uint64_t bucket_bytes = 0;
  bool owner = false;
  std::vector<std::string> communicators;
  std::uint64_t spread_bytes = 0;
  std::uint64_t kept_bytes = 0;
  std::string why;
  bool worker_lost = false;
};
struct MeetingId {
  RoundId round = 0;
  std::uint32_t party = 0;
  std::string id;
  std::string problem;
};
struct RoundReport {
  std::string node_id;
  Incarnation incarnation;
  std::string device_life;
  std::vector<RoundMember> members;
  std::vector<MeetingId> ids;
  std::uint64_t sequence = 0;
  Duration wait{};  // for its answer: it is not silent meanwhile
};

struct PartyOrder {
  std::uint32_t party = 0;
  PartyState state = PartyState::kMeeting;
  bool make_id = false;
  std::string communicator;
  std::string id;
  std::uint64_t bucket_bytes = 0;
  std::uint32_t ranks = 0;
  std::vector<std::uint32_t> owners;
  struct Place {
    std::uint64_t session = 0;
    std::uint32_t rank = 0;
  };
  std::vector<Place> members;  // of the node that is told
  std::string why;
};
struct RoundOrder {
  RoundId round = 0;
  ModelVersion id;
  std::string group;
  bool gathering = false;
  std::vector<PartyOrder> parties;
};

struct RoundTiming {
  Duration gather = std::chrono::seconds(5);
  Duration meet = std::chrono::seconds(10);
  Duration spread = std::chrono::seconds(30);         // of a party without any progress
  Duration report_silence = std::chrono::seconds(5);  // of a node with members that is alive
  Duration load = std::chrono::minutes(10);           // from the last party's end
  Duration remember = std::chrono::minutes(10);       // a round that is over
};

// What an agent calls a worker without an instance: after its process.
inline bool is_nameless(std::string_view instance) { return instance.starts_with("pid-"); }

// What becomes of one rank in a round.
struct RoundPlace {
  std::string node_id;
  Incarnation incarnation;
  std::string instance;
  std::uint32_t rank = 0;
  std::string group;
  std::string device;               // as last said
  bool arrived = false;             // attached to the round's version in time
  bool left_out = false;            // did not
  bool ready = false;               // and stays so, whatever becomes of it
  std::optional<RoundMember> last;  // as last said, of the session that takes part
  std::string failed;               // why it will not be ready by this round; "" while it may
  std::string aside;                // why it has no party
  std::uint32_t party = 0;          // from 1
  std::uint32_t party_rank = 0;
  bool spreading = false;  // it was
  bool filled = false;     // its device was given every byte
  bool gone = false;       // its session is not reported any more
  std::string trouble;     // why its party cannot go on with it

  bool nameless() const { return is_nameless(instance); }
  bool settled() const { return ready || left_out || !failed.empty(); }
  std::string to_string() const;  // "rank 1 of i on b"
};
struct Party {
  std::uint32_t number = 0;  // from 1
  PartyState state = PartyState::kMeeting;
  std::string communicator;
  std::string id;
  bool reuses = false;   // every rank keeps the communicator
  bool through = false;  // every rank that still can has every byte
  std::uint64_t bucket_bytes = 0;
  std::vector<std::size_t> ranks;     // indices into Round::places, in the order of ranks
  std::vector<std::uint32_t> owners;  // ranks
  std::vector<std::string> lives;     // of each rank: its device process when it joined
  std::string why;
  TimePoint began{};
  TimePoint last_progress{};

  bool runs() const { return state != PartyState::kStopped && !through; }
};
struct Round {
  RoundId number = 0;
  ModelVersion id;
  Digest128 root;
  std::string group;
  RoundPhase phase = RoundPhase::kGathering;
  Duration gather{};
  TimePoint began;
  std::map<RoundPhase, Duration> took;  // of the phases that are past
  TimePoint phase_began;
  std::vector<RoundPlace> places;  // by node
  std::vector<Party> parties;

  bool over() const { return phase == RoundPhase::kOver; }
};

class Rounds {
 public:
  explicit Rounds(RoundTiming timing = {}) : timing_(timing) {}

  // The version is READY and somebody holds all of it: the caller's to see. kNotFound: no member
  // of the group. kUnavailable: a round of this model and group (or of all groups) runs.
  Result<RoundId> begin(const ModelVersion& id, const Digest128& root, const std::string& group,
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
  std::set<std::pair<std::string, std::string>> devices_in_parties() const;
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
