#pragma once

#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "src/base/unique_fd.h"
#include "tests/verbs/fake_network.h"

// What the fakes of this directory share; tests have no use for it. Everything is guarded by
// FakeState::mutex; functions here are called with it held unless they say otherwise.
namespace rekindle::transport::verbs {

struct ContextObject;
struct QpObject;
struct MrObject;

struct DeviceObject : ibv_device {
  FakeDevice spec;
  std::string key;
  const void* owner = nullptr;  // the FakeVerbs
  bool removed = false;
  std::uint64_t registered_bytes = 0;
  std::uint32_t next_index = 1;  // of keys: never used again
  std::array<std::uint64_t, static_cast<std::size_t>(FakeCall::kCount)> calls{};
  std::map<std::uint32_t, MrObject*> by_lkey;
  std::map<std::uint32_t, MrObject*> by_rkey;
  std::map<std::uint32_t, struct MwObject*> windows;  // by index (rkey >> 8)
};

// An eventfd that counts what waits in a queue beside it, blocking or not as its user made it.
struct EventDescriptor {
  EventDescriptor();
  void add() const;
  bool take() const;       // as a user reads it: false when non-blocking and empty
  void take_back() const;  // never blocks
  UniqueFd fd;
};

struct ContextObject : ibv_context {
  DeviceObject* owner = nullptr;
  EventDescriptor ready;
  std::deque<ibv_async_event> events;
  std::size_t children = 0;
};

struct PdObject : ibv_pd {
  std::size_t children = 0;
};

struct MrObject : ibv_mr {
  int access = 0;
  std::size_t windows = 0;        // bound to it
  std::uint64_t iova = 0;         // of its first byte, as peers and scatter lists name it
  std::int64_t mapped_lead = -1;  // of a dmabuf: mapped here, this far before `addr`
};

struct MwObject : ibv_mw {
  std::uint32_t key = 0;  // the rkey that is valid while `mr` is set
  MrObject* mr = nullptr;
  QpObject* qp = nullptr;
  std::uint64_t address = 0, bytes = 0;
  unsigned access = 0;
};

struct ChannelObject : ibv_comp_channel {
  EventDescriptor ready;
  std::deque<ibv_cq*> events;
  std::size_t users = 0;
};

struct Completion {
  ibv_wc wc;
  QpObject* qp = nullptr;         // nullptr: destroyed since
  std::uint64_t frees_up_to = 0;  // slots of the send queue
  bool receive = false;
};

struct CqObject : ibv_cq {
  std::deque<Completion> entries;
  bool armed = false, armed_solicited = false;
  bool overrun = false;
  std::size_t users = 0;
  std::uint64_t unacked = 0;  // completion events and async events
};

struct SendRequest {
  std::uint64_t order = 0;     // in the whole network
  std::uint64_t position = 0;  // in its queue
  ibv_send_wr wr;
  std::vector<ibv_sge> sges;
  std::vector<std::byte> inlined;
  bool is_inline = false;
  TimePoint posted, due;
  unsigned rnr_attempts = 0;
};

struct ReceiveRequest {
  std::uint64_t id = 0;
  std::vector<ibv_sge> sges;
};

struct QpObject : ibv_qp {
  DeviceObject* owner = nullptr;
  ibv_qp_cap cap{};
  bool signal_all = false;
  ibv_qp_attr attr{};  // as modify_qp left them
  std::deque<SendRequest> sends;
  std::deque<ReceiveRequest> receives;
  std::uint64_t posted = 0, freed = 0;  // slots of the send queue so far
  std::uint64_t receives_posted = 0, receives_freed = 0;
  std::uint64_t unacked = 0;  // async events
  CqObject& send_queue() const { return *static_cast<CqObject*>(send_cq); }
  CqObject& receive_queue() const { return *static_cast<CqObject*>(recv_cq); }
};

template <typename T>
using Objects = std::unordered_map<const void*, std::unique_ptr<T>>;

struct ScriptedFault {
  FakeCall call;
  FakeFault fault;
  std::uint64_t seen = 0;
};

enum class Delivery { kAtPost, kByHand, kByThread };

struct FakeState {
  mutable std::mutex mutex;
  mutable std::condition_variable changed;

