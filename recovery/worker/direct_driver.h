#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/pull/direct_reads.h"
#include "recovery/worker/agent_host.h"
#include "recovery/worker/core/worker_session.h"
#include "src/async/task.h"
#include "src/async/task_group.h"

namespace rekindle::worker {

// What direct reads lead to.
class DirectSessions {
 public:
  virtual ~DirectSessions() = default;
  // No NIC brings the session more. `all`: its worker was handed every byte, verified on the
  // device.
  virtual void left_direct(SessionId session, bool all, const std::string& why) = 0;
};

// Carries out the direct reads of the sessions here (docs/internals/devices.md): brings together
// the slots that the device process offers, the rails near their GPU, and the pull that reads into
// them. Control thread only.
class DirectDriver {
 public:
  // All references outlive this.
  DirectDriver(CopyHost& copies, DeviceHost& devices, DirectSessions& sessions,
               async::TaskGroup& tasks, boost::asio::any_io_executor executor);

  // A session on this device attaches. Null: NICs cannot write to its device.
  std::shared_ptr<pull::DirectReads> begin(SessionId session, const std::string& device);
  // The session gets its device process. `attached`: as in DeviceOrder.
  void hand_over(SessionId session, std::string attached);
  // The session is served another way, or has ended.
  void end(SessionId session, const std::string& why);

  // --- the device process
  void slots_offered(device::SlotsOffered offered);
  void bucket_wanted(const device::BucketWanted& wanted);
  void reads_ended(const device::ReadsEnded& ended);
  void device_over(SessionId session);

 private:
  struct Entry {
    std::shared_ptr<pull::DirectReads> reads;
    // Of the rails near the device.
    std::vector<std::string> homes;
    std::string attached;
  };
  async::Task<void> land(device::SlotsOffered offered);
  void over(SessionId session, const std::string& why);

  CopyHost& copies_;
  DeviceHost& devices_;
  DirectSessions& sessions_;
  async::TaskGroup& tasks_;
  const boost::asio::any_io_executor executor_;
  // Until their reads are over. The device process may speak of others, too, and is told so.
  std::map<SessionId, Entry> entries_;
};

}  // namespace rekindle::worker
