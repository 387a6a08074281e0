#include "tests/verbs/fake_network.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/verbs/fake_state.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::size_t index_of(FakeCall call) { return static_cast<std::size_t>(call); }

ibv_async_event port_event(ibv_event_type type, std::uint8_t port) {
  ibv_async_event event{};
  event.event_type = type;
  event.element.port_num = port;
  return event;
}

FakePort& port_of(FakeState& state, const FakePortId& id) {
  auto& ports = device_of(state, id.device).spec.ports;
  if (id.port == 0 || id.port > ports.size()) {
    throw std::invalid_argument(fmt::format("fake {} has no port {}", id.device, id.port));
  }
  return ports[id.port - 1u];
}

bool is_held(const FakeState& state, FakeCall call, const DeviceObject& device) {
  return state.holds.contains({call, ""}) || state.holds.contains({call, device.key});
}

// What was posted while the network could not carry it is tried again.
void retry(FakeState& state) {
  state.changed.notify_all();
  if (state.delivery == Delivery::kAtPost) run_all(state, SIZE_MAX);
}

template <typename T>
void count_leaks(std::vector<std::string>& problems, const Objects<T>& objects, const char* what) {
  if (objects.empty()) return;
  problems.push_back(fmt::format("{} {} not destroyed", objects.size(), what));
}

std::vector<std::string> leaks_of(const FakeState& state) {
  std::vector<std::string> leaks;
  if (!state.lists.empty()) leaks.emplace_back("a device list was not freed");
  count_leaks(leaks, state.contexts, "device contexts");
  count_leaks(leaks, state.pds, "protection domains");
  count_leaks(leaks, state.mrs, "memory regions");
  count_leaks(leaks, state.mws, "memory windows");
  count_leaks(leaks, state.channels, "completion channels");
  count_leaks(leaks, state.cqs, "completion queues");
  count_leaks(leaks, state.qps, "queue pairs");
  return leaks;
}

}  // namespace

FakeGid ipv4_gid(std::uint32_t index, std::array<std::uint8_t, 4> address, ibv_gid_type type) {
  FakeGid gid{.index = index, .bytes = {}, .type = type};
  gid.bytes[10] = gid.bytes[11] = 0xff;
  std::copy(address.begin(), address.end(), gid.bytes.begin() + 12);
  return gid;
}

ibv_device_attr fake_device_attr() {
  ibv_device_attr attr{};
  attr.max_mr_size = ~std::uint64_t{0};
  attr.page_size_cap = ~std::uint64_t{0xfff};
  attr.max_qp = 1 << 17;
  attr.max_qp_wr = 1 << 15;
  attr.device_cap_flags = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
  attr.max_sge = attr.max_sge_rd = 30;
  attr.max_cq = 1 << 24;
  attr.max_cqe = (1 << 22) - 1;
  attr.max_mr = attr.max_mw = attr.max_pd = 1 << 24;
  attr.max_qp_rd_atom = attr.max_qp_init_rd_atom = 16;
  attr.max_pkeys = 128;
  attr.phys_port_cnt = 1;
  return attr;
}

FakeNetwork::FakeNetwork() : state_(std::make_unique<FakeState>()) {
  state_->thread = std::thread([state = state_.get()] { run_thread(*state); });
}

FakeNetwork::~FakeNetwork() {
  {
    const Lock lock(state_->mutex);
    state_->stopping = true;
    state_->changed.notify_all();
  }
  state_->thread.join();
  for (const std::string& problem : state_->problems) ADD_FAILURE() << "fake verbs: " << problem;
  for (const std::string& leak : leaks_of(*state_)) ADD_FAILURE() << "fake verbs: leak: " << leak;
}

void FakeNetwork::deliver_at_post() {
  const Lock lock(state_->mutex);
  state_->delivery = Delivery::kAtPost;
  retry(*state_);
}

void FakeNetwork::deliver_by_hand() {
  const Lock lock(state_->mutex);
  state_->delivery = Delivery::kByHand;
}

