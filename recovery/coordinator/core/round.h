#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "recovery/coordinator/core/round_messages.h"

// One broadcast round, its places and its parties: values, which Rounds changes.
namespace rekindle::coordinator {

enum class RoundPhase { kGathering, kMeeting, kSpreading, kLoading, kOver };
std::string_view to_string(RoundPhase phase);

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
// Expected, joined, spreading, alone, filled, ready, failed, left out.
std::string_view state_name(const RoundPlace& place);

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
  Digest root;
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

}  // namespace rekindle::coordinator
