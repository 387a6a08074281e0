#include "recovery/agent/metadata_pages.h"

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "recovery/pull/tile_verifier.h"
#include "recovery/rpc/convert.h"
#include "src/async/offload.h"
#include "src/base/units.h"

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
      const auto leaves = std::as_bytes(std::span(checkpoint->tile_digests));
      blob.emplace(reinterpret_cast<const char*>(leaves.data()), leaves.size());
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

}  // namespace rekindle::agent
