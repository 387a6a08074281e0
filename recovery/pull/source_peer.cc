#include "recovery/pull/source_peer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "proto/drill.pb.h"
#include "recovery/rpc/address.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/task_group.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kCloseDeadline{500};
constexpr std::chrono::milliseconds kKeepAliveDeadline{5000};
constexpr std::chrono::milliseconds kProofDeadline{3000};
constexpr std::chrono::hours kWatchDeadline{24};  // the call ends with its session
// Bounds the number of pages. The last page may be smaller.
constexpr std::uint64_t kLeastPageBytes = 64 * kKiB;
constexpr std::size_t kPagesAtOnce = 4;
// A source that sends its metadata more slowly is given up. Another one may send it at once.
constexpr std::uint64_t kLeastBytesPerSecond = 1 * kMiB;
constexpr std::chrono::seconds kLongestBlob{300};

}  // namespace

SourcePeer::SourcePeer(proto::Source source, std::shared_ptr<rpc::RpcClient> client)
    : source_(std::move(source)), client_(std::move(client)) {}

async::Task<Result<std::shared_ptr<SourcePeer>>> SourcePeer::connect(
    proto::Source source, rpc::Identity identity, std::chrono::milliseconds deadline) {
  CO_TRY(const Incarnation expected, Incarnation::from_bytes(source.node().incarnation()));
  auto client = co_await rpc::RpcClient::connect(
      source.node().control_endpoint(), std::move(identity), deadline, expected, proto::ROLE_AGENT);
  if (!client) {
    co_return fail(std::move(client).error().with_context(
        fmt::format("source {} at {}", source.node().node_id(), source.node().control_endpoint())));
  }
  co_return std::make_shared<SourcePeer>(std::move(source), std::move(*client));
}

// A blob that arrives in pages, several at a time.
struct SourcePeer::PagedBlob {
  proto::GetPageRequest request;  // without the offset
  Paging paging;
  // The source chooses it with its first page. Only the last page may be smaller.
  std::uint64_t page_bytes = 0;
  std::uint64_t total_bytes = 0;
  std::uint64_t arrived_bytes = 0;
  // Of all pages.
  TimePoint began = steady_now();
  TimePoint deadline = TimePoint::max();
  // Pages before it were asked for.
  std::uint64_t next_offset = 0;
  // As long as the pages that were asked for: a source cannot make this host take memory that it
  // does not fill.
  std::string bytes;
  std::optional<Error> error;
};

async::Task<Result<proto::GetPageResponse>> SourcePeer::fetch_page(const PagedBlob& blob,
                                                                   std::uint64_t offset) {
  proto::GetPageRequest request = blob.request;
  request.set_offset(offset);
  auto deadline = blob.paging.page_deadline;
  bool is_last = false;
  if (blob.deadline != TimePoint::max()) {
    const auto left =
        std::max(std::chrono::milliseconds(milliseconds(blob.deadline - steady_now())),
                 std::chrono::milliseconds(1));
    is_last = left < deadline;
    if (is_last) deadline = left;
  }
  auto page = co_await rpc::call<proto::AGENT_GET_PAGE>(client_, std::move(request), deadline);
  if (page) blob.paging.on_page();
  if (!page && is_last && page.error().code() == ErrorCode::kTimeout)
    co_return fail(too_slow(blob));
  co_return page;
}

Error SourcePeer::pages_do_not_fit() const {
  return {ErrorCode::kCorrupt,
          fmt::format("source {} sent pages that do not fit together", name())};
}

Error SourcePeer::too_slow(const PagedBlob& blob) const {
  return {ErrorCode::kTimeout,
          fmt::format("source {} sent {} of {} of metadata in {} ms: too slow", name(),
                      format_bytes(blob.arrived_bytes), format_bytes(blob.total_bytes),
                      milliseconds(steady_now() - blob.began))};
}

async::Task<void> SourcePeer::fetch_rest(PagedBlob& blob) {
  while (!blob.error && blob.next_offset < blob.total_bytes) {
    const std::uint64_t offset = blob.next_offset;
    const std::uint64_t size = std::min(blob.page_bytes, blob.total_bytes - offset);
    blob.next_offset += size;
    blob.bytes.resize(blob.next_offset);
    auto page = co_await fetch_page(blob, offset);
    if (steady_now() >= blob.deadline) {
      blob.error = too_slow(blob);
    } else if (!page) {
      blob.error = std::move(page).error();
    } else if (page->total_bytes() != blob.total_bytes || page->data().size() != size) {
      blob.error = pages_do_not_fit();
    } else {
      page->data().copy(blob.bytes.data() + offset, size);
      blob.arrived_bytes += size;
    }
  }
}

