#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "src/base/unique_fd.h"
#include "transport/verbs/device/verbs_api.h"

// Devices with ports, GIDs and async events only, under total control: lost events, endless storms,
// a kernel that closes its side. (fake_verbs.h moves data.)
namespace rekindle::transport::verbs {

struct StubPort {
  ibv_port_attr attr{};
  std::vector<ibv_gid_entry> gids;
  int query_error = 0;
};

struct StubDevice {
  explicit StubDevice(std::string device_name) : name(std::move(device_name)) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) std::abort();
    async_end = UniqueFd(pair[0]);
    kernel_end = UniqueFd(pair[1]);
    ::fcntl(kernel_end.get(), F_SETFL, O_NONBLOCK);
    device.node_type = IBV_NODE_CA;
    context.device = &device;
    context.async_fd = async_end.get();
    attr.max_sge = attr.max_sge_rd = 16;
    attr.max_qp_wr = attr.max_cqe = 1024;
    attr.max_qp_rd_atom = attr.max_qp_init_rd_atom = 16;
    pd.context = &context;
  }

  std::string name;
  ibv_device device{};
  ibv_context context{};
  ibv_pd pd{};
  ibv_device_attr attr{};
  std::vector<StubPort> ports;
  int open_error = 0;
  bool endless_events = false;  // of a queue pair, as fast as they are taken
  UniqueFd async_end, kernel_end;
  std::deque<ibv_async_event> events;
  int opened = 0;
  int contexts = 0, pds = 0;
  std::uint64_t taken = 0, acked = 0, looks = 0;
};

class StubApi final : public Api {
 public:
  StubDevice& add(std::string name, int ports = 1) {
    const std::lock_guard lock(mutex);
    auto& device = *devices.emplace_back(std::make_unique<StubDevice>(std::move(name)));
    for (int i = 0; i < ports; ++i) {
      StubPort& port = device.ports.emplace_back();
      port.attr.state = IBV_PORT_ACTIVE;
      port.attr.link_layer = IBV_LINK_LAYER_ETHERNET;
      port.attr.active_mtu = IBV_MTU_4096;
      port.attr.active_speed = 128;
      port.attr.active_width = 2;
      port.attr.gid_tbl_len = 16;
    }
    device.attr.phys_port_cnt = static_cast<std::uint8_t>(ports);
    return device;
  }

  void push(StubDevice& device, ibv_event_type type, int port = 1) {
    const std::lock_guard lock(mutex);
    ibv_async_event event{};
    event.event_type = type;
    event.element.port_num = port;
    if (device.events.empty()) wake(device);
    device.events.push_back(event);
  }

  int list_error = 0;
  std::vector<std::unique_ptr<StubDevice>> devices;
  std::mutex mutex;

