#include "tests/client/fake_model.h"

#include <stdexcept>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/must.h"

namespace rekindle::client::testing {

namespace {

std::vector<TensorBox> whole_boxes(const TensorSet& tensors) {
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    boxes.push_back({i, Box::whole(tensors[i].shape)});
  }
  return boxes;
}

PackedLayout pack(const TensorSet& tensors, std::vector<TensorBox> boxes, std::uint64_t most) {
  if (boxes.empty()) boxes = whole_boxes(tensors);
  return must(pack_layout(tensors, boxes, most));
}

void write_at(int fd, std::string_view bytes, std::uint64_t offset) {
  if (::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)) !=
      static_cast<ssize_t>(bytes.size())) {
    throw std::runtime_error("pwrite");
  }
}

}  // namespace

std::uint8_t byte_of(std::string_view tensor, std::uint64_t index) {
  std::uint64_t value = index * 0x9e3779b97f4a7c15u;
  for (const char c : tensor) value = (value ^ static_cast<std::uint8_t>(c)) * 0x100000001b3u;
  return static_cast<std::uint8_t>(value >> 40);
}

std::vector<TensorInfo> FakeModel::small_tensors() {
  return {
      {"big", DType::kBF16, Shape{1024, 1024}},  // 2 MiB: several tiles
      {"empty", DType::kF32, Shape{0, 4}},      {"small", DType::kF32, Shape{16, 32}},
      {"scalar", DType::kI64, Shape{}},         {"wide", DType::kU8, Shape{3, 70'000}},
  };
}

FakeModel::FakeModel(std::uint64_t max_segment_bytes)
    : FakeModel(small_tensors(), {}, max_segment_bytes) {}

FakeModel::FakeModel(std::vector<TensorInfo> tensors, std::vector<TensorBox> boxes,
                     std::uint64_t max_segment_bytes)
    : tensors_(must(TensorSet::create(std::move(tensors)))),
      layout_(pack(tensors_, boxes, max_segment_bytes).layout),
      tiles_(must(TileMap::create(tensors_))) {
  fill(pack(tensors_, std::move(boxes), max_segment_bytes));
}

void FakeModel::fill(const PackedLayout& packed) {
  for (std::size_t i = 0; i < layout_.segments().size(); ++i) {
    files_.emplace_back(::memfd_create("segment", MFD_CLOEXEC));
    const auto bytes = static_cast<off_t>(layout_.segments()[i].size_bytes);
    if (::ftruncate(files_.back().get(), bytes) != 0) throw std::runtime_error("ftruncate");
    write_at(files_.back().get(), packed.headers[i], 0);
  }
  for (const LayoutEntry& entry : layout_.entries()) {
    write_at(files_[entry.segment].get(), bytes_of(tensors_[entry.tensor].name, entry.box),
             entry.offset_bytes);
  }
}

std::string FakeModel::bytes_of(std::string_view tensor, const Box& box) const {
  const TensorInfo& info = tensors_[*tensors_.find(tensor)];
  const std::uint64_t element = dtype_size_bytes(info.dtype);
  std::string out;
  out.reserve(box.elements() * element);
  if (box.empty()) return out;
  std::vector<StridedCopy> copies;
  strided_copies(box, Box::whole(info.shape), box, element, copies);
  out.resize(box.elements() * element);
  for (const StridedCopy& copy : copies) {
    for (std::uint64_t run = 0; run < copy.count; ++run) {
      for (std::uint64_t i = 0; i < copy.run_bytes; ++i) {
        out[copy.dst_offset + run * copy.dst_stride + i] =
            static_cast<char>(byte_of(tensor, copy.src_offset + run * copy.src_stride + i));
      }
    }
  }
  return out;
}

proto::AgentFrame FakeModel::attached(std::uint64_t call, std::uint64_t session, bool ready) const {
  proto::AgentFrame frame;
  frame.set_call(call);
  frame.set_session(session);
  frame.set_descriptors(static_cast<std::uint32_t>(files_.size()));
  proto::Attached& attached = *frame.mutable_attached();
  attached.mutable_id()->set_model("qwen3");
  attached.mutable_id()->set_version(41);
  attached.set_layout(layout_.serialize());
  attached.set_tensor_set(tensors_.serialize());
  for (const SegmentSpec& segment : layout_.segments()) {
    attached.add_segment_bytes(segment.size_bytes);
  }
  if (ready) {
    attached.mutable_ready()->add_begin(0);
    attached.mutable_ready()->add_end(tiles_.tile_count());
  }
  attached.set_rung("local");
  return frame;
}

proto::AgentFrame FakeModel::ready(std::uint64_t session, TileIndex begin, TileIndex end) const {
  proto::AgentFrame frame;
  frame.set_session(session);
  frame.mutable_ready()->mutable_ready()->add_begin(begin);
  frame.mutable_ready()->mutable_ready()->add_end(end);
  return frame;
}

std::vector<UniqueFd> FakeModel::segments() const {
  std::vector<UniqueFd> out;
  for (const UniqueFd& file : files_) {
    const std::string path = fmt::format("/proc/self/fd/{}", file.get());
    out.emplace_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!out.back()) throw std::runtime_error("open " + path);
  }
  return out;
}

TileIndex FakeModel::first_tile(std::string_view tensor) const {
  return tiles_.first_tile(*tensors_.find(tensor));
}

TileIndex FakeModel::end_tile(std::string_view tensor) const {
  return tiles_.first_tile(*tensors_.find(tensor) + 1);
}

}  // namespace rekindle::client::testing
