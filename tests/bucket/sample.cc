#include "tests/bucket/sample.h"

#include <algorithm>
#include <stdexcept>

#include <sys/mman.h>
#include <unistd.h>

namespace rekindle::bucket::testing {

Contents Sample::contents(const std::vector<NamedBox>& wanted) const {
  auto made = Contents::create(tensors.serialize(), layout.serialize(), wanted, segment_bytes);
  if (!made) throw std::runtime_error(made.error().message());
  return std::move(*made);
}

std::string Sample::bytes_of(const Contents& contents, const Piece& piece) const {
  std::vector<const std::byte*> data;
  for (const std::string& segment : segments) {
    data.push_back(reinterpret_cast<const std::byte*>(segment.data()));
  }
  std::string out(piece.bytes, '\0');
  contents.gather(piece, data, reinterpret_cast<std::byte*>(out.data()));
  return out;
}

std::vector<Digest> Sample::leaves() const {
  const Contents all = contents();
  std::vector<Digest> leaves;
  for (const Piece& piece : all.pieces()) {
    const std::string held = bytes_of(all, piece);
    const TileGrid& grid = all.tiles().grid(piece.tensor);
    for (std::uint64_t tile = 0; tile < grid.tile_count(); ++tile) {
      leaves.push_back(digest_tile(tensors[piece.tensor], grid, tile, as_bytes(held),
                                   Box::whole(tensors[piece.tensor].shape)));
    }
  }
  return leaves;
}

std::vector<UniqueFd> Sample::files() const {
  std::vector<UniqueFd> files;
  for (const std::string& segment : segments) {
    UniqueFd fd(::memfd_create("segment", MFD_CLOEXEC));
    const auto size = static_cast<ssize_t>(segment.size());
    if (!fd || ::write(fd.get(), segment.data(), segment.size()) != size) {
      throw std::runtime_error("no memfd for a segment");
    }
    files.push_back(std::move(fd));
  }
  return files;
}

Sample sample_of(std::vector<TensorInfo> infos, std::uint64_t seed,
                 std::uint64_t most_segment_bytes) {
  auto tensors = TensorSet::create(std::move(infos));
  if (!tensors) throw std::runtime_error(tensors.error().message());
  std::vector<TensorBox> boxes;
  for (TensorIndex i = 0; i < tensors->size(); ++i) {
    boxes.push_back({i, Box::whole((*tensors)[i].shape)});
  }
  auto layout = pack_layout(*tensors, boxes, most_segment_bytes)->layout;
  Sample sample{std::move(*tensors), std::move(layout), {}, {}};
  std::mt19937_64 random(seed);
  for (const SegmentSpec& segment : sample.layout.segments()) {
    sample.segment_bytes.push_back(segment.size_bytes);
    std::string bytes(segment.size_bytes, '\0');
    std::generate(bytes.begin(), bytes.end(), [&random] { return static_cast<char>(random()); });
    sample.segments.push_back(std::move(bytes));
  }
  return sample;
}

Sample random_sample(std::mt19937_64& random) {
  const DType dtypes[] = {DType::kU8, DType::kBF16, DType::kF32, DType::kF64};
  std::vector<TensorInfo> tensors;
  const std::size_t count = 3 + random() % 20;
  for (std::size_t i = 0; i < count; ++i) {
    Shape shape = Dims::zeros(random() % 5);
    for (std::size_t d = 0; d < shape.rank(); ++d) {
      shape[d] = random() % 40 == 0 ? 0 : 1 + random() % (shape.rank() < 3 ? 300 : 24);
    }
    tensors.push_back({"t" + std::to_string(i), dtypes[random() % 4], shape});
  }
  return sample_of(std::move(tensors), random(), 200'000 + random() % 1'000'000);
}

std::vector<NamedBox> random_boxes(std::mt19937_64& random, const TensorSet& tensors) {
  std::vector<NamedBox> boxes;
  for (TensorIndex i = 0; i < tensors.size(); ++i) {
    const TensorInfo& tensor = tensors[i];
    NamedBox box{tensor.name, {}, {}};
    const bool whole = random() % 3 == 0 || Box::whole(tensor.shape).empty();
    for (const std::uint64_t size : tensor.shape.span()) {
      const std::uint64_t begin = whole ? 0 : random() % size;
      box.offset.push_back(begin);
      box.extent.push_back(whole ? size : 1 + random() % (size - begin));
    }
    boxes.push_back(std::move(box));
  }
  return boxes;
}

}  // namespace rekindle::bucket::testing
