#include "src/tensor/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "proto/manifest.pb.h"
#include "src/base/blake3.h"
#include "src/base/version.h"
#include "src/tensor/canonical.h"
#include "src/tensor/held_tile.h"
#include "src/tensor/signature_wire.h"

namespace rekindle {

namespace {

// The envelope: magic, body length, body, BLAKE3 of the body.
constexpr std::string_view kManifestMagic = "RKMANI02";
// Of the magic. The number of the format follows.
constexpr std::size_t kNameBytes = 6;
constexpr std::size_t kEnvelopeBytes = 8 + 8 + sizeof(Digest);

Failure corrupt(std::string_view why) { return fail(ErrorCode::kCorrupt, "manifest: {}", why); }

Result<std::string_view> open_envelope(std::string_view bytes) {
  canonical::Reader in(bytes);
  const std::string_view magic = in.raw(kManifestMagic.size());
  if (magic != kManifestMagic) {
    const std::string_view format = magic.substr(std::min(kNameBytes, magic.size()));
    const bool of_another_release =
        magic.starts_with(kManifestMagic.substr(0, kNameBytes)) &&
        std::ranges::all_of(format, [](char c) { return '0' <= c && c <= '9'; });
    if (!of_another_release) return corrupt("not a manifest");
    return fail(ErrorCode::kInvalid,
                "manifest: its format is {}, this release ({}) reads {}: the copy is left as it is "
                "for the release that wrote it",
                format, software_version(), kManifestMagic.substr(kNameBytes));
  }
  const std::uint64_t size = in.u64();
  if (bytes.size() < kEnvelopeBytes || size != bytes.size() - kEnvelopeBytes) {
    return corrupt("cut short, or has a tail");
  }
  const std::string_view body = in.raw(size);
  if (in.digest() != blake3(as_bytes(body))) return corrupt("its digest does not match");
  return body;
}

Result<std::vector<PartDigest>> parse_parts(const proto::Manifest& message,
                                            const Checkpoint& checkpoint, const Layout& layout) {
  const TileIndex tile_count = checkpoint.tiles.tile_count();
  const bool proofs = !message.part_proofs().empty();
  std::uint64_t proofs_begin = 0;
  std::vector<PartDigest> parts;
  parts.reserve(static_cast<std::size_t>(message.part_digests_size()));
  for (const auto& part : message.part_digests()) {
    if (part.tile() >= tile_count || (!parts.empty() && part.tile() <= parts.back().tile)) {
      return corrupt("its part digests are not in order");
    }
    parts.push_back({part.tile(), Digest::from_bytes(part.digest()), proofs_begin});
    if (proofs) proofs_begin += total_bytes(kept_proofs(checkpoint, layout, part.tile()));
  }
  if (proofs_begin != message.part_proofs().size()) {
    return corrupt("its proofs of parts do not have the length that its layout needs");
  }
  return parts;
}

}  // namespace

Result<std::shared_ptr<const Checkpoint>> Checkpoint::create(
    ModelVersion id, TensorSet tensors, std::vector<Digest> tile_digests, const Digest& root,
    std::span<const VersionSignature> signatures) {
  TRY_VOID(check_model_name(id.model));
  TRY(TileMap tiles, TileMap::create(tensors));
  if (tile_digests.size() != tiles.tile_count()) {
    return fail(ErrorCode::kCorrupt, "{}: {} tile digests for {} tiles", id.to_string(),
                tile_digests.size(), tiles.tile_count());
  }
  const Digest actual = checkpoint_root(id, tensors, tiles, tile_digests);
  if (actual != root) {
    return fail(ErrorCode::kCorrupt, "{}: the tile digests hash to {}, not to the root {}",
                id.to_string(), actual.hex(), root.hex());
  }
  auto valid = valid_signatures(signatures, id, root);
  return std::make_shared<const Checkpoint>(Checkpoint{std::move(id), std::move(tensors),
                                                       std::move(tiles), std::move(tile_digests),
                                                       root, std::move(valid)});
}

std::shared_ptr<const Checkpoint> with_signatures(std::shared_ptr<const Checkpoint> checkpoint,
                                                  std::span<const VersionSignature> signatures) {
  auto all = checkpoint->signatures;
  if (!add_signatures(all, valid_signatures(signatures, checkpoint->id, checkpoint->root))) {
    return checkpoint;
  }
  Checkpoint copy = *checkpoint;
  copy.signatures = std::move(all);
  return std::make_shared<const Checkpoint>(std::move(copy));
}

bool lists_layout(std::span<const Digest> ascending, const Digest& layout) {
  return std::ranges::adjacent_find(ascending, std::ranges::greater_equal()) == ascending.end() &&
         std::ranges::binary_search(ascending, layout);
}

std::string_view digest_bytes(std::span<const Digest> digests) {
  const auto bytes = std::as_bytes(digests);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Result<std::vector<Digest>> parse_digests(std::string_view bytes) {
  if (bytes.size() % sizeof(Digest) != 0) {
    return fail(ErrorCode::kCorrupt, "tile digests: {} bytes are not a multiple of {}",
                bytes.size(), sizeof(Digest));
  }
  std::vector<Digest> digests(bytes.size() / sizeof(Digest));
  if (!bytes.empty()) std::memcpy(digests.data(), bytes.data(), bytes.size());
  return digests;
}

std::string Manifest::serialize() const {
  proto::Manifest message;
  message.mutable_id()->set_model(checkpoint->id.model);
  message.mutable_id()->set_version(checkpoint->id.version);
  message.set_tensor_set(checkpoint->tensors.serialize());
  message.set_layout(layout.serialize());
  message.set_tile_digests(std::string(digest_bytes(checkpoint->tile_digests)));
  message.mutable_root()->set_value(checkpoint->root.to_bytes());
  message.set_generation(generation);
  for (const PartDigest& part : part_digests) {
    auto* added = message.add_part_digests();
    added->set_tile(part.tile);
    added->set_digest(part.digest.to_bytes());
  }
  message.set_part_proofs(part_proofs);
  message.set_part_layouts(std::string(digest_bytes(part_layouts)));
  *message.mutable_signatures() = to_proto(checkpoint->signatures);
  const std::string body = message.SerializeAsString();
  canonical::Writer out;
  out.raw(kManifestMagic);
  out.u64(body.size());
  out.raw(body);
  out.digest(blake3(as_bytes(body)));
  return out.take();
}

Result<Manifest> Manifest::parse(std::string_view bytes) {
  TRY(const std::string_view body, open_envelope(bytes));
  proto::Manifest message;
  if (body.size() > std::size_t{1} << 30 ||
      !message.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
    return corrupt("its body does not parse");
  }
  TRY(TensorSet tensors, TensorSet::parse(message.tensor_set()));
  TRY(Layout layout, Layout::parse(tensors, message.layout()));
  TRY(auto digests, parse_digests(message.tile_digests()));
  TRY(auto checkpoint,
      Checkpoint::create({message.id().model(), message.id().version()}, std::move(tensors),
                         std::move(digests), Digest::from_bytes(message.root().value()),
                         from_proto(message.signatures())));
  TRY(auto parts, parse_parts(message, *checkpoint, layout));
  TRY(auto part_layouts, parse_digests(message.part_layouts()));
  if (!part_layouts.empty() && !lists_layout(part_layouts, layout.digest())) {
    return corrupt("its layout is not one of its joint publication");
  }
  return Manifest{std::move(checkpoint),
                  std::move(layout),
                  message.generation(),
                  std::move(parts),
                  std::move(*message.mutable_part_proofs()),
                  std::move(part_layouts)};
}

}  // namespace rekindle
