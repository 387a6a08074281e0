#include "src/tensor/layout.h"

#include <algorithm>
#include <unordered_set>

#include "src/base/blake3.h"
#include "src/base/units.h"
#include "src/tensor/canonical.h"

namespace rekindle {

namespace {

constexpr std::string_view kLayoutMagic = "RKLAYO01";
constexpr std::size_t kMaxSegments = 1 << 20;
constexpr std::size_t kMaxSegmentNameBytes = 200;

Result<void> check_segment_name(std::string_view name) {
  bool ok = name.size() <= kMaxSegmentNameBytes && !name.starts_with('.') &&
            name.ends_with(".safetensors") && canonical::is_utf8(name);
  for (const char c : name)
    ok = ok && static_cast<std::uint8_t>(c) >= 0x20 && c != '/' && c != '\\';
  if (!ok) {
    return fail(ErrorCode::kInvalid,
                "segment name '{}' is not a plain file name that ends in .safetensors",
                canonical::printable(name));
  }
  return {};
}

Result<void> check_segments(std::span<const SegmentSpec> segments) {
  if (segments.size() > kMaxSegments) {
    return fail(ErrorCode::kInvalid, "{} segments, the most supported is {}", segments.size(),
                kMaxSegments);
  }
  std::unordered_set<std::string_view> names;
  std::uint64_t total = 0;
  for (const SegmentSpec& segment : segments) {
    TRY_VOID(check_segment_name(segment.name));
    if (!names.insert(segment.name).second) {
      return fail(ErrorCode::kInvalid, "segment '{}' appears twice", segment.name);
    }
    if (!in_range(total, segment.size_bytes, std::uint64_t{1} << 62)) {
      return fail(ErrorCode::kInvalid, "the segments together do not fit in 62 bits");
    }
    total += segment.size_bytes;
  }
  return {};
}

Result<void> check_entry(const TensorSet& tensors, std::span<const SegmentSpec> segments,
                         const LayoutEntry& entry) {
  if (entry.tensor >= tensors.size()) {
    return fail(ErrorCode::kInvalid, "a layout entry names tensor {} of {}", entry.tensor,
                tensors.size());
  }
  const TensorInfo& tensor = tensors[entry.tensor];
  if (auto ok = check_box(entry.box, tensor.shape); !ok) {
    return fail(std::move(ok).error().with_context(tensor.name));
  }
  if (entry.segment >= segments.size()) {
    return fail(ErrorCode::kInvalid, "tensor '{}' lies in segment {} of {}", tensor.name,
                entry.segment, segments.size());
  }
  const std::uint64_t bytes = entry.box.elements() * dtype_size_bytes(tensor.dtype);
  if (!in_range(entry.offset_bytes, bytes, segments[entry.segment].size_bytes)) {
    return fail(ErrorCode::kInvalid,
                "{} bytes of tensor '{}' at offset {} leave segment '{}' of {}", bytes, tensor.name,
                entry.offset_bytes, segments[entry.segment].name,
                segments[entry.segment].size_bytes);
  }
  return {};
}

// `boxes` are the entries of one tensor in the order of their boxes.
Result<void> check_boxes_disjoint(const TensorInfo& tensor, std::span<const LayoutEntry> boxes) {
  if (boxes.size() > kMaxBoxesPerTensor) {
    return fail(ErrorCode::kInvalid, "tensor '{}' is in {} boxes, the most supported is {}",
                tensor.name, boxes.size(), kMaxBoxesPerTensor);
  }
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const Box& box = boxes[i].box;
    for (std::size_t j = i + 1; j < boxes.size(); ++j) {
      const Box& other = boxes[j].box;
      if (other.rank() > 0 && other.offset[0] >= box.offset[0] + box.extent[0] && !(other == box)) {
        break;  // this and all later ones start behind the box
      }
      if (other == box || intersect(box, other)) {
        return fail(ErrorCode::kInvalid, "boxes {} and {} of tensor '{}' overlap", box.to_string(),
                    other.to_string(), tensor.name);
      }
    }
  }
  return {};
}

Result<void> check_ranges_disjoint(const TensorSet& tensors, std::span<const SegmentSpec> segments,
                                   std::span<const LayoutEntry> entries) {
  // Sorted without the entries, which are seven times as large.
  struct Range {
    std::uint32_t segment;
    std::uint32_t entry;
    std::uint64_t offset_bytes;
  };
  std::vector<Range> order;
  order.reserve(entries.size());
  for (std::uint32_t i = 0; i < entries.size(); ++i) {
    if (entries[i].box.empty()) continue;
    order.push_back({entries[i].segment, i, entries[i].offset_bytes});
  }
  const auto lies_before = [](const Range& a, const Range& b) {
    return a.segment != b.segment ? a.segment < b.segment : a.offset_bytes < b.offset_bytes;
  };
  if (!std::is_sorted(order.begin(), order.end(), lies_before)) {
    std::sort(order.begin(), order.end(), lies_before);
  }
  for (std::size_t i = 1; i < order.size(); ++i) {
    if (order[i - 1].segment != order[i].segment) continue;
    const LayoutEntry& before = entries[order[i - 1].entry];
    const std::uint64_t bytes =
        before.box.elements() * dtype_size_bytes(tensors[before.tensor].dtype);
    if (before.offset_bytes + bytes > order[i].offset_bytes) {
      const LayoutEntry& entry = entries[order[i].entry];
      return fail(ErrorCode::kInvalid, "tensors '{}' and '{}' overlap in segment '{}' at offset {}",
                  tensors[before.tensor].name, tensors[entry.tensor].name,
                  segments[entry.segment].name, entry.offset_bytes);
    }
  }
  return {};
}

// The order of a layout's entries.
bool lies_in_order(const LayoutEntry& a, const LayoutEntry& b) {
  return a.tensor != b.tensor ? a.tensor < b.tensor : a.box < b.box;
}

}  // namespace

