#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "proto/coordinator.pb.h"
#include "recovery/device/order.h"
#include "recovery/worker/core/worker_session.h"
#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/ids.h"

namespace rekindle::worker {

// One session's part in broadcast rounds. Pure. A session of a group is a member from its attach
// on:
//
//   serving ──join──▶ joined ──spread──▶ spreading ──fill──▶ filled ──commit──▶ ready
//                        └──────────────────┴── go_alone ──▶ alone ──commit──▶ ready
//   and leave_round() back to serving; fail() and lose_worker() to failed.
class RoundMember {
 public:
  struct Origin {
    std::string group;
    std::string instance;
    std::uint32_t rank = 0;
    std::string model;
    std::string device;  // "": none
  };
  using State = proto::RoundMemberState;

  explicit RoundMember(Origin origin);

  // The version that the session gets; `round`: the one that may bring it, or 0.
  void choose(const ModelVersion& id, std::uint64_t round);
  void hand_over(const Digest& root) { root_ = root; }
  // The version arrives by another way than a join.
  void take_chosen() { id_ = chosen_; }
  // It has its buckets and waits for its party. `owner`: its host has the whole version in memory.
  void join(const device::DeviceJoined& joined, bool owner);
  void spread() { state_ = proto::ROUND_SPREADING; }
  // True if there is progress.
  bool progress(std::uint64_t bytes);
  // What its device says at the end of the spread.
  void end_spread(const device::SpreadOver& over);
  // Its device was given every byte.
  void fill();
  // It gets the rest of its bytes without the round.
  void go_alone(const std::string& why);
  // Its device has been through the round without the worker. The party is well.
  void lose_worker(const std::string& why);
  void commit();
  // The round is over, or the session does not take part in it.
  void leave_round();

  // --- the end of its session. The member stays for a while, so that the coordinator hears of it.
  // True if its device is in the round, goes on, and discards.
  bool fail(const std::string& why);
  // The device of an ended session is done. A party that has lost only a worker has not failed.
  // False: the device was not in a round.
  bool end_discarding(bool device_failed);
  // It detached to attach to a version that a round gathers for.
  void expect_return() { ended_ = true; }
  void forget_at(TimePoint when) { forget_at_ = when; }

  const Origin& origin() const { return origin_; }
  State state() const { return state_; }
  std::uint64_t round() const { return round_; }
  const ModelVersion& id() const { return id_; }
  bool ended() const { return ended_; }
  bool owner() const { return owner_; }
  // It waits for its buckets, and then for its party.
  bool waits_for_buckets() const { return round_ != 0 && state_ == proto::ROUND_SERVING; }
  // It waits for its party, or is in it.
  bool is_in_party() const {
    return state_ == proto::ROUND_JOINED || state_ == proto::ROUND_SPREADING;
  }
  // The new session of the same rank takes its place.
  bool is_replaced_by(const Origin& newcomer) const;
  bool is_forgotten(TimePoint now) const { return now >= forget_at_; }
  // "joined", "spreading"; "" of one that does not wait for its party.
  std::string_view phase() const;
  // The first report that says that it has joined; 0: none yet.
  std::uint64_t joined_report() const { return joined_report_; }
  proto::RoundMember report(SessionId session, std::uint64_t sequence);

 private:
  void become_ready();

  Origin origin_;
  ModelVersion id_;  // version 0: not chosen, or not here yet by the round
  ModelVersion chosen_;
  State state_ = proto::ROUND_SERVING;
  std::uint64_t round_ = 0;
  Digest root_;
  device::DeviceJoined joined_;
  bool owner_ = false;
  std::uint64_t spread_bytes_ = 0;
  std::uint64_t kept_bytes_ = 0;
  std::string why_;
  bool committed_ = false;
  bool ended_ = false;        // its session has
  bool worker_lost_ = false;  // its device goes on, or has been through, without the worker
  std::uint64_t joined_report_ = 0;
  TimePoint forget_at_ = TimePoint::max();
};

}  // namespace rekindle::worker
