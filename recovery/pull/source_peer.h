#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "recovery/rpc/rpc.h"
#include "recovery/swarm/have_feed.h"
#include "src/async/task.h"
#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/tensor/checkpoint.h"
#include "transport/path.h"
#include "transport/registry.h"

namespace rekindle::pull {

// One granted session at a source: keys, and how to connect paths.
struct PeerSession {
  SessionToken token;
  std::vector<transport::RegionKey> regions;  // per segment of the layout
  struct Offer {
    std::string transport;
    std::string endpoint;
    std::uint32_t max_paths = 1;
  };
  std::vector<Offer> offers;
  std::uint64_t max_bytes_per_second = 0;  // 0: no cap
};

// The control connection to one source of a pull. Control thread only.
class SourcePeer {
 public:
  // Connects. kStale: another incarnation than the coordinator meant answers.
  static async::Task<Result<std::shared_ptr<SourcePeer>>> connect(
      proto::Source source, rpc::Identity identity, std::chrono::milliseconds deadline);
  SourcePeer(proto::Source source, std::shared_ptr<rpc::RpcClient> client);

  const proto::Source& source() const { return source_; }
  const std::string& name() const { return source_.node().node_id(); }
  bool connected() const { return client_->connected(); }
  Incarnation incarnation() const { return client_->peer().incarnation; }
  // A release before protocol 3: its sessions need no renewal, and its streams want the token.
  bool before_protocol_3() const { return client_->peer().public_key.empty(); }
  void close() { client_->close(); }

  static constexpr std::uint64_t kMaxPagedBytes = std::uint64_t{4} << 30;
  // Metadata comes in pages, some at a time. Each page has this deadline and is reported. All pages
  // together have `grace`, and what they take at 1 MiB a second, but at most 5 minutes.
  struct Paging {
    std::chrono::milliseconds page_deadline;
    std::function<void()> on_page;
    std::chrono::milliseconds grace{10'000};
    // A source that offers more is refused.
    std::uint64_t most_bytes = kMaxPagedBytes;
  };
  // Canonical bytes. The caller checks them against the digest that names them.
  async::Task<Result<std::string>> fetch_tensor_set(Digest digest, Paging paging);
  async::Task<Result<std::string>> fetch_tile_digests(Digest root, Paging paging);
  async::Task<Result<std::string>> fetch_layout(Digest digest, Paging paging);
  // The content of a file tensor ("config.json"); the caller verifies it against the tile digests.
  async::Task<Result<std::string>> fetch_file(Digest root, std::string name, Paging paging);

  struct SessionRequest {
    proto::NodeAddress self;
    ModelVersion id;
    Digest root;
    proto::Grant grant;
    std::vector<std::string> transports;
    trace::Context trace = {};
  };
  async::Task<Result<PeerSession>> open_session(SessionRequest wanted,
                                                std::chrono::milliseconds deadline);
  // A session that reads the memory which the peer lends to benchmarks. Only a daemon with
  // --allow-drills has it.
  struct BenchSession {
    PeerSession session;
    std::uint64_t bytes = 0;
  };
  async::Task<Result<BenchSession>> open_bench_session(std::vector<std::string> transports,
                                                       std::chrono::milliseconds deadline);
  // The answer to a Handshake's request.
  async::Task<Result<std::string>> connect_paths(SessionToken token, std::string transport,
                                                 std::string request,
                                                 std::chrono::milliseconds deadline);
  static async::Task<void> close_session(std::shared_ptr<SourcePeer> peer, SessionToken token);
  // Keeps the control connection, and the session that belongs to it, alive while only data flows.
  // Closes a peer that does not answer within 5 s.
  static async::Task<void> keep_alive(std::shared_ptr<SourcePeer> peer);
  // The same, with a new grant that the source itself gives (--from).
  static async::Task<void> renew_grant(std::shared_ptr<SourcePeer> peer, SessionRequest wanted,
                                       SessionToken token);
  // The same, and extends the session by a newer grant.
  static async::Task<void> renew_session(std::shared_ptr<SourcePeer> peer, SessionRequest wanted,
                                         SessionToken token);
  // Reports the tiles that the source holds while it is being filled, until it is complete
  // (success), the session ends, or the caller is cancelled. The runs are checked. `all`: they
  // list everything, not only new tiles.
  using OnHave = std::function<void(swarm::TileRuns held, bool all)>;
  static async::Task<Result<void>> watch_have(std::shared_ptr<SourcePeer> peer, SessionToken token,
                                              TileIndex tile_count, OnHave on_have);
  // One proof per item, in order.
  async::Task<Result<std::vector<std::string>>> prove_ranges(proto::ProveRangesRequest request);

 private:
  struct PagedBlob;
  async::Task<Result<proto::GetPageResponse>> fetch_page(const PagedBlob& blob,
                                                         std::uint64_t offset);
  async::Task<void> fetch_rest(PagedBlob& blob);
  async::Task<Result<std::string>> fetch_pages(proto::PageKind kind, Digest digest,
                                               std::string name, Paging paging);
  proto::OpenSessionRequest request_for(SessionRequest wanted) const;
  Error pages_do_not_fit() const;
  Error too_slow(const PagedBlob& blob) const;
  Result<PeerSession> read_session(const proto::OpenSessionResponse& response) const;

  const proto::Source source_;
  const std::shared_ptr<rpc::RpcClient> client_;
};

}  // namespace rekindle::pull
