#include "recovery/pull/verified_file.h"

#include <cstring>
#include <optional>
#include <utility>

#include "src/store/fault_guard.h"

namespace rekindle::pull {

Result<void> check_file(const Checkpoint& checkpoint, TensorIndex tensor,
                        std::string_view content) {
  const TensorInfo& info = checkpoint.tensors[tensor];
  const TileGrid& grid = checkpoint.tiles.grid(tensor);
  bool good = content.size() == info.size_bytes();
  for (std::uint64_t tile = 0; good && tile < grid.tile_count(); ++tile) {
    good = digest_tile(info, grid, tile, as_bytes(content), Box::whole(info.shape)) ==
           checkpoint.tile_digests[checkpoint.tiles.first_tile(tensor) + tile];
  }
  if (!good) return fail(ErrorCode::kCorrupt, "{} does not match its digest", info.name);
  return {};
}

Result<std::string> read_verified_file(const Checkpoint& checkpoint, const Layout& layout,
                                       TensorIndex tensor, const ArrayOf& array_of) {
  const TensorInfo& info = checkpoint.tensors[tensor];
  std::optional<Error> why;
  for (const LayoutEntry& entry : layout.entries_of(tensor)) {
    if (entry.box != Box::whole(info.shape)) continue;
    const auto bytes = array_of(entry);
    // Allocated before the guard: a fault leaves it by longjmp.
    std::string content(bytes.size(), '\0');
    auto usable = store::guard_mapping_access(info.name.c_str(), [&] {
      if (!bytes.empty()) std::memcpy(content.data(), bytes.data(), bytes.size());
    });
    if (usable) usable = check_file(checkpoint, tensor, content);
    if (usable) return content;
    why = std::move(usable).error();
  }
  if (why) return fail(std::move(*why));
  return fail(ErrorCode::kNotFound, "{} is not held whole here", info.name);
}

}  // namespace rekindle::pull
