#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/verbs/verbs_hosts.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/link/verbs_wire.h"
#include "transport/verbs/staged/stage_pool.h"
#include "transport/verbs/staged/stage_wire.h"

namespace rekindle::transport::verbs {

// A puller of one link that says and reads what a test wants it to, and obeys no rule.
class RawPuller {
 public:
  explicit RawPuller(Api& api, const FabricOptions& options = {})
      : fabric_(VerbsSource::open(api, options)) {}

  Result<void> connect(VerbsSource& source, const SessionToken& token) {
    Rail& rail = *fabric_->rails().front();
    ConnectionOptions options;
    options.queue_pairs = 1;
    options.recv_depth = kMaxStageBlocks;
    TRY(connection_, Connection::create(rail, options));
    TRY(control_, StageControl::create(rail.device()));
    for (std::size_t i = 0; i < kMaxStageBlocks; ++i) receive(i);
    const PathTarget target = source.target(token);
    TRY(const Endpoint endpoint, Endpoint::parse(target.endpoint));
    ConnectRequest request;
    request.source = target.incarnation;
    request.links.push_back({rail_info(rail), endpoint.rails.front().index,
                             connection_->mtu_bytes(), 16, connection_->ends(), kMaxStageBlocks});
    TRY(const std::string answer, source.server()->accept(token, request.to_bytes()));
    TRY(auto response, ConnectResponse::parse(answer));
    LinkResponse& link = response.links.front();
    if (!link.error.empty()) return fail(ErrorCode::kUnavailable, "{}", link.error);
    if (link.stage) offer_ = std::move(*link.stage);
    windows_ = std::move(link.windows);
    return connection_->connect(
        {endpoint.rails.front().address, link.mtu_bytes, link.rd_atomic, link.queue_pairs},
        ConnectionRole::kReads);
  }

  // Of a staged link.
  const StageOffer& offer() const { return offer_; }
  // Of a link that reads the regions themselves.
  const std::vector<RemoteWindow>& windows() const { return windows_; }
  static std::vector<std::byte> bytes_of(const StageRequest& request) {
    std::vector<std::byte> bytes(kStageRequestBytes);
    encode(request, bytes);
    return bytes;
  }

  // All in one call.
  void say(const std::vector<std::vector<std::byte>>& messages) {
    std::vector<ibv_sge> entries(messages.size());
    std::vector<ibv_send_wr> requests(messages.size());
    for (std::size_t i = 0; i < messages.size(); ++i) {
      const auto room = control_->to_send(i);
      std::copy(messages[i].begin(), messages[i].end(), room.begin());
      entries[i] = control_->entry(room.first(messages[i].size()));
      requests[i] = {};
      requests[i].opcode = IBV_WR_SEND;
      requests[i].send_flags = IBV_SEND_SIGNALED;
      requests[i].sg_list = &entries[i];
      requests[i].num_sge = 1;
      if (i > 0) requests[i - 1].next = &requests[i];
    }
    post(requests.front());
  }
  // `bytes` of block 0.
  std::vector<std::byte> read_block(std::uint32_t bytes) {
    return read(offer_.blocks.front().address, offer_.blocks.front().key, bytes);
  }
  // Empty: the NIC of the source refuses.
  std::vector<std::byte> read(std::uint64_t address, std::uint32_t key, std::uint32_t bytes) {
    std::vector<std::byte> local(bytes);
    const MrHandle mr(connection_->api().reg_mr(fabric_->devices().front()->pd(), local.data(),
                                                bytes, IBV_ACCESS_LOCAL_WRITE),
                      {&connection_->api()});
    ibv_sge entry{reinterpret_cast<std::uint64_t>(local.data()), bytes, mr->lkey};
    ibv_send_wr request{};
    request.wr_id = kReadId;
    request.opcode = IBV_WR_RDMA_READ;
    request.send_flags = IBV_SEND_SIGNALED;
    request.sg_list = &entry;
    request.num_sge = 1;
    request.wr.rdma.remote_addr = address;
    request.wr.rdma.rkey = key;
    post(request);
    ibv_wc wc{};
    if (!wait([&](const ibv_wc& one) { return (wc = one).wr_id == kReadId; })) return {};
    return wc.status == IBV_WC_SUCCESS ? local : std::vector<std::byte>{};
  }
  Result<StageAnswer> answer() {
    ibv_wc wc{};
    if (!wait([&](const ibv_wc& one) { return (wc = one).wr_id >= kReceiveId; })) {
      return fail(ErrorCode::kTimeout, "no answer");
    }
    if (wc.status != IBV_WC_SUCCESS) {
      return fail(ErrorCode::kPeerLost, "{}", ibv_wc_status_str(wc.status));
    }
    const auto message = control_->to_receive(wc.wr_id - kReceiveId).first(wc.byte_len);
    return parse_stage_answer(message, {offer_.blocks.size(), offer_.block_bytes});
  }

 private:
  static constexpr std::uint64_t kReadId = 77;
  static constexpr std::uint64_t kReceiveId = 100;

  void receive(std::size_t index) {
    ibv_sge entry = control_->entry(control_->to_receive(index));
    ibv_recv_wr request{};
    request.wr_id = kReceiveId + index;
    request.sg_list = &entry;
    request.num_sge = 1;
    ibv_recv_wr* bad = nullptr;
    if (connection_->api().post_recv(connection_->queue_pair(0), &request, &bad) != 0) {
      throw std::runtime_error("post_recv");
    }
  }
  void post(ibv_send_wr& request) {
    ibv_send_wr* bad = nullptr;
    if (connection_->api().post_send(connection_->queue_pair(0), &request, &bad) != 0) {
      throw std::runtime_error("post_send");
    }
  }
  template <typename Wanted>
  bool wait(const Wanted& wanted) {
    return testing::eventually([&] {
      ibv_wc wc{};
      return connection_->api().poll_cq(connection_->cq(), 1, &wc) == 1 && wanted(wc);
    });
  }

  const std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<StageControl> control_;
  std::unique_ptr<Connection> connection_;
  StageOffer offer_;
  std::vector<RemoteWindow> windows_;
};

}  // namespace rekindle::transport::verbs
