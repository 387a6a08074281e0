#include "src/client/host_tensors.h"

#include <algorithm>
#include <new>
#include <set>
#include <utility>

namespace rekindle::client {

namespace {

rk_tensor tensor_of(const bucket::Piece& piece) {
  return {.name = piece.name.data(),
          .dtype = piece.dtype.data(),
          .dimensions = static_cast<std::uint32_t>(piece.shape().size()),
          .shape = piece.shape().data(),
          .offset = piece.offset().data(),
          .full_shape = piece.full_shape.data(),
          .data = nullptr,
          .bytes = piece.bytes};
}

// Moves equal lists of dimensions to one address, as rekindle.h promises.
void share_lists(std::span<rk_tensor> tensors) {
  using List = std::span<const std::uint64_t>;
  const auto less = [](List a, List b) { return std::ranges::lexicographical_compare(a, b); };
  std::set<List, decltype(less)> seen(less);
  for (rk_tensor& tensor : tensors) {
    for (const std::uint64_t** list : {&tensor.shape, &tensor.offset, &tensor.full_shape}) {
      *list = seen.insert(List(*list, tensor.dimensions)).first->data();
    }
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
