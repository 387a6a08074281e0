#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/tensor/tensor_set.h"

namespace rekindle {

struct TensorBox {
  TensorIndex tensor = 0;
  Box box;
  auto operator<=>(const TensorBox&) const = default;
};

struct SegmentSpec {
  std::string name;              // file name without directory: "model-00001-of-00004.safetensors"
  std::uint64_t size_bytes = 0;  // of the file, header included
  bool operator==(const SegmentSpec&) const = default;
};

// One box of one tensor, row-major and contiguous at an offset of a segment file.
struct LayoutEntry {
  TensorIndex tensor = 0;
  Box box;
  std::uint32_t segment = 0;
  std::uint64_t offset_bytes = 0;  // from the start of the file
  bool operator==(const LayoutEntry&) const = default;
};

// Boxes of one tensor in a layout are compared pairwise. This bounds the work that a hostile layout
// can cause.
inline constexpr std::size_t kMaxBoxesPerTensor = 1024;

// Which boxes lie where: address-free, content-addressed. Entries are sorted by (tensor, box);
// boxes of one tensor do not overlap; byte ranges of one segment do not overlap.
class Layout {
 public:
  // kInvalid when an entry breaks a rule above, or does not fit its tensor or segment.
  static Result<Layout> create(const TensorSet& tensors, std::vector<SegmentSpec> segments,
                               std::vector<LayoutEntry> entries);

  std::span<const SegmentSpec> segments() const { return segments_; }
  std::span<const LayoutEntry> entries() const { return entries_; }
  std::span<const LayoutEntry> entries_of(TensorIndex tensor) const;
  std::vector<TensorBox> boxes() const;
  std::uint64_t payload_bytes() const { return payload_bytes_; }  // tensors only, no headers
  std::uint64_t segment_bytes() const;                            // whole files

  // Canonical bytes (docs/reference/formats.md) and their BLAKE3.
  std::string serialize() const;
  static Result<Layout> parse(const TensorSet& tensors, std::string_view canonical);
  // The number of entries that canonical bytes announce, without reading them.
  static Result<std::size_t> count_entries(std::string_view canonical);
  const Digest& digest() const { return digest_; }
  const Digest& tensor_set_digest() const { return tensor_set_; }

 private:
  Layout() = default;
  static Result<Layout> check(const TensorSet& tensors, std::vector<SegmentSpec> segments,
                              std::vector<LayoutEntry> entries);
  std::vector<SegmentSpec> segments_;
  std::vector<LayoutEntry> entries_;
  std::vector<std::uint32_t> first_entry_;  // per tensor, plus one past the end
  std::vector<bool> whole_;                 // per entry: the box is the whole tensor
  Digest tensor_set_;
  std::uint64_t payload_bytes_ = 0;
  Digest digest_;
};

// How many tensors have a box in the layout; a checkpoint's small files are not counted.
std::uint32_t count_tensors(const TensorSet& tensors, const Layout& layout);

// Lays `boxes` out as safetensors files of at most `max_segment_bytes` (a tensor is never split
// over files), in the order of the tensor set, larger dtypes first inside a file so that everything
// is aligned. Names are "model.safetensors" or "model-0000i-of-0000n.safetensors"; file tensors get
// a segment of their own, "rekindle-files.safetensors". A box that is not whole is the entry
// box_entry_name() of a file; "__metadata__" has its tensor, full shape and offset
// (docs/reference/formats.md). Also returns each file's header bytes.
struct PackedLayout {
  Layout layout;
  std::vector<std::string> headers;  // per segment: 8-byte length + JSON, padded to 4096 bytes
};
inline constexpr std::string_view kFilesSegmentName = "rekindle-files.safetensors";
std::string box_entry_name(const TensorInfo& tensor, const Box& box);  // "w@0:512,128:256" or "w"
Result<PackedLayout> pack_layout(const TensorSet& tensors, std::span<const TensorBox> boxes,
                                 std::uint64_t max_segment_bytes);

}  // namespace rekindle
