#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "proto/coordinator.pb.h"
#include "recovery/device/device_order.h"
#include "recovery/device/order.h"
#include "recovery/worker/core/session.h"
#include "recovery/worker/core/worker_session.h"
#include "recovery/worker/known_rounds.h"
#include "recovery/worker/round_member.h"
#include "src/base/clock.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"

namespace rekindle::worker {

// What follows from rounds for the sessions here. The receiver carries it out at once.
class RoundEffects {
 public:
  virtual ~RoundEffects() = default;
  virtual void spread(const device::SpreadOrder& order) = 0;
  virtual void stop_spread(SessionId session, const std::string& why) = 0;
  virtual void make_meeting_id(std::uint64_t number) = 0;
  // The round brings this session nothing more. `all`: it was given every byte. Otherwise `why`
  // not.
  virtual void left_round(SessionId session, bool all, const std::string& why) = 0;
};

struct RoundTimes {
  // Without an answer of the coordinator for so long, members go on alone.
  std::chrono::milliseconds coordinator{10'000};
  std::chrono::milliseconds remember{5000};  // members whose session has ended
  // A rank whose worker is gone, in its party.
  std::chrono::milliseconds discard{60'000};
  std::chrono::milliseconds progress{200};  // between reports of progress alone
};

// The members of broadcast rounds on this host (docs/rounds.md): the sessions with a group. Turns
// the coordinator's orders, and the events of sessions and of the device process, into effects.
// Pure. Control thread only.
class Rounds {
 public:
  using Origin = RoundMember::Origin;

  explicit Rounds(RoundEffects& effects, RoundTimes times = {})
      : effects_(effects), times_(times) {}

  // --- sessions; those without a group are unknown here, and change nothing
  void attach(SessionId session, Origin origin);
  // The session gets this version. True: a round gathers for it, and may bring it.
  bool choose(SessionId session, const ModelVersion& id);
  // Just before the hand-over: whether the session waits for its party on its device.
  bool enters(SessionId session);
  // After the hand-over. `alone`: why it gets no buckets of a round.
  void hand_over(SessionId session, const Digest& root, std::optional<std::string> alone);
  void commit(SessionId session);
  void fail(SessionId session, const std::string& why, TimePoint now);
  void detach(SessionId session, TimePoint now);

  // --- the device process. `owner`: this host has the whole version in memory.
  void joined(const device::DeviceJoined& joined, bool owner);
  void progress(SessionId session, std::uint64_t bytes);
  void spread_over(const device::SpreadOver& over, TimePoint now);
  void device_over(const device::DeviceOver& over, TimePoint now);
  void meeting_id(std::uint64_t number, const Result<std::string>& id);

  // --- the coordinator
  proto::RoundReport report(const std::string& device_life, std::chrono::milliseconds wait,
                            TimePoint now);
  // The answer to report number `sequence`.
  void obey(const proto::RoundOrders& orders, std::uint64_t sequence, TimePoint now);
  void unanswered() { known_.unanswered(); }
  void forget_orders();
  // Members do not hear of this version any more.
  void retired(const ModelVersion& id) { known_.retired(id); }
  // When there is something to report beside a question that waits; nullopt: nothing.
  std::optional<TimePoint> due() const;
  // Applies deadlines.
  void check(TimePoint now);

  bool has_members() const { return !members_.empty(); }
  bool is_member(SessionId session) const { return members_.contains(session); }
  const KnownRounds& known() const { return known_; }
  // The version that a session of a group, which has `have`, moves to.
  std::optional<std::uint64_t> news_for(SessionId session, const ModelVersion& have) const;
  // "joined", "spreading"; "" of a session that does not wait for its party.
  std::string_view phase_of(SessionId session) const;

 private:
  using PartyKey = std::pair<std::uint64_t, std::uint32_t>;  // round, party
  // An id that the device process makes for a party to meet by.
  struct Meeting {
    std::uint64_t number = 0;
    std::optional<Result<std::string>> id;
  };

  RoundMember* find(SessionId session);
  const RoundMember* find(SessionId session) const;
  void go_alone(SessionId session, RoundMember& member, const std::string& why);
  void fill(SessionId session, RoundMember& member);
  void end_discarding(RoundMember& member, bool device_failed, TimePoint now);
  void obey_party(std::uint64_t round, const proto::PartyOrder& party, TimePoint now);
  void spread(SessionId session, RoundMember& member, const proto::PartyOrder& party,
              std::uint32_t rank);
  std::vector<std::uint32_t> keepers_of(const proto::PartyOrder& party) const;
  void stop(SessionId session, RoundMember& member, const std::string& why, TimePoint now);
  void leave_ended_rounds(const std::string& why);

  RoundEffects& effects_;
  const RoundTimes times_;
  KnownRounds known_;
  std::map<SessionId, RoundMember> members_;
  std::map<PartyKey, Meeting> meetings_;  // ids that were asked for
  std::uint64_t sequence_ = 0;            // of the last report
  std::uint64_t last_meeting_ = 0;
  bool changed_ = false;
  bool progressed_ = false;
  TimePoint reported_at_{};
};

}  // namespace rekindle::worker