  std::vector<std::unique_ptr<DeviceObject>> devices;
  std::set<ibv_device**> lists;
  Objects<ContextObject> contexts;
  Objects<PdObject> pds;
  Objects<MrObject> mrs;
  Objects<MwObject> mws;
  Objects<ChannelObject> channels;
  Objects<CqObject> cqs;
  Objects<QpObject> qps;
  std::unordered_map<std::uint32_t, QpObject*> by_number;
  std::uint32_t next_number = 0x11;
  std::uint32_t next_address = 1;
  std::uint64_t next_order = 1;

  Delivery delivery = Delivery::kAtPost;
  Duration delay{};
  std::optional<Duration> expire_after;
  std::map<std::uint64_t, QpObject*> heads;  // by the order of the first request of a queue pair
  std::set<std::pair<FakePortId, FakePortId>> cuts;
  std::vector<ScriptedFault> faults;
  std::multiset<std::pair<FakeCall, std::string>> holds;
  std::map<FakeCall, std::size_t> held;
  std::vector<std::string> problems;
  bool stopping = false;
  std::thread thread;

  template <typename T, typename H>
  T* find(Objects<T>& objects, H* handle, const char* call) {
    const auto found = objects.find(handle);
    if (found != objects.end()) return found->second.get();
    problem("{}: the object does not exist (any more)", call);
    return nullptr;
  }
  template <typename... Args>
  void problem(fmt::format_string<Args...> format, Args&&... args) {
    problems.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
};

using Lock = std::unique_lock<std::mutex>;

// fake_network.cc
// Counts the call, waits while its kind is held; errno of a fault scripted for it (or of a removed
// device), else 0. `taken`: see FakeFault.
int begin_call(FakeState& state, Lock& lock, DeviceObject& device, FakeCall call,
               std::size_t* taken = nullptr);
DeviceObject& device_of(FakeState& state, const std::string& key);
void push_event(ContextObject& context, const ibv_async_event& event);
void push_event(FakeState& state, DeviceObject& device, const ibv_async_event& event);
// Of a queue pair or completion queue: nullptr for events of ports and devices.
std::uint64_t* unacked_of(FakeState& state, const ibv_async_event& event);
// As destroying does, until what was got of the object is acknowledged; false: for ever, it seems.
bool wait_acked(FakeState& state, Lock& lock, const std::uint64_t& unacked);
// What no one got yet of an object that goes away.
void drop_events(ContextObject& context, const void* object);

// fake_memory.cc
enum class Rights { kReadLocal, kWriteLocal };
// Where a scatter entry is in this process; nullptr: not allowed.
std::byte* local_address(QpObject& qp, const ibv_sge& entry, Rights rights);
// Where peers of this queue pair may read; nullptr: not allowed.
const std::byte* remote_address(QpObject& qp, std::uint64_t address, std::uint64_t bytes,
                                std::uint32_t rkey);
ibv_wc_status bind_window(FakeState& state, QpObject& qp, const ibv_send_wr& wr);
ibv_wc_status invalidate_window(QpObject& qp, std::uint32_t rkey);
void unbind(MwObject& window);
std::size_t forget_queue_pair(FakeState& state, QpObject& qp);  // its windows end; how many

// fake_completions.cc
void push_completion(FakeState& state, CqObject& cq, Completion completion, bool solicited);

// fake_queue_pairs.cc
int check_modify(const QpObject& qp, const ibv_qp_attr& attr, int mask);
// To ERR: what is outstanding is flushed, if the device does that.
void fail_queue_pair(FakeState& state, QpObject& qp);
void flush(FakeState& state, QpObject& qp);
// By the first request of its send queue.
void update_head(FakeState& state, QpObject& qp);
void remove_head(FakeState& state, QpObject& qp);

// fake_delivery.cc
QpObject* find_peer(FakeState& state, const QpObject& qp);
// Does what can be done of the queue pair's requests, `limit` at most; how many.
std::size_t run_queue_pair(FakeState& state, QpObject& qp, std::size_t limit);
std::size_t run_all(FakeState& state, std::size_t limit);
bool expire_head(FakeState& state, QpObject& qp);
void run_thread(FakeState& state);

}  // namespace rekindle::transport::verbs