void FakeNetwork::deliver_by_thread(Duration delay, std::optional<Duration> expire_after) {
  const Lock lock(state_->mutex);
  state_->delivery = Delivery::kByThread;
  state_->delay = delay;
  state_->expire_after = expire_after;
  state_->changed.notify_all();
}

std::size_t FakeNetwork::deliver(std::size_t requests) {
  const Lock lock(state_->mutex);
  return run_all(*state_, requests);
}

std::size_t FakeNetwork::expire() {
  const Lock lock(state_->mutex);
  std::vector<QpObject*> waiting;
  for (const auto& [order, qp] : state_->heads) waiting.push_back(qp);
  std::size_t expired = 0;
  for (QpObject* qp : waiting) expired += expire_head(*state_, *qp) ? 1 : 0;
  return expired;
}

std::size_t FakeNetwork::in_flight() const {
  const Lock lock(state_->mutex);
  std::size_t count = 0;
  for (const auto& [handle, qp] : state_->qps) count += qp->sends.size();
  return count;
}

void FakeNetwork::cut(const FakePortId& a, const FakePortId& b) {
  const Lock lock(state_->mutex);
  port_of(*state_, a);
  port_of(*state_, b);
  state_->cuts.insert({std::min(a, b), std::max(a, b)});
}

void FakeNetwork::join(const FakePortId& a, const FakePortId& b) {
  const Lock lock(state_->mutex);
  state_->cuts.erase({std::min(a, b), std::max(a, b)});
  retry(*state_);
}

void FakeNetwork::set_port_state(const FakePortId& id, ibv_port_state port_state, bool event) {
  const Lock lock(state_->mutex);
  port_of(*state_, id).state = port_state;
  if (event) {
    const bool up = port_state == IBV_PORT_ACTIVE;
    push_event(*state_, device_of(*state_, id.device),
               port_event(up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, id.port));
  }
  retry(*state_);
}

void FakeNetwork::set_gids(const FakePortId& id, std::vector<FakeGid> gids, bool event) {
  const Lock lock(state_->mutex);
  port_of(*state_, id).gids = std::move(gids);
  if (event) {
    push_event(*state_, device_of(*state_, id.device), port_event(IBV_EVENT_GID_CHANGE, id.port));
  }
  retry(*state_);
}

void FakeNetwork::inject(const std::string& device, ibv_event_type type, std::uint8_t port) {
  const Lock lock(state_->mutex);
  push_event(*state_, device_of(*state_, device), port_event(type, port));
}

void FakeNetwork::remove_device(const std::string& device_key) {
  const Lock lock(state_->mutex);
  DeviceObject& device = device_of(*state_, device_key);
  device.removed = true;
  push_event(*state_, device, port_event(IBV_EVENT_DEVICE_FATAL, 1));
  for (const auto& [handle, qp] : state_->qps) {
    if (qp->owner == &device) fail_queue_pair(*state_, *qp);
  }
}

void FakeNetwork::change(const std::string& device_key,
                         const std::function<void(FakeDevice&)>& body) {
  const Lock lock(state_->mutex);
  DeviceObject& device = device_of(*state_, device_key);
  const bool flushed = device.spec.flushes;
  body(device.spec);
  if (!flushed && device.spec.flushes) {
    for (const auto& [handle, qp] : state_->qps) {
      if (qp->owner == &device && qp->ibv_qp::state == IBV_QPS_ERR) flush(*state_, *qp);
    }
  }
  retry(*state_);
}

FakeDevice FakeNetwork::spec(const std::string& device) const {
  const Lock lock(state_->mutex);
  return device_of(*state_, device).spec;
}

void FakeNetwork::fail_call(FakeCall call, FakeFault fault) {
  const Lock lock(state_->mutex);
  state_->faults.push_back({.call = call, .fault = std::move(fault)});
}

