#include "recovery/agent/peer_service.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

#include "recovery/pull/tile_verifier.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/grants.h"
#include "recovery/rpc/methods.h"
#include "recovery/swarm/have_feed.h"
#include "src/async/offload.h"
#include "src/base/clock.h"
#include "src/base/units.h"
#include "src/store/fault_guard.h"
#include "src/tensor/held_tile.h"
#include "src/tensor/signature_wire.h"
#include "src/tensor/tile_proof.h"

namespace rekindle::agent {

using async::Task;

namespace {

// Arrives within the deadline of a page on a slow link.
constexpr std::uint64_t kPageBytesMax = 1 * kMiB;
constexpr std::size_t kBlobsKept = 6;

bool holds_tensor(const Served& served, TensorIndex tensor) {
  const TileMap& tiles = served.checkpoint().tiles;
  return served.complete() ||
         served.held->test_range(tiles.first_tile(tensor), tiles.first_tile(tensor + 1));
}

// Pullers of protocol 2 do not renew their grants.
constexpr std::chrono::hours kGrantOfProtocol2{1};
// Each item may hash a whole tile.
constexpr int kMaxProofItems = 1024;
// Between two slices of a call the others have their turn, and a caller that has gone is noticed.
constexpr int kProofItemsAtOnce = 32;
// Tiles that one peer may have hashed: those of a checkpoint of 256 GiB at once.
constexpr double kProofItemsPerSecond = 4096;
constexpr double kProofItemsBurst = 262'144;
// How often a watcher may hear of new tiles.
constexpr auto kWatchInterval = swarm::HaveFeed::kInterval;

// The monotonic clock of this process, as the issuer of grants for direct pulls.
std::uint64_t issuer_clock_ms() {
  return static_cast<std::uint64_t>(milliseconds(steady_now().time_since_epoch()));
}

Result<Box> box_from(const proto::ProveRangesRequest::Item& item) {
  Box box;
  TRY(box.offset, Dims::from({item.offset().data(), static_cast<std::size_t>(item.offset_size())}));
  TRY(box.extent, Dims::from({item.extent().data(), static_cast<std::size_t>(item.extent_size())}));
  return box;
}

struct ProofRequest {
  TileIndex tile = 0;
  Box whole;
  TileRange range;
  std::uint64_t element_bytes = 0;
};

Failure no_longer_right(const Served& served, TileIndex tile) {
  const Checkpoint& checkpoint = served.checkpoint();
  return fail(ErrorCode::kCorrupt, "tile {} of tensor {} no longer matches its digest here", tile,
              checkpoint.tensors[checkpoint.tiles.tensor_of(tile)].name);
}

// nullopt: the copy does not hold the whole tile. The tile is copied out first, because a fault in
// the mapping leaves by longjmp and the rest of the function owns memory.
Result<std::optional<std::string>> prove_by_tile(const Served& served,
                                                 const ProofRequest& request) {
  std::vector<std::byte> tile(request.whole.elements() * request.element_bytes);
  bool held = false;
  TRY_VOID(store::guard_mapping_access("a served copy", [&] {
    held = read_tile(
        served.checkpoint(), served.manifest->layout, request.tile,
        [&](const LayoutEntry& entry) { return served.array(entry); }, tile);
  }));
  if (!held) return std::nullopt;
  std::string proof = prove_range(tile, request.range);
  const auto bytes =
      std::span(tile).subspan(request.range.begin, request.range.end - request.range.begin);
  const auto leaf = leaf_by_proof(bytes, request.range, tile.size(), proof);
  if (!leaf || *leaf != served.checkpoint().tile_digests[request.tile]) {
    return no_longer_right(served, request.tile);
  }
  return proof;
}

// By the proof that the copy keeps of its part of the tile. nullopt: it keeps none, or not of a
// part that has the range.
Result<std::optional<std::string>> prove_by_part(const Served& served,
                                                 const ProofRequest& request) {
  const Manifest& manifest = *served.manifest;
  const auto known =
      std::ranges::lower_bound(manifest.part_digests, request.tile, {}, &PartDigest::tile);
  if (manifest.part_proofs.empty() || known == manifest.part_digests.end() ||
      known->tile != request.tile) {
    return std::nullopt;
  }
  const std::uint64_t tile_bytes = request.whole.elements() * request.element_bytes;
  for (const KeptProof& kept : kept_proofs(served.checkpoint(), manifest.layout, request.tile)) {
    if (request.range.begin < kept.range.begin || request.range.end > kept.range.end) continue;
    std::vector<std::byte> part(kept.range.end - kept.range.begin);
    TRY_VOID(store::guard_mapping_access("a served copy", [&] {
      copy_box(kept.part, served.array(*kept.entry), kept.entry->box, part, kept.part,
               request.element_bytes);
    }));
    const auto proof = std::string_view(manifest.part_proofs)
                           .substr(known->proofs_begin + kept.offset, kept.bytes);
    const auto leaf = leaf_by_proof(part, kept.range, tile_bytes, proof);
    if (!leaf || *leaf != served.checkpoint().tile_digests[request.tile]) {
      return no_longer_right(served, request.tile);
    }
    TRY(auto smaller, prove_smaller_range(part, kept.range, tile_bytes, proof, request.range));
    return smaller;
  }
  return std::nullopt;
}

Result<std::string> prove_part(const Served& served, const proto::ProveRangesRequest::Item& item) {
  const Checkpoint& checkpoint = served.checkpoint();
  if (item.tile() >= checkpoint.tiles.tile_count()) {
    return fail(ErrorCode::kInvalid, "tile {} of {}", item.tile(), checkpoint.tiles.tile_count());
  }
  if (!served.holds(item.tile())) {
    return fail(ErrorCode::kNotFound, "tile {} has not verified here yet", item.tile());
  }
  TRY(const Box part, box_from(item));
  const TensorInfo& info = checkpoint.tensors[checkpoint.tiles.tensor_of(item.tile())];
  TRY_VOID(check_box(part, info.shape));
  const Box whole = checkpoint.tiles.tile_box(item.tile());
  if (!contains(whole, part) || !is_one_run(part, whole)) {
    return fail(ErrorCode::kInvalid, "box {} is not one run of tile {}", part.to_string(),
                item.tile());
  }
  const std::uint64_t element_bytes = dtype_size_bytes(info.dtype);
  const TileRange range = range_in_tile(part, whole, element_bytes);
  const ProofRequest request{item.tile(), whole, range, element_bytes};
  TRY(std::optional<std::string> proof, prove_by_part(served, request));
  if (!proof) {
    TRY(proof, prove_by_tile(served, request));
  }
  if (proof) return std::move(*proof);
  return fail(ErrorCode::kNotFound,
              "this host neither holds tile {} of tensor {} whole nor keeps a proof of that part",
              item.tile(), info.name);
}

}  // namespace

MetadataPages::Blob MetadataPages::find(const Key& key) {
  const auto found =
      std::ranges::find(kept_, key, [](const auto& entry) -> const Key& { return entry.first; });
  if (found == kept_.end()) return nullptr;
  kept_.splice(kept_.begin(), kept_, found);
  return kept_.front().second;
}

MetadataPages::Blob MetadataPages::keep(const Key& key, std::string blob) {
  kept_.emplace_front(key, std::make_shared<const std::string>(std::move(blob)));
  if (kept_.size() > kBlobsKept) kept_.pop_back();
  return kept_.front().second;
}

Result<void> MetadataPages::check(const std::set<Digest>* readable,
                                  const proto::GetPageRequest& request) const {
  if (readable == nullptr) return {};
  const Digest digest = rpc::from_proto(request.digest());
  const bool named_by_root =
      request.kind() == proto::PAGE_TILE_DIGESTS || request.kind() == proto::PAGE_FILE;
  const auto has_it = [&](const auto& copy) {
    const auto& [key, served] = copy;
    if (!readable->contains(key.root)) return false;
    if (request.kind() == proto::PAGE_LAYOUT) return key.layout == digest;
    return request.kind() == proto::PAGE_TENSOR_SET &&
           served.checkpoint().tensors.digest() == digest;
  };
  if (named_by_root ? readable->contains(digest) : std::ranges::any_of(served_.all(), has_it)) {
    return {};
  }
  return fail(ErrorCode::kDenied,
              "{} gives metadata for a grant only, and this connection has shown none for {} {}: "
              "open the pull again",
              identity_.node_id, proto::PageKind_Name(request.kind()), digest.hex());
}

Task<Result<proto::GetPageResponse>> MetadataPages::get(proto::GetPageRequest request) {
  const Key key{request.kind(), rpc::from_proto(request.digest()), request.name()};
  Blob blob = find(key);
  if (blob == nullptr && request.kind() == proto::PAGE_FILE) {
    CO_TRY(auto content, co_await read_file(request));
    // Another call may have been faster.
    blob = find(key);
    if (blob == nullptr) blob = keep(key, std::move(content));
  }
  if (blob == nullptr) {
    CO_TRY(auto made, serialize(request));
    blob = keep(key, std::move(made));
  }
  if (request.offset() > blob->size()) {
    co_return fail(ErrorCode::kInvalid, "page offset {} of {} bytes", request.offset(),
                   blob->size());
  }
  proto::GetPageResponse response;
  response.set_total_bytes(blob->size());
  response.set_data(blob->substr(request.offset(), kPageBytesMax));
  co_return response;
}

Result<std::string> MetadataPages::serialize(const proto::GetPageRequest& request) const {
  const Digest digest = rpc::from_proto(request.digest());
  std::optional<std::string> blob;
  if (request.kind() == proto::PAGE_TENSOR_SET) blob = served_.tensor_set_bytes(digest);
  if (request.kind() == proto::PAGE_LAYOUT) blob = served_.layout_bytes(digest);
  if (request.kind() == proto::PAGE_TILE_DIGESTS) {
    if (const auto checkpoint = served_.checkpoint(digest)) {
      blob = digest_bytes(checkpoint->tile_digests);
    }
  }
  if (!blob) return fail(not_held(request));
  return std::move(*blob);
}

// Reads the file from the first copy whose bytes match their digests. It runs on the pool, because
// a file has up to 64 MiB.
Task<Result<std::string>> MetadataPages::read_file(proto::GetPageRequest request) {
  const Digest root = rpc::from_proto(request.digest());
  std::vector<Served> copies;
  for (const auto& [key, served] : served_.all()) {
    if (key.root == root) copies.push_back(served);
  }
  // Named, not a temporary: g++ 12 destroys captures of a temporary inside co_await twice.
  auto work = [copies = std::move(copies), none = not_held(request),
               name = std::string(kFileTensorPrefix) + request.name()]() -> Result<std::string> {
    std::optional<Error> why;
    for (const Served& copy : copies) {
      const auto tensor = copy.checkpoint().tensors.find(name);
      if (!tensor || !holds_tensor(copy, *tensor)) continue;
      auto content =
          pull::read_verified_file(copy.checkpoint(), copy.manifest->layout, *tensor,
                                   [&](const LayoutEntry& entry) { return copy.array(entry); });
      if (content) return content;
      if (content.error().code() != ErrorCode::kNotFound) why = std::move(content).error();
    }
    return fail(why ? std::move(*why) : none);
  };
  co_return co_await async::offload(digest_pool_, std::move(work));
}

Error MetadataPages::not_held(const proto::GetPageRequest& request) const {
  return {ErrorCode::kNotFound,
          fmt::format("{} does not hold {} {}{}", identity_.node_id,
                      proto::PageKind_Name(request.kind()), rpc::from_proto(request.digest()).hex(),
                      request.name().empty() ? "" : " " + request.name())};
}

PeerService::PeerService(boost::asio::any_io_executor executor, PeerSessions::Parts parts,
                         WorkerPool& digest_pool, PeerSessions::Options options)
    : identity_(parts.identity),
      served_(parts.served),
      grant_clock_(parts.grant_clock),
      digest_pool_(digest_pool),
      may_read_(options.may_read),
      sessions_(std::move(executor), std::move(parts), std::move(options)),
      pages_(identity_, served_, digest_pool) {}

void PeerService::install(rpc::RpcServer& server) {
  rpc::handle<proto::AGENT_OPEN_DIRECT>(server, [this](rpc::Peer peer, auto request, auto) {
    return open_direct(std::move(peer), std::move(request));
  });
  rpc::handle<proto::AGENT_GET_PAGE>(server, [this](rpc::Peer peer, auto request, auto) {
    return get_page(std::move(peer), std::move(request));
  });
  rpc::handle<proto::AGENT_OPEN_SESSION>(server, [this](rpc::Peer peer, auto request, auto) {
    return sessions_.open(std::move(peer), std::move(request));
  });
  rpc::handle<proto::AGENT_CONNECT_PATHS>(server, [this](rpc::Peer peer, auto request, auto) {
    return sessions_.connect_paths(std::move(peer), std::move(request));
  });
  rpc::handle<proto::AGENT_CLOSE_SESSION>(server, [this](rpc::Peer peer, auto request, auto) {
    return sessions_.close(std::move(peer), std::move(request));
  });
  rpc::handle<proto::AGENT_PROVE_RANGES>(server, [this](rpc::Peer peer, auto request, auto events) {
    return prove_ranges(std::move(peer), std::move(request), std::move(events));
  });
  rpc::handle<proto::AGENT_WATCH_HAVE>(server, [this](rpc::Peer peer, auto request, auto events) {
    return watch_have(std::move(peer), std::move(request), std::move(events));
  });
  server.on_peer_closed([this](const rpc::Peer& peer) { sessions_.on_disconnect(peer); });
}

Task<Result<proto::GetPageResponse>> PeerService::get_page(rpc::Peer peer,
                                                           proto::GetPageRequest request) {
  CO_TRY_VOID(sessions_.rights().show(peer, request.grant()));
  CO_TRY_VOID(pages_.check(sessions_.rights().readable(peer), request));
  request.clear_grant();
  co_return co_await pages_.get(std::move(request));
}

Task<Result<proto::OpenDirectResponse>> PeerService::open_direct(rpc::Peer peer,
                                                                 proto::OpenDirectRequest request) {
  CO_TRY_VOID(check_model_name(request.model()));
  if (may_read_) CO_TRY_VOID(co_await may_read_(peer, request.model()));
  const auto newest = served_.newest_version(request.model());
  const std::uint64_t version = request.latest() ? newest.value_or(0) : request.version();
  const ModelVersion id{request.model(), version};
  const bool named = newest || !request.latest();
  auto copies = named ? served_.find(id) : std::vector<const Served*>{};
  std::vector<CopyKey> keys;
  for (const Served* copy : copies) keys.push_back(key_of(*copy->manifest));
  // The verification of all copies begins. The caller waits for it where no copy can be read.
  std::optional<Error> unfit;
  bool verifying = false;
  for (const CopyKey& key : keys) {
    auto verified = co_await sessions_.require_verified(key, std::chrono::milliseconds(0));
    if (verified) continue;
    verifying = verifying || verified.error().code() == ErrorCode::kUnavailable;
    unfit = std::move(verified).error();
  }
  // Copies may have come and gone meanwhile.
  copies.clear();
  for (const CopyKey& key : keys) {
    const Served* copy = served_.find(key);
    if (copy != nullptr && (!copy->complete() || copy->verified())) copies.push_back(copy);
  }
  proto::OpenDirectResponse response;
  if (copies.empty() && verifying) {
    response.set_verifying(true);
    co_return response;
  }
  if (copies.empty() && unfit) co_return fail(std::move(*unfit));
  if (copies.empty()) {
    co_return fail(ErrorCode::kNotFound, "NO_SOURCE: {} does not hold {}{}", identity_.node_id,
                   request.latest() ? request.model() : id.to_string(),
                   newest ? fmt::format(" (newest here: {})", *newest) : "");
  }
  const Checkpoint& checkpoint = copies.front()->checkpoint();
  *response.mutable_id() = rpc::to_proto(id);
  *response.mutable_root() = rpc::to_proto(checkpoint.root);
  *response.mutable_tensor_set() = rpc::to_proto(checkpoint.tensors.digest());
  response.set_checkpoint_bytes(checkpoint.tensors.total_bytes());
  std::vector<VersionSignature> signatures;
  for (const Served* copy : copies) add_signatures(signatures, copy->checkpoint().signatures);
  *response.mutable_signatures() = rekindle::to_proto(signatures);
  grant_clock_.observe(identity_.incarnation,
                       identity_.key == nullptr ? "" : identity_.key->public_key(),
                       issuer_clock_ms(), steady_now());
  for (const Served* copy : copies) {
    auto* source = response.add_sources();
    source->mutable_node()->set_node_id(identity_.node_id);
    source->mutable_node()->set_incarnation(identity_.incarnation.to_bytes());
    *source->mutable_layout() = rpc::to_proto(copy->manifest->layout.digest());
    source->set_complete(copy->complete());
    if (!copy->complete()) {
      *source->mutable_held() = rpc::to_proto(copy->held->snapshot().ranges());
    }
    source->set_payload_bytes(copy->manifest->layout.payload_bytes());
    source->set_proves_parts(copy->proves_parts());
    *source->mutable_grant() = direct_grant(peer, checkpoint.root);
  }
  co_return response;
}

proto::Grant PeerService::direct_grant(const rpc::Peer& puller, const Digest& root) {
  proto::Grant grant;
  grant.set_puller_incarnation(puller.incarnation.to_bytes());
  grant.set_source_incarnation(identity_.incarnation.to_bytes());
  *grant.mutable_root() = rpc::to_proto(root);
  grant.set_issuer(identity_.incarnation.to_bytes());
  const std::chrono::milliseconds life =
      puller.public_key.empty() ? kGrantOfProtocol2 : rpc::grant_times().life;
  grant.set_expiry_ms(issuer_clock_ms() + static_cast<std::uint64_t>(life.count()));
  grant.set_serial(next_serial_++);
  rpc::sign_grant(grant, identity_);
  return grant;
}

Task<Result<proto::WatchHaveResponse>> PeerService::watch_have(rpc::Peer peer,
                                                               proto::WatchHaveRequest request,
                                                               rpc::Events events) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  CO_TRY(const auto token, SessionToken::from_bytes(request.token()));
  CO_TRY(const CopyKey copy, sessions_.copy_of(token, peer));
  if (!sessions_.begin_watch(token)) {
    co_return fail(ErrorCode::kExhausted, "this session is watched already");
  }
  auto fed = co_await feed_have(token, copy, std::move(events));
  sessions_.end_watch(token);
  if (!fed) co_return fail(std::move(fed).error());
  co_return proto::WatchHaveResponse();
}

