#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "src/base/clock.h"

namespace rekindle::device {

// What the agent has ordered of the device process and still expects: the ends of sessions and of
// rounds, ids for meetings. It also keeps the leases of the sessions on the store. It only
// decides; DeviceLink performs.
class DeviceLedger {
 public:
  // `lent` is kept until the device process has let go of it, also after end().
  void begin(std::uint64_t session, std::shared_ptr<const void> lent);
  // The session was begun, and neither side has ended it.
  bool is_open(std::uint64_t session) const;
  std::size_t open_sessions() const;
  // The agent ends the session. False: it is not open.
  bool end(std::uint64_t session);
  // The device process has ended the session. A lost device may still use what it was lent. Returns
  // whether the session was open.
  bool over(std::uint64_t session, bool device_lost);

  void spread(std::uint64_t session);
  // The session was told to spread, and the end of that is still to come. It outlasts end().
  bool is_spreading(std::uint64_t session) const;
  // False: the session has nothing to stop.
  bool stop(std::uint64_t session, TimePoint now);
  // False: the session was not spreading.
  bool spread_over(std::uint64_t session);
  // Whether a session was told to stop more than `limit` ago and has not done so.
  bool overdue(TimePoint now, std::chrono::milliseconds limit) const;
  // The agent itself did not run for a while: the limits begin again.
  void excuse(TimePoint now);

  void ask_for_id(std::uint64_t number) { ids_.insert(number); }
  // False: nobody asked for it.
  bool id_made(std::uint64_t number) { return ids_.erase(number) > 0; }

  struct Lost {
    std::vector<std::uint64_t> spreads;
    std::vector<std::uint64_t> sessions;
    std::vector<std::uint64_t> ids;
  };
  // The process serves no more: everything that was expected of it. What was lent stays lent.
  Lost lose_all();
  // The process was reaped: neither it nor its GPU uses anything any more.
  void reaped();

 private:
  enum class Spread { kNone, kOrdered, kStopping };
  struct Entry {
    bool open = false;
    Spread spread = Spread::kNone;
    // Of kStopping.
    TimePoint stopped_at{};
    std::shared_ptr<const void> lent;
  };
  const Entry* find(std::uint64_t session) const;
  void forget_if_done(std::uint64_t session);

  std::map<std::uint64_t, Entry> entries_;
  std::set<std::uint64_t> ids_;
};

}  // namespace rekindle::device