void FakeNetwork::hold(FakeCall call, const std::string& device) {
  const Lock lock(state_->mutex);
  state_->holds.insert({call, device});
}

void FakeNetwork::let_go(FakeCall call, const std::string& device) {
  const Lock lock(state_->mutex);
  if (const auto at = state_->holds.find({call, device}); at != state_->holds.end()) {
    state_->holds.erase(at);
  }
  state_->changed.notify_all();
}

bool FakeNetwork::wait_held(FakeCall call, std::size_t count, TimePoint deadline) const {
  Lock lock(state_->mutex);
  return state_->changed.wait_until(lock, deadline, [&] { return state_->held[call] >= count; });
}

std::uint64_t FakeNetwork::calls(FakeCall call, const std::string& device_key) const {
  const Lock lock(state_->mutex);
  std::uint64_t count = 0;
  for (const auto& device : state_->devices) {
    if (device_key.empty() || device->key == device_key) count += device->calls[index_of(call)];
  }
  return count;
}

std::uint64_t FakeNetwork::registered_bytes(const std::string& device) const {
  const Lock lock(state_->mutex);
  return device_of(*state_, device).registered_bytes;
}

std::size_t FakeNetwork::registrations(const std::string& device) const {
  const Lock lock(state_->mutex);
  return device_of(*state_, device).by_lkey.size();
}

std::size_t FakeNetwork::windows(const std::string& device) const {
  const Lock lock(state_->mutex);
  return device_of(*state_, device).windows.size();
}

std::size_t FakeNetwork::queue_pairs(const std::string& device_key) const {
  const Lock lock(state_->mutex);
  const DeviceObject& device = device_of(*state_, device_key);
  return static_cast<std::size_t>(
      std::count_if(state_->qps.begin(), state_->qps.end(),
                    [&](const auto& qp) { return qp.second->owner == &device; }));
}

std::vector<int> FakeNetwork::access_flags(const std::string& device) const {
  const Lock lock(state_->mutex);
  std::vector<int> flags;
  for (const auto& [key, mr] : device_of(*state_, device).by_lkey) flags.push_back(mr->access);
  return flags;
}

std::vector<std::string> FakeNetwork::take_problems() {
  const Lock lock(state_->mutex);
  return std::exchange(state_->problems, {});
}

int begin_call(FakeState& state, Lock& lock, DeviceObject& device, FakeCall call,
               std::size_t* taken) {
  ++device.calls[index_of(call)];
  if (is_held(state, call, device)) {
    ++state.held[call];
    state.changed.notify_all();
    state.changed.wait(lock, [&] { return !is_held(state, call, device); });
    --state.held[call];
  }
  int error = 0;
  for (ScriptedFault& scripted : state.faults) {
    const FakeFault& fault = scripted.fault;
    if (scripted.call != call || (!fault.device.empty() && fault.device != device.key)) continue;
    const std::uint64_t number = ++scripted.seen;
    if (error != 0 || number < fault.nth || number - fault.nth >= fault.count) continue;
    error = fault.error;
    if (taken != nullptr) *taken = fault.taken;
  }
  if (error == 0 && device.removed) error = EIO;
  return error;
}

bool wait_acked(FakeState& state, Lock& lock, const std::uint64_t& unacked) {
  constexpr std::chrono::seconds kPatience{1};
  return state.changed.wait_for(lock, kPatience, [&] { return unacked == 0; });
}

DeviceObject& device_of(FakeState& state, const std::string& key) {
  for (const auto& device : state.devices) {
    if (device->key == key) return *device;
  }
  throw std::invalid_argument(fmt::format("no fake device '{}'", key));
}

void push_event(ContextObject& context, const ibv_async_event& event) {
  context.events.push_back(event);
  context.ready.add();
}

void push_event(FakeState& state, DeviceObject& device, const ibv_async_event& event) {
  for (const auto& [handle, context] : state.contexts) {
    if (context->owner == &device) push_event(*context, event);
  }
}

}  // namespace rekindle::transport::verbs
