#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recovery/coordinator/core/types.h"

// Reports of agents on their members of broadcast rounds (docs/internals/rounds.md), and the orders
// that they get. Fields as in proto/coordinator.proto.
namespace rekindle::coordinator {

// The rounds of a later term have higher numbers.
using RoundId = std::uint64_t;

enum class RoundMemberState { kServing, kJoined, kSpreading, kAlone, kFilled, kReady, kFailed };
enum class PartyState { kMeeting, kSpreading, kStopped };

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
  struct Place {
    std::uint64_t session = 0;
    std::uint32_t rank = 0;
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

}  // namespace rekindle::coordinator
