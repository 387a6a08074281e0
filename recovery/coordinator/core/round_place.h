#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/common_pieces.h"
#include "recovery/coordinator/core/types.h"

// Reports of agents on their members of broadcast rounds (docs/internals/rounds.md), and the orders
// that they get. Fields as in proto/coordinator.proto.
namespace rekindle::coordinator {

// The rounds of a later term have higher numbers.
using RoundId = std::uint64_t;

enum class RoundMemberState { kServing, kJoined, kSpreading, kAlone, kFilled, kReady, kFailed };
enum class PartyState { kMeeting, kSpreading, kStopped };

// One phase of a rank, or of a round.
struct PhaseTime {
  std::string name;
  std::uint64_t elapsed_us = 0;
  std::optional<TimePoint> began = {};  // nullopt: not known
};
// One worker of an agent.
struct RoundMember {
  std::uint64_t session = 0;
  std::string group;
  std::string instance;
  std::uint32_t rank = 0;
  ModelVersion id;
  std::string device;
  RoundMemberState state = RoundMemberState::kServing;
  RoundId round = 0;
  Digest root;
  Digest contents;
  std::uint64_t payload_bytes = 0;
  std::uint64_t bucket_bytes = 0;
  bool owner = false;
  bool fetches = false;
  bool takes_pieces = false;
  std::vector<std::string> communicators;
  std::uint64_t spread_bytes = 0;
  std::uint64_t kept_bytes = 0;
  std::string why;
  bool worker_lost = false;
  std::vector<PhaseTime> phases;
};
// The pieces that a member may share with others. nullptr: they are not known, or its agent would
// not carry out an order with pieces.
inline const Pieces* pieces_to_share(const RoundMember& member, const KnownPieces& known) {
  return member.takes_pieces ? known.find(member.contents) : nullptr;
}
struct MeetingId {
  RoundId round = 0;
  std::uint32_t party = 0;
  std::string id;
  std::string problem;
};
struct DescribedContents {
  Digest contents;
  Pieces pieces;
};
struct RoundReport {
  std::string node_id;
  Incarnation incarnation;
  std::string device_life;
  std::vector<RoundMember> members;
  std::vector<MeetingId> ids;
  std::vector<DescribedContents> described;
  std::uint64_t sequence = 0;
  // The agent waits this long for the answer. It does not count as silent meanwhile.
  Duration wait{};
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
  bool owners_fetch = false;
  struct Place {
    std::uint64_t session = 0;
    std::uint32_t rank = 0;
    PieceRuns pieces = {};
  };
  // Those of the node that gets the order.
  std::vector<Place> members;
  std::string why;
};
struct RoundOrder {
  RoundId round = 0;
  ModelVersion id;
  std::string group;
  bool gathering = false;
  std::vector<PartyOrder> parties;
};

// An agent names a worker without an instance after its process.
inline bool is_nameless(std::string_view instance) { return instance.starts_with("pid-"); }

// kExpected: its rank has not attached to the round's version yet. kArrived: it has. The others are
// final once the gathering is over: kReady, kLeftOut (it did not attach in time) and kFailed.
enum class PlaceState { kExpected, kArrived, kReady, kLeftOut, kFailed };
// The broadcast to the device of the place. Only goes forward.
enum class Transfer { kNone, kSpreading, kFilled };

// One rank in one round. Its agent's reports move it from state to state.
struct RoundPlace {
  RoundPlace() = default;
  RoundPlace(const std::string& its_node, const Incarnation& its_incarnation,
             const RoundMember& member);

  bool nameless() const { return is_nameless(instance); }
  bool ready() const { return state == PlaceState::kReady; }
  bool filled() const { return transfer == Transfer::kFilled; }
  // Nothing that happens changes its outcome any more.
  bool settled() const { return state >= PlaceState::kReady; }
  bool is(const RoundMember& member) const {
    return instance == member.instance && rank == member.rank;
  }
  // "rank 1 of i on b".
  std::string to_string() const;
  // Expected, joined, spreading, alone, filled, ready, failed, left out.
  std::string_view state_name() const;