async::Task<Result<std::string>> SourcePeer::fetch_pages(proto::PageKind kind, Digest digest,
                                                         std::string name, Paging paging) {
  PagedBlob blob;
  blob.request.set_kind(kind);
  *blob.request.mutable_digest() = rpc::to_proto(digest);
  blob.request.set_name(std::move(name));
  blob.paging = std::move(paging);
  *blob.request.mutable_grant() = source_.grant();
  CO_TRY(auto first, co_await fetch_page(blob, 0));
  blob.request.clear_grant();
  blob.total_bytes = first.total_bytes();
  blob.bytes = std::move(*first.mutable_data());
  blob.page_bytes = blob.next_offset = blob.bytes.size();
  if (blob.total_bytes > blob.paging.most_bytes) {
    co_return fail(ErrorCode::kInvalid, "source {} offers {} of metadata, the limit is {}",
                   this->name(), format_bytes(blob.total_bytes),
                   format_bytes(blob.paging.most_bytes));
  }
  if (blob.page_bytes > blob.total_bytes ||
      blob.page_bytes < std::min(blob.total_bytes, kLeastPageBytes)) {
    co_return fail(pages_do_not_fit());
  }
  blob.arrived_bytes = blob.page_bytes;
  const std::chrono::seconds at_least(blob.total_bytes / kLeastBytesPerSecond);
  blob.deadline = blob.began + blob.paging.grace + std::min(at_least, kLongestBlob);
  std::vector<async::Task<void>> lanes;
  for (std::size_t i = 0; i < kPagesAtOnce; ++i) lanes.push_back(fetch_rest(blob));
  co_await async::run_all(std::move(lanes));
  if (blob.error) co_return fail(std::move(*blob.error));
  if (blob.next_offset < blob.total_bytes) co_return fail(ErrorCode::kUnavailable, "cancelled");
  co_return std::move(blob.bytes);
}

async::Task<Result<std::string>> SourcePeer::fetch_tensor_set(Digest digest, Paging paging) {
  co_return co_await fetch_pages(proto::PAGE_TENSOR_SET, digest, {}, std::move(paging));
}

async::Task<Result<std::string>> SourcePeer::fetch_tile_digests(Digest root, Paging paging) {
  co_return co_await fetch_pages(proto::PAGE_TILE_DIGESTS, root, {}, std::move(paging));
}

async::Task<Result<std::string>> SourcePeer::fetch_layout(Digest digest, Paging paging) {
  co_return co_await fetch_pages(proto::PAGE_LAYOUT, digest, {}, std::move(paging));
}

async::Task<Result<std::string>> SourcePeer::fetch_file(Digest root, std::string file,
                                                        Paging paging) {
  co_return co_await fetch_pages(proto::PAGE_FILE, root, std::move(file), std::move(paging));
}

proto::OpenSessionRequest SourcePeer::request_for(SessionRequest wanted) const {
  proto::OpenSessionRequest request;
  *request.mutable_puller() = std::move(wanted.self);
  request.set_source_incarnation(source_.node().incarnation());
  *request.mutable_id() = rpc::to_proto(wanted.id);
  *request.mutable_root() = rpc::to_proto(wanted.root);
  *request.mutable_layout() = source_.layout();
  *request.mutable_grant() = std::move(wanted.grant);
  for (auto& transport : wanted.transports) request.add_transports(std::move(transport));
  for (auto& host : rpc::local_hosts()) request.add_stream_hosts(std::move(host));
  return request;
}

async::Task<Result<PeerSession>> SourcePeer::open_session(SessionRequest wanted,
                                                          std::chrono::milliseconds deadline) {
  const trace::Context trace = wanted.trace;
  CO_TRY(const auto response, co_await rpc::call<proto::AGENT_OPEN_SESSION>(
                                  client_, request_for(std::move(wanted)), deadline, trace));
  co_return read_session(response);
}

async::Task<Result<SourcePeer::BenchSession>> SourcePeer::open_bench_session(
    std::vector<std::string> transports, std::chrono::milliseconds deadline) {
  proto::DrillRequest request;
  for (auto& transport : transports) {
    request.mutable_open_bench()->add_transports(std::move(transport));
  }
  CO_TRY(const auto response,
         co_await rpc::call<proto::DRILL>(client_, std::move(request), deadline));
  BenchSession opened;
  CO_TRY(opened.session, read_session(response.opened()));
  if (opened.session.regions.size() != 1) {
    co_return fail(ErrorCode::kInvalid, "source {} opened {} regions for a benchmark, not 1",
                   name(), opened.session.regions.size());
  }
  opened.bytes = response.opened().regions(0).size_bytes();
  co_return opened;
}

Result<PeerSession> SourcePeer::read_session(const proto::OpenSessionResponse& response) const {
  PeerSession session;
  session.max_bytes_per_second = response.max_bytes_per_second();
  TRY(session.token, SessionToken::from_bytes(response.token()));
  for (const auto& region : response.regions()) {
    if (region.segment() != session.regions.size()) {
      return fail(ErrorCode::kInvalid, "source {} listed its segments out of order", name());
    }
    session.regions.push_back({region.region(), region.generation()});
  }
  for (const auto& offer : response.offers()) {
    session.offers.push_back({offer.transport(), offer.endpoint(), offer.max_paths()});
  }
  return session;
}

