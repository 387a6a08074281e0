#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <infiniband/verbs.h>

#include "src/base/clock.h"

// What connects the fake devices of one test, and the script of what goes wrong there. Devices
// belong to a FakeVerbs (one per host), queue pairs find each other by address and number. Data
// moves by memcpy inside this process. Thread-safe: one mutex.
//
// Modelled after what devices do, in its harshest form: a slot of a send queue is free again when a
// completion of it or of a later request was polled; an armed queue tells of new completions only;
// what is sent to a wrong address, number, PSN or with too large a path MTU is lost in silence.
// Not modelled: writes, atomics, UD, SRQ, packets (a request is done at once or not at all).
namespace rekindle::transport::verbs {

struct FakeState;

struct FakeGid {
  std::uint32_t index = 0;
  std::array<std::uint8_t, 16> bytes{};
  ibv_gid_type type = IBV_GID_TYPE_ROCE_V2;
};
FakeGid ipv4_gid(std::uint32_t index, std::array<std::uint8_t, 4> address, ibv_gid_type type);

struct FakePort {
  ibv_port_state state = IBV_PORT_ACTIVE;
  bool infiniband = false;
  // Given by the network where they are empty: a LID and the default GID, or RoCE v1 and v2 GIDs of
  // a link-local and of an IPv4 address, as Linux lists them.
  std::uint16_t lid = 0;
  std::vector<FakeGid> gids;
  ibv_mtu max_mtu = IBV_MTU_4096;
  ibv_mtu active_mtu = IBV_MTU_4096;
  std::uint8_t width = 2;   // 4X
  std::uint8_t speed = 64;  // HDR
  std::uint32_t max_message_bytes = std::uint32_t{1} << 30;
};

ibv_device_attr fake_device_attr();  // of a large NIC, with memory windows 2B

struct FakeDevice {
  std::string name;
  std::vector<FakePort> ports{FakePort{}};
  ibv_device_attr attr = fake_device_attr();
  std::uint64_t max_registered_bytes = 0;  // reg_mr fails with ENOMEM beyond; 0: no limit
  bool takes_read_only = true;             // reg_mr of a read-only mapping; else EFAULT
  bool takes_relaxed_ordering = true;      // else EINVAL
  bool pins_pages = true;                  // reg_mr fails with EFAULT where there are no pages
  bool flushes = true;  // false: queue pairs complete nothing after ERR, until this is true again
};

enum class FakeCall : std::uint8_t {
  kOpenDevice,
  kQueryDevice,
  kQueryPort,
  kQueryGidTable,
  kAllocPd,
  kRegMr,
  kRegDmabufMr,
  kDeregMr,
  kAllocMw,
  kDeallocMw,
  kCreateCompChannel,
  kCreateCq,
  kDestroyCq,
  kReqNotifyCq,
  kGetCqEvent,
  kPollCq,
  kCreateQp,
  kModifyQp,
  kDestroyQp,
  kPostSend,
  kPostRecv,
  kGetAsyncEvent,
  kCount,
};

struct FakeFault {
  int error = 0;            // errno; of poll_cq: any
  std::uint64_t nth = 1;    // from now on; 1 is the next call
  std::uint64_t count = 1;  // so many in a row
  std::string device;       // "" = any; each call counts once
  // post_send and post_recv: so many requests of the call are taken before the one that fails.
  std::size_t taken = 0;
};

// A device as its FakeVerbs::add_device() returned it, and its port.
struct FakePortId {
  std::string device;
  std::uint8_t port = 1;
  auto operator<=>(const FakePortId&) const = default;
};

class FakeNetwork {
 public:
  FakeNetwork();
  // Fails the test for each handle that is left and each problem not taken.
  ~FakeNetwork();
  FakeNetwork(const FakeNetwork&) = delete;
  FakeNetwork& operator=(const FakeNetwork&) = delete;

  // When requests are done: inside the call that posts them (the default), when deliver() says so,
  // or by a thread this much later. RNR retries are counted by attempts, not by time.
  void deliver_at_post();
  void deliver_by_hand();
  // `expire_after`: a request that no one answers is given up by itself; nullopt: by expire() only.
  void deliver_by_thread(Duration delay, std::optional<Duration> expire_after = std::nullopt);
  // At most so many requests, in the order of posting as far as queue pairs are not stuck; how many
  // were done. Any mode.
  std::size_t deliver(std::size_t requests = SIZE_MAX);
  // Each queue pair whose first request finds no answer now gets IBV_WC_RETRY_EXC_ERR; how many.
  std::size_t expire();
  std::size_t in_flight() const;  // requests posted and not done or flushed

  // Packets between two ports get lost (both ways), without an event.
  void cut(const FakePortId& a, const FakePortId& b);
  void join(const FakePortId& a, const FakePortId& b);
  // `event` false: it happens, but the event is lost.
  void set_port_state(const FakePortId& port, ibv_port_state state, bool event = true);
  void set_gids(const FakePortId& port, std::vector<FakeGid> gids, bool event = true);
  void inject(const std::string& device, ibv_event_type type, std::uint8_t port = 1);
  // Gone: IBV_EVENT_DEVICE_FATAL, its queue pairs fail, what is called on it from now on fails with
  // EIO, but destroying works.
  void remove_device(const std::string& device);

  // Limits, ports and habits, at any time; no event.
  void change(const std::string& device, const std::function<void(FakeDevice&)>& change);
  FakeDevice spec(const std::string& device) const;

  void fail_call(FakeCall call, FakeFault fault);
  // Calls of this kind on this device ("" = any) wait until let_go().
  void hold(FakeCall call, const std::string& device = "");
  void let_go(FakeCall call, const std::string& device = "");
  bool wait_held(FakeCall call, std::size_t calls, TimePoint deadline) const;  // false: not by then

  std::uint64_t calls(FakeCall call, const std::string& device = "") const;  // also failed ones
  std::uint64_t registered_bytes(const std::string& device) const;
  std::size_t registrations(const std::string& device) const;
  std::size_t windows(const std::string& device) const;
  std::size_t queue_pairs(const std::string& device) const;
  // Access flags of each live registration, in the order they were made.
  std::vector<int> access_flags(const std::string& device) const;

  // What was done wrong so far, in words (a region deregistered under a READ, a handle used after
  // it was destroyed, events not acknowledged); the test takes the blame off the caller.
  std::vector<std::string> take_problems();

  FakeState& state() const { return *state_; }  // for FakeVerbs

 private:
  std::unique_ptr<FakeState> state_;
};

}  // namespace rekindle::transport::verbs
