#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "proto/device.pb.h"
#include "recovery/device/session.h"

namespace rekindle::device {

// The sessions of a device process, and what its threads have to say to the agent. Control thread
// only, but for post().
class Sessions {
 public:
  explicit Sessions(const Bell& bell) : bell_(bell) {}

  // Any thread: a frame for the agent, which the bell announces.
  void post(proto::DevicesToAgent frame);

  bool contains(std::uint64_t number) const { return sessions_.contains(number); }
  Result<void> begin(SessionOrder order);
  void tell(std::uint64_t number, const bucket::TileRuns& runs, bool complete);
  void end(std::uint64_t number, bool gone);
  // Always answered by SpreadOver, also when nothing comes of it.
  void spread(const proto::BeginSpread& order);
  void stop(std::uint64_t number, std::string why);

  struct Ended {
    std::uint64_t number = 0;
    SessionEnd end;
  };
  struct News {
    std::vector<proto::DevicesToAgent> frames;
    std::vector<Ended> ended;  // after the frames
  };
  News take();
  void bury(std::uint64_t number);
  // Waits for them. Why the device is lost, if one says so.
  std::optional<Error> end_all(const Error& why);

 private:
  struct One {
    std::unique_ptr<Session> session;
    bool in_round = false;
    bool ordered = false;  // to spread
  };
  void say(RoundNews news);
  void refuse(std::uint64_t number, Error why);

  const Bell& bell_;
  std::map<std::uint64_t, One> sessions_;
  std::mutex mutex_;
  // Under mutex_:
  std::vector<proto::DevicesToAgent> frames_;
  std::vector<Ended> ended_;
  std::set<std::uint64_t> spreading_;  // SpreadOver has not come
};

}  // namespace rekindle::device