Result<Layout> Layout::create(const TensorSet& tensors, std::vector<SegmentSpec> segments,
                              std::vector<LayoutEntry> entries) {
  TRY(Layout layout, check(tensors, std::move(segments), std::move(entries)));
  layout.digest_ = blake3(as_bytes(layout.serialize()));
  return layout;
}

// All but the digest.
Result<Layout> Layout::check(const TensorSet& tensors, std::vector<SegmentSpec> segments,
                             std::vector<LayoutEntry> entries) {
  TRY_VOID(check_segments(segments));
  for (const LayoutEntry& entry : entries) TRY_VOID(check_entry(tensors, segments, entry));
  if (!std::is_sorted(entries.begin(), entries.end(), lies_in_order)) {
    std::sort(entries.begin(), entries.end(), lies_in_order);
  }
  Layout layout;
  layout.first_entry_.reserve(tensors.size() + 1);
  layout.whole_.resize(entries.size());
  std::uint32_t next = 0;
  for (TensorIndex t = 0; t < tensors.size(); ++t) {
    const std::uint32_t first = next;
    layout.first_entry_.push_back(first);
    for (; next < entries.size() && entries[next].tensor == t; ++next) {
      layout.whole_[next] = is_whole(entries[next].box, tensors[t].shape);
      layout.payload_bytes_ += entries[next].box.elements() * dtype_size_bytes(tensors[t].dtype);
    }
    TRY_VOID(check_boxes_disjoint(tensors[t], std::span(entries).subspan(first, next - first)));
  }
  layout.first_entry_.push_back(next);
  TRY_VOID(check_ranges_disjoint(tensors, segments, entries));
  layout.segments_ = std::move(segments);
  layout.entries_ = std::move(entries);
  layout.tensor_set_ = tensors.digest();
  return layout;
}

std::span<const LayoutEntry> Layout::entries_of(TensorIndex tensor) const {
  const std::uint32_t first = first_entry_[tensor];
  return std::span(entries_).subspan(first, first_entry_[tensor + 1] - first);
}

std::vector<TensorBox> Layout::boxes() const {
  std::vector<TensorBox> result;
  result.reserve(entries_.size());
  for (const LayoutEntry& entry : entries_) result.push_back({entry.tensor, entry.box});
  return result;
}