async::Task<Result<std::string>> SourcePeer::connect_paths(SessionToken token,
                                                           std::string transport,
                                                           std::string request,
                                                           std::chrono::milliseconds deadline) {
  proto::ConnectPathsRequest message;
  message.set_token(token.to_bytes());
  message.set_transport(std::move(transport));
  message.set_request(std::move(request));
  CO_TRY(auto response,
         co_await rpc::call<proto::AGENT_CONNECT_PATHS>(client_, std::move(message), deadline));
  co_return std::move(*response.mutable_response());
}

async::Task<void> SourcePeer::close_session(std::shared_ptr<SourcePeer> peer, SessionToken token) {
  if (!peer->connected()) co_return;
  proto::CloseSessionRequest request;
  request.set_token(token.to_bytes());
  // A failure changes nothing: the source ends the session as well when this connection closes.
  (void)co_await rpc::call<proto::AGENT_CLOSE_SESSION>(peer->client_, std::move(request),
                                                       kCloseDeadline);
}

async::Task<void> SourcePeer::keep_alive(std::shared_ptr<SourcePeer> peer) {
  auto answer = co_await rpc::call<proto::AGENT_STATUS>(peer->client_, {}, kKeepAliveDeadline);
  if (!answer && answer.error().code() == ErrorCode::kTimeout) peer->client_->close();
}

async::Task<void> SourcePeer::renew_grant(std::shared_ptr<SourcePeer> peer, SessionRequest wanted,
                                          SessionToken token) {
  proto::OpenDirectRequest request;
  request.set_model(wanted.id.model);
  request.set_version(wanted.id.version);
  request.set_puller_incarnation(wanted.self.incarnation());
  auto answer = co_await rpc::call<proto::AGENT_OPEN_DIRECT>(peer->client_, std::move(request),
                                                             kKeepAliveDeadline);
  if (!answer || answer->sources().empty()) {
    log::info("pull.renew", "source", peer->name(), "error",
              answer ? Error{ErrorCode::kUnavailable, "no copy can be read now"} : answer.error());
    co_return;
  }
  wanted.grant = answer->sources(0).grant();
  auto renewing = renew_session(std::move(peer), std::move(wanted), token);
  co_await std::move(renewing);
}

async::Task<void> SourcePeer::renew_session(std::shared_ptr<SourcePeer> peer, SessionRequest wanted,
                                            SessionToken token) {
  proto::OpenSessionRequest request = peer->request_for(std::move(wanted));
  request.set_renews(token.to_bytes());
  auto answer = co_await rpc::call<proto::AGENT_OPEN_SESSION>(peer->client_, std::move(request),
                                                              kKeepAliveDeadline);
  if (answer) co_return;
  log::info("pull.renew", "source", peer->name(), "error", answer.error());
  if (answer.error().code() == ErrorCode::kTimeout) peer->client_->close();
}

async::Task<Result<void>> SourcePeer::watch_have(std::shared_ptr<SourcePeer> peer,
                                                 SessionToken token, TileIndex tile_count,
                                                 OnHave on_have) {
  proto::WatchHaveRequest request;
  request.set_token(token.to_bytes());
  // An update that makes no sense is skipped: the next full one makes up for it.
  std::function<void(std::string)> on_event = [tile_count, on_have = std::move(on_have),
                                               name = peer->name()](const std::string& body) {
    const auto update = rpc::parse_body<proto::HaveUpdate>(body);
    auto runs = update ? rpc::from_proto(update->held(), tile_count)
                       : Result<rpc::TileRuns>(fail(update.error()));
    if (!runs) {
      log::warn("pull.have", "source", name, "error", runs.error());
      return;
    }
    on_have(std::move(*runs), update->all());
  };
  auto ended = co_await peer->client_->call_raw(
      proto::AGENT_WATCH_HAVE, request.SerializeAsString(), kWatchDeadline, std::move(on_event));
  if (!ended) co_return fail(std::move(ended).error());
  co_return Result<void>();
}

async::Task<Result<std::vector<std::string>>> SourcePeer::prove_ranges(
    proto::ProveRangesRequest request) {
  const int asked = request.items_size();
  CO_TRY(const auto response, co_await rpc::call<proto::AGENT_PROVE_RANGES>(
                                  client_, std::move(request), kProofDeadline));
  if (response.proofs_size() != asked) {
    co_return fail(ErrorCode::kCorrupt, "source {} sent {} proofs for {} ranges", name(),
                   response.proofs_size(), asked);
  }
  co_return std::vector<std::string>(response.proofs().begin(), response.proofs().end());
}

}  // namespace rekindle::pull
