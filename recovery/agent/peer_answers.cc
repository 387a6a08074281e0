// PeerService: what is asked beside sessions. Pages of metadata, proofs of parts of tiles, and
// what a copy that is being filled holds.
#include <span>
#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

#include "recovery/agent/peer_service.h"
#include "recovery/pull/verified_file.h"
#include "recovery/rpc/convert.h"
#include "recovery/swarm/have_feed.h"
#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/units.h"
#include "src/store/fault_guard.h"
#include "src/tensor/held_tile.h"
#include "src/tensor/tile_proof.h"

namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::uint64_t kPageBytesMax =
    1 * kMiB;  // arrives within a page's deadline on a slow link
constexpr int kMaxProofItems = 4096;
constexpr std::chrono::milliseconds kWatchInterval{100};

Result<Box> box_from(const proto::ProveRangesRequest::Item& item) {
  Box box;
  TRY(box.offset, Dims::from({item.offset().data(), static_cast<std::size_t>(item.offset_size())}));
  TRY(box.extent, Dims::from({item.extent().data(), static_cast<std::size_t>(item.extent_size())}));
  return box;
}

// Proves a part of a tile that this copy holds whole. The tile is copied out first: what follows
// owns memory, and a fault in the mapping leaves by longjmp.
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
  std::vector<std::byte> tile(whole.elements() * element_bytes);
  bool held = false;
  TRY_VOID(store::guard_mapping_access(info.name.c_str(), [&] {
    held = read_tile(
        checkpoint, served.manifest->layout, item.tile(),
        [&](const LayoutEntry& entry) { return served.array(entry); }, tile);
  }));
  if (!held) {
    return fail(ErrorCode::kNotFound, "tile {} of tensor {} is not held whole here", item.tile(),
                info.name);
  }
  const TileRange range = range_in_tile(part, whole, element_bytes);
  std::string proof = prove_range(tile, range);
  const auto bytes = std::span(tile).subspan(range.begin, range.end - range.begin);
  const auto leaf = leaf_by_proof(bytes, range, tile.size(), proof);
  if (!leaf || *leaf != checkpoint.tile_digests[item.tile()]) {
    return fail(ErrorCode::kCorrupt, "tile {} of tensor {} no longer matches its digest here",
                item.tile(), info.name);
  }
  return proof;
}

bool holds_tensor(const Served& served, TensorIndex tensor) {
  const TileMap& tiles = served.checkpoint().tiles;
  return served.complete() ||
         served.held->test_range(tiles.first_tile(tensor), tiles.first_tile(tensor + 1));
}

}  // namespace

Result<std::string> PeerService::make_blob(const proto::GetPageRequest& request) const {
  const Digest digest = rpc::from_proto(request.digest());
  std::optional<std::string> blob;
  if (request.kind() == proto::PAGE_TENSOR_SET) blob = served_.tensor_set_bytes(digest);
  if (request.kind() == proto::PAGE_LAYOUT) blob = served_.layout_bytes(digest);
  if (request.kind() == proto::PAGE_TILE_DIGESTS) {
    if (const auto checkpoint = served_.checkpoint(digest)) {
      const auto leaves = std::as_bytes(std::span(checkpoint->tile_digests));
      blob.emplace(reinterpret_cast<const char*>(leaves.data()), leaves.size());
    }
  }
  if (!blob) return fail(not_held(request));
  return std::move(*blob);
}

// From the first copy whose bytes match their leaves. It digests them on the pool: a file has up to
// 64 MiB.
Task<Result<std::string>> PeerService::read_file(proto::GetPageRequest request) {
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

Error PeerService::not_held(const proto::GetPageRequest& request) const {
  return {ErrorCode::kNotFound,
          fmt::format("{} does not hold {} {}{}", identity_.node_id,
                      proto::PageKind_Name(request.kind()), rpc::from_proto(request.digest()).hex(),
                      request.name().empty() ? "" : " " + request.name())};
}

Task<Result<proto::GetPageResponse>> PeerService::get_page(rpc::Peer, proto::GetPageRequest request,
                                                           rpc::Events) {
  const PageCache::Key key{request.kind(), rpc::from_proto(request.digest()), request.name()};
  auto blob = pages_.find(key);
  if (blob == nullptr && request.kind() == proto::PAGE_FILE) {
    CO_TRY(auto content, co_await read_file(request));
    blob = pages_.find(key);  // another call may have been faster
    if (blob == nullptr) blob = pages_.insert(key, std::move(content));
  }
  if (blob == nullptr) {
    CO_TRY(auto made, make_blob(request));
    blob = pages_.insert(key, std::move(made));
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

// As long as the session lives and the copy is being filled.
Task<Result<proto::WatchHaveResponse>> PeerService::watch_have(rpc::Peer peer,
                                                               proto::WatchHaveRequest request,
                                                               rpc::Events events) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  CO_TRY(const auto token, SessionToken::from_bytes(request.token()));
  const auto opened = sessions_.find(token);
  if (opened == sessions_.end() || opened->second.connection != connection_of(peer)) {
    co_return fail(ErrorCode::kDenied, "no such session: open one first");
  }
  if (std::exchange(opened->second.watched, true)) {
    co_return fail(ErrorCode::kExhausted, "this session is watched already");
  }
  const CopyKey copy = opened->second.copy;
  swarm::HaveFeed feed;
  while (!events->cancelled()) {
    const Served* served = sessions_.contains(token) ? served_.find(copy) : nullptr;
    if (served == nullptr) {
      co_return fail(ErrorCode::kStale, "{} does not fill this copy any more: look it up again",
                     identity_.node_id);
    }
    if (served->complete()) co_return proto::WatchHaveResponse();
    if (auto update = feed.next(served->held->snapshot(), std::chrono::steady_clock::now())) {
      proto::HaveUpdate message;
      *message.mutable_held() = rpc::to_proto(update->held);
      message.set_all(update->all);
      events->send(message);
    }
    co_await async::sleep_for(kWatchInterval);
  }
  const auto left = sessions_.find(token);
  if (left != sessions_.end()) left->second.watched = false;
  co_return fail(ErrorCode::kUnavailable, "cancelled");
}

Task<Result<proto::ProveRangesResponse>> PeerService::prove_ranges(
    rpc::Peer, proto::ProveRangesRequest request, rpc::Events) {
  CO_TRY(const auto token, SessionToken::from_bytes(request.token()));
  const auto opened = sessions_.find(token);
  if (opened == sessions_.end()) {
    co_return fail(ErrorCode::kDenied, "no such session: open one first");
  }
  const Served* served = served_.find(
      {opened->second.copy.id, rpc::from_proto(request.root()), rpc::from_proto(request.layout())});
  if (served == nullptr) {
    co_return fail(ErrorCode::kStale, "{} no longer holds this layout: look it up again",
                   identity_.node_id);
  }
  if (request.items_size() > kMaxProofItems) {
    co_return fail(ErrorCode::kInvalid, "{} ranges in one call, at most {}", request.items_size(),
                   kMaxProofItems);
  }
  // Named, not a temporary: g++ 12 destroys captures of a temporary inside co_await twice.
  auto work = [copy = *served,
               request = std::move(request)]() -> Result<proto::ProveRangesResponse> {
    proto::ProveRangesResponse response;
    for (const auto& item : request.items()) {
      TRY(auto proof, prove_part(copy, item));
      response.add_proofs(std::move(proof));
    }
    return response;
  };
  co_return co_await async::offload(digest_pool_, std::move(work));
}

}  // namespace rekindle::agent
