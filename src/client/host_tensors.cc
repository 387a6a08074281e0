#include "src/client/host_tensors.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>
#include <set>
#include <utility>

#include <sys/mman.h>
#include <sys/stat.h>

namespace rekindle::client {

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Result<Mapping> Mapping::of_file(int fd, std::uint64_t bytes, bool writable) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return fail_errno(errno, "stat a segment");
  if (!S_ISREG(info.st_mode) || info.st_size < 0 ||
      static_cast<std::uint64_t>(info.st_size) < bytes) {
    return fail(ErrorCode::kInternal, "a segment of {} bytes came as a file of {}", bytes,
                info.st_size);
  }
  if (bytes == 0) return Mapping();
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return fail_errno(errno, fmt::format("map a segment of {} bytes", bytes));
  return Mapping(data, bytes);
}

Result<Mapping> Mapping::anonymous(std::uint64_t bytes) {
  if (bytes == 0) return Mapping();
  void* const data =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return fail_errno(errno, fmt::format("map {} bytes of memory", bytes));
  return Mapping(data, bytes);
}

Result<std::vector<Mapping>> map_segments(std::span<const UniqueFd> descriptors,
                                          std::span<const std::uint64_t> bytes, bool writable) {
  if (descriptors.size() != bytes.size()) {
    return fail(ErrorCode::kInternal, "the agent sent {} descriptors for {} segments",
                descriptors.size(), bytes.size());
  }
  std::vector<Mapping> segments;
  segments.reserve(bytes.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    TRY(Mapping mapping, Mapping::of_file(descriptors[i].get(), bytes[i], writable));
    segments.push_back(std::move(mapping));
  }
  return segments;
}

namespace {

rk_tensor tensor_of(const bucket::Piece& piece) {
  return {.name = piece.name().data(),
          .dtype = piece.dtype().data(),
          .dimensions = static_cast<std::uint32_t>(piece.shape().size()),
          .shape = piece.shape().data(),
          .offset = piece.offset().data(),
          .full_shape = piece.full_shape().data(),
          .data = nullptr,
          .bytes = piece.bytes};
}

// Moves equal lists of dimensions to one address, as rekindle.h promises.
void share_lists(std::span<rk_tensor> tensors) {
  using List = std::span<const std::uint64_t>;
  const auto less = [](List a, List b) { return std::ranges::lexicographical_compare(a, b); };
  std::set<List, decltype(less)> seen(less);
  // `likely` is in the set. In most checkpoints the next tensor has a list of the last one.
  const auto share = [&](List list, List likely) {
    return std::ranges::equal(list, likely) ? likely : *seen.insert(list).first;
  };
  // Of a scalar. In rk_target, an offset of NULL would have another meaning.
  static constexpr std::uint64_t kNoDimension = 0;
  List shape = *seen.insert(List(&kNoDimension, 0)).first;
  List offset = shape;
  for (rk_tensor& tensor : tensors) {
    const std::size_t rank = tensor.dimensions;
    shape = share(List(tensor.shape, rank), shape);
    offset = share(List(tensor.offset, rank), offset);
    tensor.shape = shape.data();
    tensor.offset = offset.data();
    tensor.full_shape = share(List(tensor.full_shape, rank), shape).data();
  }
}

}  // namespace

std::vector<rk_tensor> describe_pieces(const bucket::Contents& contents) {
  std::vector<rk_tensor> tensors;
  tensors.reserve(contents.pieces().size());
  for (const bucket::Piece& piece : contents.pieces()) tensors.push_back(tensor_of(piece));
  share_lists(tensors);
  return tensors;
}

std::vector<rk_tensor> describe_version(const bucket::Contents& contents) {
  static const Dims kFirst = Dims::zeros(kMaxRank);
  std::vector<rk_tensor> catalog;
  const auto tensors = contents.tensors().tensors();
  catalog.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) {
    const std::uint64_t* const shape = tensor.shape.span().data();
    catalog.push_back({.name = tensor.name.c_str(),
                       .dtype = dtype_name(tensor.dtype).data(),
                       .dimensions = static_cast<std::uint32_t>(tensor.shape.rank()),
                       .shape = shape,
                       .offset = kFirst.span().data(),
                       .full_shape = shape,
                       .data = nullptr,
                       .bytes = tensor.shape.product() * dtype_size_bytes(tensor.dtype)});
  }
  share_lists(catalog);
  return catalog;
}

HostTensors::HostTensors(std::vector<Mapping> segments) : segments_(std::move(segments)) {
  for (const Mapping& segment : segments_) data_.push_back(segment.data());
}

Result<std::vector<rk_tensor>> HostTensors::make(const bucket::Contents& contents,
                                                 std::span<const std::size_t> pieces) {
  const std::size_t before = copies_.size();
  const auto make_all = [&]() -> Result<std::vector<rk_tensor>> {
    try {
      std::vector<rk_tensor> tensors;
      tensors.reserve(pieces.size());
      for (const std::size_t index : pieces) {
        TRY(rk_tensor tensor, make_one(contents, contents.pieces()[index]));
        tensors.push_back(tensor);
      }
      share_lists(tensors);
      return tensors;
    } catch (const std::bad_alloc&) {
      return fail(ErrorCode::kExhausted, "out of memory");
    }
  };
  auto made = make_all();
  if (!made) copies_.resize(before);
  return made;
}

Result<rk_tensor> HostTensors::make_one(const bucket::Contents& contents,
                                        const bucket::Piece& piece) {
  rk_tensor tensor = tensor_of(piece);
  if (piece.in_place) {
    tensor.data = data_[piece.segment] + piece.offset_bytes;
  } else if (piece.bytes > 0) {
    TRY(Mapping copy, Mapping::anonymous(piece.bytes));
    contents.gather(piece, data_, copy.data());
    tensor.data = copy.data();
    copies_.push_back(std::move(copy));
  }
  return tensor;
}

}  // namespace rekindle::client