  // During the gathering a rank may come, go and come again. nullptr: it is not there. Returns
  // whether it came, went or became ready.
  bool gather(const RoundMember* member, const std::string& life, const ModelVersion& id);
  void end_gathering(const ModelVersion& id, const Digest& root, Duration gathered);
  // After the gathering its session is the one that takes part. nullptr: it is not reported any
  // more. Returns whether there is any news but progress.
  bool watch(const RoundMember* member, RoundId round);
  // Notes trouble that ends its party. A lost worker does not disturb a device that spreads: the
  // device goes on and discards.
  void watch_device(RoundId round, bool same_device_process);
  // Its node is lost.
  void lose(const std::string& reason);
  // Ignored once it is settled.
  void fail_with(std::string reason);

  std::string node_id;
  Incarnation incarnation;
  std::string instance;
  std::uint32_t rank = 0;
  std::string group;
  // From the last report.
  std::string device;
  std::string device_life;
  PlaceState state = PlaceState::kExpected;
  // The reason of kFailed and kLeftOut.
  std::string why;
  Transfer transfer = Transfer::kNone;
  // The last report of the session that takes part.
  std::optional<RoundMember> last;
  // The session is not reported any more.
  bool gone = false;
  // The reason why it has no party.
  std::string aside;
  // The reason why its party cannot go on with it.
  std::string trouble;
  // From 1; 0: none.
  std::uint32_t party = 0;
  std::uint32_t party_rank = 0;
  // Of its contents, those that the party brings; empty: all.
  PieceRuns pieces;
};

// The names of communicators, with the devices that met in each. Devices that meet again in the
// same order, in the same processes, use theirs again. The latest ones are remembered.
class Communicators {
 public:
  // Returns a name, and whether it is that of a communicator that all of the places keep.
  std::pair<std::string, bool> name_for(const std::vector<const RoundPlace*>& places,
                                        std::uint64_t epoch);
  // Its devices have aborted it.
  void forget(const std::string& name);

 private:
  std::deque<std::pair<std::string, std::vector<std::string>>> known_;
  std::uint64_t last_number_ = 0;
};

// The places of a round that want the same bytes, or have some in common, and receive them by one
// broadcast: first their devices meet in a communicator, then the owners spread. A party ends when
// every rank that still can has every byte of it, or when it is stopped.
struct Party {
  // From 1.
  std::uint32_t number = 0;
  PartyState state = PartyState::kMeeting;
  std::string communicator;
  // The id that the first rank's device process made for the communicator.
  std::string id;
  // Every rank keeps the communicator from an earlier party.
  bool reuses = false;
  // Every rank that still can has every byte.
  bool through = false;
  // Of what it brings to each rank.
  std::uint64_t bytes = 0;
  std::uint64_t bucket_bytes = 0;
  // Indices into the places of the round, in the order of ranks.
  std::vector<std::size_t> ranks;
  // Ranks whose hosts own all of it; if there are none, those whose hosts fetch their shares.
  std::vector<std::uint32_t> owners;
  bool owners_fetch = false;
  // The device process of each rank when it joined.
  std::vector<std::string> lives;
  std::string why;
  TimePoint began{};
  TimePoint last_progress{};

  bool runs() const { return state != PartyState::kStopped && !through; }
  void stop(std::string reason);
  void begin_spreading(const std::string& communicator_id, TimePoint now);
  // Ends it where its ranks or its deadlines say so. `meet`: to make a communicator; `spread`:
  // without any progress.
  void judge(const std::vector<RoundPlace>& places, Duration meet, Duration spread, TimePoint now);
  // The order for one node, without its members.
  PartyOrder order_for(const std::vector<RoundPlace>& places, const std::string& node_id) const;
};

// Names the device wherever it is seen. A GPU's UUID is the same for all agents of its host, and
// NCCL refuses a GPU that is there twice. A double lives in the device process of its node.
std::string device_of(const RoundPlace& place);

}  // namespace rekindle::coordinator
