#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "recovery/coordinator/core/round_messages.h"

namespace rekindle::coordinator {

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
};

}  // namespace rekindle::coordinator
