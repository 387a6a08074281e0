// A manifest. By the first byte: the file as it is; a body in a valid envelope; or a body whose
// root is made to match its digests first, so that everything behind that check is reached.
#include <cstdint>
#include <string>

#include "proto/manifest.pb.h"
#include "src/base/blake3.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/held_tile.h"
#include "tests/fuzz/fuzz_check.h"

using namespace rekindle;

namespace {

void append(std::string& bytes, std::uint64_t value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string in_envelope(const std::string& body) {
  std::string bytes = "RKMANI02";
  append(bytes, body.size());
  bytes += body;
  return bytes + blake3(as_bytes(body)).to_bytes();
}

std::string with_right_root(const std::string& body) {
  proto::Manifest message;
  if (!message.ParseFromString(body)) return body;
  const auto set = TensorSet::parse(message.tensor_set());
  if (!set) return body;
  const auto tiles = TileMap::create(*set);
  const auto digests = parse_digests(message.tile_digests());
  if (!tiles || !digests || digests->size() != tiles->tile_count()) return body;
  const ModelVersion id{message.id().model(), message.id().version()};
  message.mutable_root()->set_value(checkpoint_root(id, *set, *tiles, *digests).to_bytes());
  return message.SerializeAsString();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] % 3 == 1) bytes = in_envelope(bytes);
  if (data[0] % 3 == 2) bytes = in_envelope(with_right_root(bytes));
  const auto manifest = Manifest::parse(bytes);
  if (!manifest) return 0;
  const Checkpoint& checkpoint = *manifest->checkpoint;
  FUZZ_CHECK(check_model_name(checkpoint.id.model).has_value());
  FUZZ_CHECK(checkpoint.tile_digests.size() == checkpoint.tiles.tile_count());
  FUZZ_CHECK(checkpoint_root(checkpoint.id, checkpoint.tensors, checkpoint.tiles,
                             checkpoint.tile_digests) == checkpoint.root);
  const LayoutTiles tiles = tiles_of_layout(checkpoint, manifest->layout);
  FUZZ_CHECK(tiles.held.size() == checkpoint.tiles.tile_count());
  const auto again = Manifest::parse(manifest->serialize());
  FUZZ_CHECK(again.has_value());
  FUZZ_CHECK(again->layout.digest() == manifest->layout.digest());
  FUZZ_CHECK(again->part_digests == manifest->part_digests);
  return 0;
}
