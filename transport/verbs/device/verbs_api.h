#pragma once

#include <memory>

#include <infiniband/verbs.h>

#include "src/base/log.h"

namespace rekindle::transport::verbs {

// The verbs calls that this backend makes. The class is a seam for tests, not a layer: names,
// arguments and results are those of libibverbs (man 3 ibv_*): 0 or a positive errno, or a pointer
// and errno. Any thread may call any method, as libibverbs allows.
class Api {
 public:
  virtual ~Api() = default;

  // Call this before any device is opened: fork() harms no registration from then on. Returns 0 or
  // a positive errno.
  virtual int make_fork_safe() { return 0; }
  // Whether registrations mark their memory for that (MADV_DONTFORK). Such a mark belongs to a
  // mapping, so a registration must not outlive its mapping.
  virtual bool marks_memory_for_forks() const { return false; }
  virtual ibv_device** get_device_list(int* count) = 0;
  virtual void free_device_list(ibv_device** list) = 0;
  virtual const char* get_device_name(ibv_device* device) = 0;
  virtual ibv_context* open_device(ibv_device* device) = 0;
  virtual int close_device(ibv_context* context) = 0;
  virtual int query_device(ibv_context* context, ibv_device_attr* attr) = 0;
  virtual int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) = 0;
  // Fills in at most `capacity` valid entries of all ports. Returns their number or a negative
  // errno.
  virtual ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries,
                                  std::size_t capacity) = 0;

  virtual ibv_pd* alloc_pd(ibv_context* context) = 0;
  virtual int dealloc_pd(ibv_pd* pd) = 0;
  virtual ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t bytes, int access) = 0;
  virtual ibv_mr* reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t bytes,
                                std::uint64_t iova, int fd, int access) = 0;
  virtual int dereg_mr(ibv_mr* mr) = 0;
  virtual ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) = 0;
  virtual int dealloc_mw(ibv_mw* mw) = 0;

  virtual ibv_comp_channel* create_comp_channel(ibv_context* context) = 0;
  virtual int destroy_comp_channel(ibv_comp_channel* channel) = 0;
  virtual ibv_cq* create_cq(ibv_context* context, int entries, void* cq_context,
                            ibv_comp_channel* channel, int comp_vector) = 0;
  virtual int destroy_cq(ibv_cq* cq) = 0;
  virtual int req_notify_cq(ibv_cq* cq, int solicited_only) = 0;
  virtual int get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) = 0;
  virtual void ack_cq_events(ibv_cq* cq, unsigned count) = 0;
  virtual int poll_cq(ibv_cq* cq, int count, ibv_wc* completions) = 0;  // negative: broken

  virtual ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) = 0;
  virtual int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) = 0;
  virtual int destroy_qp(ibv_qp* qp) = 0;
  virtual int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) = 0;
  virtual int post_recv(ibv_qp* qp, ibv_recv_wr* requests, ibv_recv_wr** bad) = 0;

  // The descriptor (context->async_fd) is made non-blocking by the caller.
  virtual int get_async_event(ibv_context* context, ibv_async_event* event) = 0;
  virtual void ack_async_event(ibv_async_event* event) = 0;
};

// libibverbs itself.
class SystemApi : public Api {
 public:
  // Linux 5.12 and later copies pinned pages for a child, so nothing is needed. On older kernels
  // every registration costs an madvise() from here on.
  bool marks_memory_for_forks() const override {
    return ibv_is_fork_initialized() == IBV_FORK_ENABLED;
  }
  int make_fork_safe() override {
    return ibv_is_fork_initialized() == IBV_FORK_DISABLED ? ibv_fork_init() : 0;
  }

