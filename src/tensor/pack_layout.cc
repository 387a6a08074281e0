#include <algorithm>
#include <map>

#include "src/base/units.h"
#include "src/tensor/canonical.h"
#include "src/tensor/layout.h"
#include "src/tensor/safetensors.h"

namespace rekindle {

namespace {

// The most bytes of a box in a header, without its name: dtype, shape, two offsets, punctuation,
// and for a part of a tensor its line in the metadata.
constexpr std::uint64_t kHeaderBytesPerEntry = 320;
constexpr std::uint64_t kHeaderBytesPerFile = kPageBytes + 256;

struct PackedFile {
  std::vector<TensorBox> boxes;  // in the order of the tensor set, then of the boxes
  std::uint64_t bytes = kHeaderBytesPerFile;
  std::uint64_t header_bytes = kHeaderBytesPerFile;  // at most, part of `bytes`
  bool files = false;
};

std::string box_metadata(const TensorInfo& tensor, const Box& box) {
  return fmt::format(R"({{"tensor":{},"shape":[{}],"offset":[{}]}})",
                     canonical::json_string(tensor.name), fmt::join(tensor.shape.span(), ","),
                     fmt::join(box.offset.span(), ","));
}

bool is_whole(const TensorSet& tensors, const TensorBox& box) {
  return box.box == Box::whole(tensors[box.tensor].shape);
}

bool has_room(const PackedFile& file, std::uint64_t bytes, std::uint64_t header_bytes,
              std::uint64_t max_segment_bytes) {
  return file.boxes.empty() ||
         (in_range(file.bytes, bytes, max_segment_bytes) &&
          in_range(file.header_bytes, header_bytes, safetensors::kMaxHeaderBytes));
}

Result<std::vector<PackedFile>> distribute(const TensorSet& tensors,
                                           std::span<const TensorBox> boxes,
                                           std::uint64_t max_segment_bytes) {
  std::vector<PackedFile> weights;
  PackedFile files;
  files.files = true;
  for (std::size_t i = 0; i < boxes.size();) {
    const TensorIndex index = boxes[i].tensor;
    if (index >= tensors.size()) {
      return fail(ErrorCode::kInvalid, "a box names tensor {} of {}", index, tensors.size());
    }
    const TensorInfo& tensor = tensors[index];
    const std::size_t first = i;
    std::uint64_t bytes = 0;
    std::uint64_t header_bytes = 0;
    for (; i < boxes.size() && boxes[i].tensor == index; ++i) {
      if (auto ok = check_box(boxes[i].box, tensor.shape); !ok) {
        return fail(std::move(ok).error().with_context(tensor.name));
      }
      // JSON may escape each byte of a name to six; a part's name stands three times in it.
      bytes += boxes[i].box.elements() * dtype_size_bytes(tensor.dtype);
      header_bytes +=
          kHeaderBytesPerEntry + 6 * tensor.name.size() * (is_whole(tensors, boxes[i]) ? 1 : 3);
    }
    bytes += header_bytes;
    PackedFile* file = &files;
    if (!is_file_tensor(tensor.name)) {
      if (weights.empty() || !has_room(weights.back(), bytes, header_bytes, max_segment_bytes)) {
        weights.emplace_back();
      }
      file = &weights.back();
    }
    file->bytes += bytes;
    file->header_bytes += header_bytes;
    file->boxes.insert(file->boxes.end(), boxes.begin() + static_cast<std::ptrdiff_t>(first),
                       boxes.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (!files.boxes.empty()) weights.push_back(std::move(files));
  return weights;
}

// Writes one file's header and entries. The data of larger dtypes comes first, so that each tensor
// is aligned to its elements without holes (which safetensors does not allow).
Result<void> lay_out(const TensorSet& tensors, PackedFile& file, std::uint32_t segment,
                     std::vector<std::string>& headers, std::vector<LayoutEntry>& entries,
                     std::uint64_t& size_bytes) {
  std::stable_sort(file.boxes.begin(), file.boxes.end(),
                   [&](const TensorBox& a, const TensorBox& b) {
                     return dtype_size_bytes(tensors[a.tensor].dtype) >
                            dtype_size_bytes(tensors[b.tensor].dtype);
                   });
  std::map<std::string, std::string> metadata;
  if (!file.files) metadata["format"] = "pt";  // transformers refuses weights without it
  std::vector<TensorInfo> infos;
  infos.reserve(file.boxes.size());
  for (const TensorBox& box : file.boxes) {
    const TensorInfo& tensor = tensors[box.tensor];
    TensorInfo info{box_entry_name(tensor, box.box), tensor.dtype, box.box.extent};
    if (!is_whole(tensors, box)) metadata[info.name] = box_metadata(tensor, box.box);
    infos.push_back(std::move(info));
  }
  TRY(std::string header, safetensors::make_header(infos, metadata, kPageBytes));
  size_bytes = header.size();
  for (const TensorBox& box : file.boxes) {
    entries.push_back({box.tensor, box.box, segment, size_bytes});
    size_bytes += box.box.elements() * dtype_size_bytes(tensors[box.tensor].dtype);
  }
  headers.push_back(std::move(header));
  return {};
}

}  // namespace

std::string box_entry_name(const TensorInfo& tensor, const Box& box) {
  if (box == Box::whole(tensor.shape)) return tensor.name;
  std::string name = tensor.name;
  for (std::size_t i = 0; i < box.rank(); ++i) {
    name +=
        fmt::format("{}{}:{}", i == 0 ? '@' : ',', box.offset[i], box.offset[i] + box.extent[i]);
  }
  return name;
}

Result<PackedLayout> pack_layout(const TensorSet& tensors, std::span<const TensorBox> boxes,
                                 std::uint64_t max_segment_bytes) {
  std::vector<TensorBox> sorted(boxes.begin(), boxes.end());
  std::sort(sorted.begin(), sorted.end());
  TRY(std::vector<PackedFile> files, distribute(tensors, sorted, max_segment_bytes));
  const std::size_t weights =
      files.size() - static_cast<std::size_t>(!files.empty() && files.back().files);
  std::vector<SegmentSpec> segments(files.size());
  std::vector<LayoutEntry> entries;
  entries.reserve(sorted.size());
  std::vector<std::string> headers;
  for (std::size_t i = 0; i < files.size(); ++i) {
    SegmentSpec& segment = segments[i];
    if (files[i].files) {
      segment.name = kFilesSegmentName;
    } else if (weights == 1) {
      segment.name = "model.safetensors";
    } else {
      segment.name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, weights);
    }
    TRY_VOID(lay_out(tensors, files[i], static_cast<std::uint32_t>(i), headers, entries,
                     segment.size_bytes));
  }
  TRY(Layout layout, Layout::create(tensors, std::move(segments), std::move(entries)));
  return PackedLayout{std::move(layout), std::move(headers)};
}

}  // namespace rekindle
