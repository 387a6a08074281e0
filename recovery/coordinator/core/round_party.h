#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/round_place.h"

namespace rekindle::coordinator {

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

// The places of a round that want the same bytes and receive them by one broadcast: first their
// devices meet in a communicator, then the owners spread. A party ends when every rank that still
// can has every byte, or when it is stopped.
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
  std::uint64_t bucket_bytes = 0;
  // Indices into the places of the round, in the order of ranks.
  std::vector<std::size_t> ranks;
  // Ranks whose hosts own all of it.
  std::vector<std::uint32_t> owners;
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
