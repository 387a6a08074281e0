#include "tests/verbs/fake_verbs.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "tests/verbs/fake_state.h"

// Devices, ports, protection domains and the asynchronous events. The rest of FakeVerbs is in
// fake_memory.cc, fake_completions.cc, fake_queue_pairs.cc and fake_delivery.cc.
namespace rekindle::transport::verbs {
namespace {

std::array<std::uint8_t, 16> link_local(std::uint32_t number) {
  std::array<std::uint8_t, 16> bytes{0xfe, 0x80};
  for (int i = 0; i < 4; ++i)
    bytes[15u - static_cast<unsigned>(i)] = static_cast<std::uint8_t>(number >> 8 * i);
  return bytes;
}

void give_address(FakeState& state, FakePort& port) {
  const std::uint32_t number = state.next_address++;
  if (port.infiniband) {
    if (port.lid == 0) port.lid = static_cast<std::uint16_t>(number);
    if (port.gids.empty()) port.gids = {{0, link_local(number), IBV_GID_TYPE_IB}};
    return;
  }
  if (!port.gids.empty()) return;
  const std::array<std::uint8_t, 4> ipv4{10, static_cast<std::uint8_t>(number >> 16),
                                         static_cast<std::uint8_t>(number >> 8),
                                         static_cast<std::uint8_t>(number)};
  port.gids = {{0, link_local(number), IBV_GID_TYPE_ROCE_V1},
               {1, link_local(number), IBV_GID_TYPE_ROCE_V2},
               ipv4_gid(2, ipv4, IBV_GID_TYPE_ROCE_V1),
               ipv4_gid(3, ipv4, IBV_GID_TYPE_ROCE_V2)};
}

}  // namespace

FakeVerbs::FakeVerbs(FakeNetwork& network, std::string host)
    : state_(network.state()), host_(std::move(host)) {}

FakeVerbs::~FakeVerbs() = default;

std::string FakeVerbs::add_device(FakeDevice spec) {
  const Lock lock(state_.mutex);
  auto device = std::make_unique<DeviceObject>();
  device->key = host_.empty() ? spec.name : host_ + "/" + spec.name;
  for (const auto& other : state_.devices) {
    if (other->key == device->key) throw std::invalid_argument("fake device twice: " + device->key);
  }
  if (spec.name.empty() || spec.name.size() >= sizeof device->name) {
    throw std::invalid_argument("a fake device needs a short name");
  }
  std::copy(spec.name.begin(), spec.name.end(), std::begin(device->name));
  device->owner = this;
  device->node_type = IBV_NODE_CA;
  device->transport_type = IBV_TRANSPORT_IB;
  for (FakePort& port : spec.ports) give_address(state_, port);
  spec.attr.phys_port_cnt = static_cast<std::uint8_t>(spec.ports.size());
  device->spec = std::move(spec);
  state_.devices.push_back(std::move(device));
  return state_.devices.back()->key;
}

ibv_device** FakeVerbs::get_device_list(int* count) {
  const Lock lock(state_.mutex);
  std::vector<ibv_device*> devices;
  for (const auto& device : state_.devices) {
    if (device->owner == this && !device->removed) devices.push_back(device.get());
  }
  if (count != nullptr) *count = static_cast<int>(devices.size());
  devices.push_back(nullptr);
  auto** list = new ibv_device*[devices.size()];
  std::copy(devices.begin(), devices.end(), list);
  state_.lists.insert(list);
  return list;
}

void FakeVerbs::free_device_list(ibv_device** list) {
  const Lock lock(state_.mutex);
  if (state_.lists.erase(list) == 0) {
    state_.problem("free_device_list: not a list");
    return;
  }
  delete[] list;
}

const char* FakeVerbs::get_device_name(ibv_device* device) { return device->name; }

ibv_context* FakeVerbs::open_device(ibv_device* device) {
  Lock lock(state_.mutex);
  auto& owner = *static_cast<DeviceObject*>(device);
  if (const int error = begin_call(state_, lock, owner, FakeCall::kOpenDevice); error != 0) {
    errno = error;
    return nullptr;
  }
  auto context = std::make_unique<ContextObject>();
  context->device = device;
  context->owner = &owner;
  context->cmd_fd = -1;
  context->async_fd = context->ready.fd.get();
  context->num_comp_vectors = 1;
  ContextObject* const handle = context.get();
  state_.contexts.emplace(handle, std::move(context));
  return handle;
}

int FakeVerbs::close_device(ibv_context* handle) {
  const Lock lock(state_.mutex);
  ContextObject* const context = state_.find(state_.contexts, handle, "close_device");
  if (context == nullptr) return EINVAL;
  if (context->children > 0) {
    state_.problem("close_device {}: {} objects are left on it", context->owner->key,
                   context->children);
  }
  state_.contexts.erase(handle);
  return 0;
}

int FakeVerbs::query_device(ibv_context* handle, ibv_device_attr* attr) {
  Lock lock(state_.mutex);
  DeviceObject& device = *static_cast<ContextObject*>(handle)->owner;
  const int error = begin_call(state_, lock, device, FakeCall::kQueryDevice);
  if (error == 0) *attr = device.spec.attr;
  return error;
}

int FakeVerbs::query_port(ibv_context* handle, std::uint8_t number, ibv_port_attr* attr) {
  Lock lock(state_.mutex);
  DeviceObject& device = *static_cast<ContextObject*>(handle)->owner;
  if (const int error = begin_call(state_, lock, device, FakeCall::kQueryPort); error != 0) {
    return error;
  }
  if (number == 0 || number > device.spec.ports.size()) return EINVAL;
  const FakePort& port = device.spec.ports[number - 1u];
  *attr = {};
  attr->state = port.state;
  attr->max_mtu = port.max_mtu;
  attr->active_mtu = port.active_mtu;
  attr->max_msg_sz = port.max_message_bytes;
  attr->pkey_tbl_len = 1;
  attr->lid = port.lid;
  attr->active_width = port.width;
  attr->active_speed = port.speed;
  attr->phys_state = port.state == IBV_PORT_ACTIVE ? 5 : 3;  // LinkUp, Disabled
  attr->link_layer = port.infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
  attr->gid_tbl_len = 256;
  return 0;
}

ssize_t FakeVerbs::query_gid_table(ibv_context* handle, ibv_gid_entry* entries,
                                   std::size_t capacity) {
  Lock lock(state_.mutex);
  DeviceObject& device = *static_cast<ContextObject*>(handle)->owner;
  const int error = begin_call(state_, lock, device, FakeCall::kQueryGidTable);
  if (error != 0) return -error;
  std::size_t count = 0;
  for (std::size_t i = 0; i < device.spec.ports.size(); ++i) {
    for (const FakeGid& gid : device.spec.ports[i].gids) {
      if (count == capacity) return -EINVAL;  // as libibverbs: all or nothing
      ibv_gid_entry& entry = entries[count++];
      entry = {};
      std::copy(gid.bytes.begin(), gid.bytes.end(), std::begin(entry.gid.raw));
      entry.gid_index = gid.index;
      entry.port_num = static_cast<std::uint32_t>(i + 1);
      entry.gid_type = gid.type;
    }
  }
  return static_cast<ssize_t>(count);
}

ibv_pd* FakeVerbs::alloc_pd(ibv_context* handle) {
  Lock lock(state_.mutex);
  auto* const context = static_cast<ContextObject*>(handle);
  if (const int error = begin_call(state_, lock, *context->owner, FakeCall::kAllocPd); error != 0) {
    errno = error;
    return nullptr;
  }
  auto pd = std::make_unique<PdObject>();
  pd->context = handle;
  ++context->children;
  PdObject* const result = pd.get();
  state_.pds.emplace(result, std::move(pd));
  return result;
}

int FakeVerbs::dealloc_pd(ibv_pd* handle) {
  const Lock lock(state_.mutex);
  PdObject* const pd = state_.find(state_.pds, handle, "dealloc_pd");
  if (pd == nullptr) return EINVAL;
  if (pd->children > 0) return EBUSY;
  --static_cast<ContextObject*>(pd->context)->children;
  state_.pds.erase(handle);
  return 0;
}

int FakeVerbs::get_async_event(ibv_context* handle, ibv_async_event* event) {
  auto* const context = static_cast<ContextObject*>(handle);
  {
    Lock lock(state_.mutex);
    ++context->owner->calls[static_cast<std::size_t>(FakeCall::kGetAsyncEvent)];
  }
  if (!context->ready.take()) return -1;  // blocks where the caller left it blocking
  const Lock lock(state_.mutex);
  if (context->events.empty()) {
    errno = EAGAIN;
    return -1;
  }
  *event = context->events.front();
  context->events.pop_front();
  if (std::uint64_t* const unacked = unacked_of(state_, *event)) ++*unacked;
  return 0;
}

void FakeVerbs::ack_async_event(ibv_async_event* event) {
  const Lock lock(state_.mutex);
  std::uint64_t* const unacked = unacked_of(state_, *event);
  if (unacked == nullptr) return;
  if (*unacked == 0) {
    state_.problem("ack_async_event: acknowledged more often than got");
    return;
  }
  --*unacked;
  state_.changed.notify_all();
}

std::uint64_t* unacked_of(FakeState& state, const ibv_async_event& event) {
  if (event.event_type == IBV_EVENT_CQ_ERR) {
    CqObject* const cq = state.find(state.cqs, event.element.cq, "async event");
    return cq == nullptr ? nullptr : &cq->unacked;
  }
  if (event.event_type <= IBV_EVENT_PATH_MIG_ERR ||
      event.event_type == IBV_EVENT_QP_LAST_WQE_REACHED) {
    QpObject* const qp = state.find(state.qps, event.element.qp, "async event");
    return qp == nullptr ? nullptr : &qp->unacked;
  }
  return nullptr;
}

void drop_events(ContextObject& context, const void* object) {
  std::erase_if(context.events, [&](const ibv_async_event& event) {
    const bool of_port = event.event_type >= IBV_EVENT_DEVICE_FATAL &&
                         event.event_type != IBV_EVENT_QP_LAST_WQE_REACHED;
    if (of_port || event.element.qp != object) return false;
    context.ready.take_back();
    return true;
  });
}

}  // namespace rekindle::transport::verbs