  ibv_device** get_device_list(int* count) override { return ibv_get_device_list(count); }
  void free_device_list(ibv_device** list) override { ibv_free_device_list(list); }
  const char* get_device_name(ibv_device* device) override { return ibv_get_device_name(device); }
  ibv_context* open_device(ibv_device* device) override { return ibv_open_device(device); }
  int close_device(ibv_context* context) override { return ibv_close_device(context); }
  int query_device(ibv_context* context, ibv_device_attr* attr) override {
    return ibv_query_device(context, attr);
  }
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) override {
    return ibv_query_port(context, port, attr);
  }
  ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries,
                          std::size_t capacity) override {
    return ibv_query_gid_table(context, entries, capacity, 0);
  }

  ibv_pd* alloc_pd(ibv_context* context) override { return ibv_alloc_pd(context); }
  int dealloc_pd(ibv_pd* pd) override { return ibv_dealloc_pd(pd); }
  ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t bytes, int access) override {
    return ibv_reg_mr(pd, address, bytes, static_cast<unsigned>(access));
  }
  ibv_mr* reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t bytes, std::uint64_t iova,
                        int fd, int access) override {
    return ibv_reg_dmabuf_mr(pd, offset, bytes, iova, fd, access);
  }
  int dereg_mr(ibv_mr* mr) override { return ibv_dereg_mr(mr); }
  ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) override { return ibv_alloc_mw(pd, type); }
  int dealloc_mw(ibv_mw* mw) override { return ibv_dealloc_mw(mw); }

  ibv_comp_channel* create_comp_channel(ibv_context* context) override {
    return ibv_create_comp_channel(context);
  }
  int destroy_comp_channel(ibv_comp_channel* channel) override {
    return ibv_destroy_comp_channel(channel);
  }
  ibv_cq* create_cq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                    int comp_vector) override {
    return ibv_create_cq(context, entries, cq_context, channel, comp_vector);
  }
  int destroy_cq(ibv_cq* cq) override { return ibv_destroy_cq(cq); }
  int req_notify_cq(ibv_cq* cq, int solicited_only) override {
    return ibv_req_notify_cq(cq, solicited_only);
  }
  int get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) override {
    return ibv_get_cq_event(channel, cq, cq_context);
  }
  void ack_cq_events(ibv_cq* cq, unsigned count) override { ibv_ack_cq_events(cq, count); }
  int poll_cq(ibv_cq* cq, int count, ibv_wc* completions) override {
    return ibv_poll_cq(cq, count, completions);
  }

  ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) override { return ibv_create_qp(pd, attr); }
  int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) override {
    return ibv_modify_qp(qp, attr, mask);
  }
  int destroy_qp(ibv_qp* qp) override { return ibv_destroy_qp(qp); }
  int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) override {
    return ibv_post_send(qp, requests, bad);
  }
  int post_recv(ibv_qp* qp, ibv_recv_wr* requests, ibv_recv_wr** bad) override {
    return ibv_post_recv(qp, requests, bad);
  }

  int get_async_event(ibv_context* context, ibv_async_event* event) override {
    return ibv_get_async_event(context, event);
  }
  void ack_async_event(ibv_async_event* event) override { ibv_ack_async_event(event); }
};
inline std::unique_ptr<Api> make_system_api() { return std::make_unique<SystemApi>(); }

// Owns one verbs object. Declare parents first, so that children go first.
template <typename T, int (Api::*kDestroy)(T*)>
struct HandleDeleter {
  Api* api = nullptr;
  void operator()(T* object) const {
    if (const int error = (api->*kDestroy)(object); error != 0) {
      log::error("verbs.destroy", "errno", error, "hint",
                 "an object of the NIC is still in use: a bug, its memory is leaked");
    }
  }
};
template <typename T, int (Api::*kDestroy)(T*)>
using Handle = std::unique_ptr<T, HandleDeleter<T, kDestroy>>;

using ContextHandle = Handle<ibv_context, &Api::close_device>;
using PdHandle = Handle<ibv_pd, &Api::dealloc_pd>;
using MrHandle = Handle<ibv_mr, &Api::dereg_mr>;
using MwHandle = Handle<ibv_mw, &Api::dealloc_mw>;
using ChannelHandle = Handle<ibv_comp_channel, &Api::destroy_comp_channel>;
using CqHandle = Handle<ibv_cq, &Api::destroy_cq>;
using QpHandle = Handle<ibv_qp, &Api::destroy_qp>;

}  // namespace rekindle::transport::verbs
