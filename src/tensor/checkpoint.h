#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/tensor/layout.h"
#include "src/tensor/tensor_set.h"
#include "src/tensor/tile.h"
#include "src/tensor/version_signature.h"

namespace rekindle {

// One (model, version), independent of the place of its bytes. Immutable, shared.
struct Checkpoint {
  ModelVersion id;
  TensorSet tensors;
  TileMap tiles;
  std::vector<Digest> tile_digests;  // one per tile: the leaves of the root
  Digest root;
  // Valid ones, of the root.
  std::vector<VersionSignature> signatures = {};

  // Checks the count of digests and that, with the id and the tensors, they hash to `root`
  // (kCorrupt). Leaves out signatures that are not valid.
  static Result<std::shared_ptr<const Checkpoint>> create(
      ModelVersion id, TensorSet tensors, std::vector<Digest> tile_digests, const Digest& root,
      std::span<const VersionSignature> signatures = {});
};

// The same checkpoint with these signatures as well, where they are valid.
std::shared_ptr<const Checkpoint> with_signatures(std::shared_ptr<const Checkpoint> checkpoint,
                                                  std::span<const VersionSignature> signatures);

// Leaves as they travel and lie on disk: one after the other, 32 bytes each. The view is valid as
// long as the digests.
std::string_view digest_bytes(std::span<const Digest> digests);
// kCorrupt: not a whole number of digests.
Result<std::vector<Digest>> parse_digests(std::string_view bytes);

// Whether the layouts of a joint publication ascend, each once, and `layout` is one of them.
bool lists_layout(std::span<const Digest> ascending, const Digest& layout);

struct PartDigest {
  TileIndex tile = 0;
  Digest digest;
  // Where the tile's kept proofs begin in Manifest::part_proofs.
  std::uint64_t proofs_begin = 0;
  bool operator==(const PartDigest&) const = default;
};

// A checkpoint and one layout of it: the NAME.manifest file (proto/manifest.proto inside a checked
// envelope, docs/reference/formats.md).
struct Manifest {
  std::shared_ptr<const Checkpoint> checkpoint;
  Layout layout;
  std::uint64_t generation = 0;
  // For tiles of which the layout holds a part only: part_digest() (held_tile.h) of that part, made
  // when it was verified. Ascending tiles.
  std::vector<PartDigest> part_digests = {};
  // The kept proofs (held_tile.h) of these tiles, joined. Empty: none are kept.
  std::string part_proofs = {};
  // Of a joint publication: the layouts whose union is the version, ascending. This one is one of
  // them.
  std::vector<Digest> part_layouts = {};

  std::string serialize() const;
  static Result<Manifest> parse(std::string_view bytes);
};

}  // namespace rekindle
