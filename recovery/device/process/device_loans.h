#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "recovery/device/process/host_devices.h"
#include "src/bucket/helped_upload.h"

namespace rekindle::device {

// Which devices of this host have sessions, and which help a session of another device. Outlives
// the loans and the uses. Thread-safe.
class DeviceLoans {
 public:
  using Loans = std::vector<std::unique_ptr<bucket::Loan>>;
  // A session of a device. While it lives, nobody borrows the device.
  class Use {
   public:
    Use(DeviceLoans& loans, std::string id) : loans_(loans), id_(std::move(id)) {}
    ~Use() { loans_.end_use(id_); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    DeviceLoans& loans_;
    const std::string id_;
  };

  // A session has at most `most` helpers.
  DeviceLoans(const Devices& devices, std::uint32_t most) : devices_(devices), most_(most) {}
  DeviceLoans(const DeviceLoans&) = delete;
  DeviceLoans& operator=(const DeviceLoans&) = delete;

  // A loan of this device is wanted back from now on.
  std::unique_ptr<Use> use(const std::string& id);
  // All devices that are open, and without a session or a loan: some may be of no help. `wanted` is
  // called, on any thread, when one of them is wanted back. It must not call this object.
  Loans borrow(const std::string& borrower, const std::function<void()>& wanted);
  std::size_t most() const { return most_; }

 private:
  class Lent;
  struct State {
    std::uint32_t uses = 0;
    bool condemned = false;
    // Null: it is not lent.
    std::function<void()> wanted;
  };
  void end_use(const std::string& id);

  const Devices& devices_;
  const std::uint32_t most_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::map<std::string, State> states_;
};

}  // namespace rekindle::device
