#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recovery/coordinator/core/types.h"

// What agents say of their members of broadcast rounds (docs/rounds.md), and what they are told;
// fields as in proto/coordinator.proto.
namespace rekindle::coordinator {

using RoundId = std::uint64_t;  // those of a later term are higher

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

}  // namespace rekindle::coordinator
