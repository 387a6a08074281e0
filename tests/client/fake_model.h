#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "proto/worker.pb.h"
#include "src/base/unique_fd.h"
#include "src/tensor/layout.h"
#include "src/tensor/tile.h"

// A small checkpoint in memory files. Every byte of it is known.
namespace rekindle::client::testing {

// Byte `index` of the row-major array of a whole tensor.
std::uint8_t byte_of(std::string_view tensor, std::uint64_t index);

class FakeModel {
 public:
  // Whole tensors, in segments of at most `max_segment_bytes`.
  explicit FakeModel(std::uint64_t max_segment_bytes = std::uint64_t{1} << 20);
  // A copy that holds only these boxes.
  FakeModel(std::vector<TensorInfo> tensors, std::vector<TensorBox> boxes,
            std::uint64_t max_segment_bytes);

  // One with several tiles, a scalar and an empty one.
  static std::vector<TensorInfo> small_tensors();

  const TensorSet& tensors() const { return tensors_; }
  const Layout& layout() const { return layout_; }
  const TileMap& tiles() const { return tiles_; }

  // Row-major bytes of a box, as a worker should see them.
  std::string bytes_of(std::string_view tensor, const Box& box) const;

  // An Attached of session `session`. `ready`: with all tiles, or none.
  proto::AgentFrame attached(std::uint64_t call, std::uint64_t session, bool ready) const;
  proto::AgentFrame ready(std::uint64_t session, TileIndex begin, TileIndex end) const;
  // Opened for reading.
  std::vector<UniqueFd> segments() const;

  TileIndex first_tile(std::string_view tensor) const;
  TileIndex end_tile(std::string_view tensor) const;

 private:
  void fill(const PackedLayout& packed);

  TensorSet tensors_;
  Layout layout_;
  TileMap tiles_;
  std::vector<UniqueFd> files_;
};

}  // namespace rekindle::client::testing