  ibv_device** get_device_list(int* count) override {
    if (list_error != 0) {
      errno = list_error;
      return nullptr;
    }
    *count = static_cast<int>(devices.size());
    auto** list = new ibv_device*[devices.size() + 1]();
    for (std::size_t i = 0; i < devices.size(); ++i) list[i] = &devices[i]->device;
    ++lists;
    return list;
  }
  void free_device_list(ibv_device** list) override {
    delete[] list;
    --lists;
  }
  const char* get_device_name(ibv_device* device) override {
    for (const auto& d : devices) {
      if (&d->device == device) return d->name.c_str();
    }
    return nullptr;
  }
  ibv_context* open_device(ibv_device* device) override {
    for (const auto& d : devices) {
      if (&d->device != device) continue;
      ++d->opened;
      if (d->open_error != 0) {
        errno = d->open_error;
        return nullptr;
      }
      ++d->contexts;
      return &d->context;
    }
    return nullptr;
  }
  int close_device(ibv_context* context) override {
    StubDevice& device = of(context);
    if (device.pds != 0) return EBUSY;
    --device.contexts;
    return 0;
  }
  int query_device(ibv_context* context, ibv_device_attr* attr) override {
    *attr = of(context).attr;
    return 0;
  }
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) override {
    const std::lock_guard lock(mutex);
    StubDevice& device = of(context);
    ++device.looks;
    const StubPort& p = device.ports.at(port - 1U);
    if (p.query_error != 0) return p.query_error;
    *attr = p.attr;
    return 0;
  }
  ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries,
                          std::size_t capacity) override {
    const std::lock_guard lock(mutex);
    if (capacity * sizeof *entries > 65535) return -EINVAL;  // as the kernel
    std::size_t count = 0;
    StubDevice& device = of(context);
    for (std::size_t i = 0; i < device.ports.size(); ++i) {
      for (ibv_gid_entry entry : device.ports[i].gids) {
        entry.port_num = static_cast<std::uint32_t>(i + 1);
        if (count == capacity) return -EINVAL;
        entries[count++] = entry;
      }
    }
    return static_cast<ssize_t>(count);
  }
  ibv_pd* alloc_pd(ibv_context* context) override {
    StubDevice& device = of(context);
    ++device.pds;
    return &device.pd;
  }
  int dealloc_pd(ibv_pd* pd) override {
    --of(pd->context).pds;
    return 0;
  }
  int get_async_event(ibv_context* context, ibv_async_event* event) override {
    const std::lock_guard lock(mutex);
    StubDevice& device = of(context);
    char byte = 0;
    if (device.endless_events) {
      *event = {};
      event->event_type = IBV_EVENT_COMM_EST;
      ++device.taken;
      return 0;
    }
    if (device.events.empty()) {
      if (::read(device.async_end.get(), &byte, 1) == 0) errno = EIO;
      return -1;
    }
    *event = device.events.front();
    device.events.pop_front();
    // Readable as long as there is something.
    if (device.events.empty() && ::read(device.async_end.get(), &byte, 1) != 1) std::abort();
    ++device.taken;
    return 0;
  }
  void ack_async_event(ibv_async_event* /*event*/) override { ++acked; }

  ibv_mr* reg_mr(ibv_pd*, void*, std::size_t, int) override { return nullptr; }
  ibv_mr* reg_dmabuf_mr(ibv_pd* pd, std::uint64_t, std::size_t bytes, std::uint64_t, int fd,
                        int) override {
    if (dmabuf_errno != 0 || fd < 0) {
      errno = dmabuf_errno != 0 ? dmabuf_errno : EBADF;
      return nullptr;
    }
    mr = {};
    mr.context = pd->context;
    mr.pd = pd;
    mr.length = bytes;
    ++mrs;
    return &mr;
  }
  int dereg_mr(ibv_mr*) override {
    --mrs;
    return 0;
  }
  ibv_mw* alloc_mw(ibv_pd*, ibv_mw_type) override { return nullptr; }
  int dealloc_mw(ibv_mw*) override { return EINVAL; }
  ibv_comp_channel* create_comp_channel(ibv_context*) override { return nullptr; }
  int destroy_comp_channel(ibv_comp_channel*) override { return EINVAL; }
  ibv_cq* create_cq(ibv_context*, int, void*, ibv_comp_channel*, int) override { return nullptr; }
  int destroy_cq(ibv_cq*) override { return EINVAL; }
  int req_notify_cq(ibv_cq*, int) override { return EINVAL; }
  int get_cq_event(ibv_comp_channel*, ibv_cq**, void**) override { return -1; }
  void ack_cq_events(ibv_cq*, unsigned) override {}
  int poll_cq(ibv_cq*, int, ibv_wc*) override { return -1; }
  ibv_qp* create_qp(ibv_pd*, ibv_qp_init_attr*) override { return nullptr; }
  int modify_qp(ibv_qp*, ibv_qp_attr*, int) override { return EINVAL; }
  int destroy_qp(ibv_qp*) override { return EINVAL; }
  int post_send(ibv_qp*, ibv_send_wr*, ibv_send_wr**) override { return EINVAL; }
  int post_recv(ibv_qp*, ibv_recv_wr*, ibv_recv_wr**) override { return EINVAL; }

  std::atomic<std::uint64_t> acked = 0;
  int lists = 0;
  int dmabuf_errno = 0;
  int mrs = 0;
  ibv_mr mr{};

 private:
  StubDevice& of(ibv_context* context) {
    for (const auto& d : devices) {
      if (&d->context == context) return *d;
    }
    std::abort();
  }
  static void wake(StubDevice& device) {
    const char byte = 0;
    if (::write(device.kernel_end.get(), &byte, 1) != 1) std::abort();
  }
};

}  // namespace rekindle::transport::verbs
