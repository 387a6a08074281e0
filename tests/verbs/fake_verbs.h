#pragma once

#include <atomic>
#include <string>

#include "tests/verbs/fake_network.h"
#include "transport/verbs/device/verbs_api.h"

namespace rekindle::transport::verbs {

// The verbs of one host whose devices are fakes, on a network with those of other hosts:
//   FakeNetwork network;
//   FakeVerbs a(network, "a"), b(network, "b");
//   const std::string nic = a.add_device({.name = "mlx5_0"});   // "a/mlx5_0" in scripts
class FakeVerbs : public Api {
 public:
  explicit FakeVerbs(FakeNetwork& network, std::string host = "");
  ~FakeVerbs() override;
  FakeVerbs(const FakeVerbs&) = delete;
  FakeVerbs& operator=(const FakeVerbs&) = delete;

  // Its name in the network's scripts: "HOST/NAME", or NAME where the host has none.
  std::string add_device(FakeDevice device);

  // Sets the result of make_fork_safe().
  void set_fork_error(int error) { fork_error_ = error; }
  int make_fork_safe() override { return fork_error_; }

  ibv_device** get_device_list(int* count) override;
  void free_device_list(ibv_device** list) override;
  const char* get_device_name(ibv_device* device) override;
  ibv_context* open_device(ibv_device* device) override;
  int close_device(ibv_context* context) override;
  int query_device(ibv_context* context, ibv_device_attr* attr) override;
  int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) override;
  ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries,
                          std::size_t capacity) override;

  ibv_pd* alloc_pd(ibv_context* context) override;
  int dealloc_pd(ibv_pd* pd) override;
  ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t bytes, int access) override;
  ibv_mr* reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t bytes, std::uint64_t iova,
                        int fd, int access) override;
  int dereg_mr(ibv_mr* mr) override;
  ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) override;
  int dealloc_mw(ibv_mw* mw) override;

  ibv_comp_channel* create_comp_channel(ibv_context* context) override;
  int destroy_comp_channel(ibv_comp_channel* channel) override;
  ibv_cq* create_cq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel,
                    int comp_vector) override;
  int destroy_cq(ibv_cq* cq) override;
  int req_notify_cq(ibv_cq* cq, int solicited_only) override;
  int get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) override;
  void ack_cq_events(ibv_cq* cq, unsigned count) override;
  int poll_cq(ibv_cq* cq, int count, ibv_wc* completions) override;

  ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) override;
  int modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) override;
  int destroy_qp(ibv_qp* qp) override;
  int post_send(ibv_qp* qp, ibv_send_wr* requests, ibv_send_wr** bad) override;
  int post_recv(ibv_qp* qp, ibv_recv_wr* requests, ibv_recv_wr** bad) override;

  int get_async_event(ibv_context* context, ibv_async_event* event) override;
  void ack_async_event(ibv_async_event* event) override;

 private:
  FakeState& state_;
  const std::string host_;
  std::atomic<int> fork_error_ = 0;
};

}  // namespace rekindle::transport::verbs