std::uint64_t Layout::segment_bytes() const {
  std::uint64_t total = 0;
  for (const SegmentSpec& segment : segments_) total += segment.size_bytes;
  return total;
}

std::string Layout::serialize() const {
  canonical::Writer out;
  out.raw(kLayoutMagic);
  out.digest(tensor_set_);
  out.u32(static_cast<std::uint32_t>(segments_.size()));
  for (const SegmentSpec& segment : segments_) {
    out.text(segment.name);
    out.u64(segment.size_bytes);
  }
  out.u32(static_cast<std::uint32_t>(entries_.size()));
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const LayoutEntry& entry = entries_[i];
    out.u32(entry.tensor);
    out.u32(entry.segment);
    out.u64(entry.offset_bytes);
    out.u8(whole_[i] ? 1 : 0);
    if (!whole_[i]) {
      out.dims(entry.box.offset);
      out.dims(entry.box.extent);
    }
  }
  return out.take();
}

namespace {

Failure bad(std::string_view why) { return fail(ErrorCode::kInvalid, "layout: {}", why); }

// What comes before the entries.
struct LayoutHead {
  Digest tensor_set;
  std::vector<SegmentSpec> segments;
  std::uint32_t entry_count = 0;
};

Result<LayoutHead> read_head(canonical::Reader& in) {
  constexpr std::size_t kMinSegmentBytes = 4 + 8;
  constexpr std::size_t kMinEntryBytes = 4 + 4 + 8 + 1;
  LayoutHead head;
  if (in.raw(kLayoutMagic.size()) != kLayoutMagic) return bad("not a layout of a known format");
  head.tensor_set = in.digest();
  const std::uint32_t segment_count = in.u32();
  if (!in.ok() || segment_count > in.left() / kMinSegmentBytes) return bad("cut short");
  head.segments.resize(segment_count);
  for (SegmentSpec& segment : head.segments) {
    segment.name = in.text();
    segment.size_bytes = in.u64();
  }
  head.entry_count = in.u32();
  if (!in.ok() || head.entry_count > in.left() / kMinEntryBytes) return bad("cut short");
  return head;
}

}  // namespace

Result<std::size_t> Layout::count_entries(std::string_view bytes) {
  canonical::Reader in(bytes);
  TRY(const LayoutHead head, read_head(in));
  return head.entry_count;
}

Result<Layout> Layout::parse(const TensorSet& tensors, std::string_view bytes) {
  canonical::Reader in(bytes);
  TRY(LayoutHead head, read_head(in));
  if (head.tensor_set != tensors.digest()) return bad("belongs to another tensor set");
  std::vector<LayoutEntry> entries;
  entries.reserve(head.entry_count);
  bool canonical = true;
  for (std::uint32_t i = 0; i < head.entry_count; ++i) {
    LayoutEntry& entry = entries.emplace_back();
    entry.tensor = in.u32();
    entry.segment = in.u32();
    entry.offset_bytes = in.u64();
    const std::uint8_t whole = in.u8();
    if (!in.ok()) return bad("cut short");
    if (entry.tensor >= tensors.size()) return bad("names a tensor that is not there");
    const Shape& shape = tensors[entry.tensor].shape;
    if (whole == 1) {
      entry.box.offset = Dims::zeros(shape.rank());
      entry.box.extent = shape;
    } else {
      in.dims(shape.rank(), entry.box.offset);
      in.dims(shape.rank(), entry.box.extent);
      canonical = canonical && whole == 0 && !is_whole(entry.box, shape);
    }
    canonical = canonical && (i == 0 || lies_in_order(entries[i - 1], entry));
  }
  if (!in.at_end()) return bad("cut short, or has a tail");
  TRY(Layout layout, check(tensors, std::move(head.segments), std::move(entries)));
  if (!canonical) return bad("not in canonical form");
  layout.digest_ = blake3(as_bytes(bytes));
  return layout;
}

std::uint32_t count_tensors(const TensorSet& tensors, const Layout& layout) {
  std::uint32_t count = 0;
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    if (!layout.entries_of(i).empty() && !is_file_tensor(tensors[i].name)) ++count;
  }
  return count;
}

}  // namespace rekindle