// For as long as the session lives and the copy is being filled.
Task<Result<void>> PeerService::feed_have(SessionToken token, CopyKey copy, rpc::Events events) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  swarm::HaveFeed feed;
  while (!events->cancelled()) {
    const Served* served = sessions_.contains(token) ? served_.find(copy) : nullptr;
    if (served == nullptr) {
      co_return fail(ErrorCode::kStale, "{} does not fill this copy any more: look it up again",
                     identity_.node_id);
    }
    if (served->complete()) co_return Result<void>();
    if (auto update = feed.next(served->held->snapshot(), steady_now())) {
      proto::HaveUpdate message;
      *message.mutable_held() = rpc::to_proto(update->held);
      message.set_all(update->all);
      events->send(message);
    }
    co_await async::sleep_for(kWatchInterval);
  }
  co_return fail(ErrorCode::kUnavailable, "cancelled");
}

Task<Result<proto::ProveRangesResponse>> PeerService::prove_ranges(
    rpc::Peer peer, proto::ProveRangesRequest request, rpc::Events events) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  CO_TRY(const auto token, SessionToken::from_bytes(request.token()));
  CO_TRY(const CopyKey copy, sessions_.copy_of(token, peer));
  const Served* served =
      served_.find({copy.id, rpc::from_proto(request.root()), rpc::from_proto(request.layout())});
  if (served == nullptr) {
    co_return fail(ErrorCode::kStale, "{} no longer holds this layout: look it up again",
                   identity_.node_id);
  }
  if (request.items_size() > kMaxProofItems) {
    co_return fail(ErrorCode::kInvalid, "{} ranges in one call, at most {}", request.items_size(),
                   kMaxProofItems);
  }
  CO_TRY_VOID(rates_.take(rpc::budget_key(peer), "tiles to prove", request.items_size(),
                          kProofItemsPerSecond, kProofItemsBurst, steady_now()));
  const auto held = std::make_shared<const Served>(*served);
  const auto asked = std::make_shared<const proto::ProveRangesRequest>(std::move(request));
  const auto response = std::make_shared<proto::ProveRangesResponse>();
  for (int begin = 0; begin < asked->items_size(); begin += kProofItemsAtOnce) {
    if (events->cancelled()) co_return fail(ErrorCode::kUnavailable, "cancelled");
    // Named, not a temporary: g++ 12 destroys captures of a temporary inside co_await twice.
    auto work = [held, asked, response, begin]() -> Result<void> {
      const int end = std::min(begin + kProofItemsAtOnce, asked->items_size());
      for (int i = begin; i < end; ++i) {
        TRY(auto proof, prove_part(*held, asked->items(i)));
        response->add_proofs(std::move(proof));
      }
      return {};
    };
    CO_TRY_VOID(co_await async::offload(digest_pool_, std::move(work)));
  }
  co_return std::move(*response);
}

}  // namespace rekindle::agent
