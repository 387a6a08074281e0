#include "recovery/worker/resident_copy.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "src/base/duplicate_fd.h"
#include "src/store/fault_guard.h"
#include "src/tensor/box.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::worker {

namespace {

constexpr std::uint64_t kTile = bucket::kPieceBytes;
constexpr int kMostTensors = 1 << 20;
constexpr std::size_t kMostNameBytes = 1024;

std::size_t tiles_of(std::uint64_t bytes) {
  return static_cast<std::size_t>(bytes / kTile + (bytes % kTile != 0 ? 1 : 0));
}

// The bytes [begin, end) of a tile's block.
struct BlockRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// The part of the source that a tensor holds, with the type of its elements.
struct SourceBox {
  TensorIndex tensor = 0;
  Box box;
  std::uint64_t element_bytes = 0;
};

// nullopt: the version has no such part, or it has another size than the tensor.
std::optional<SourceBox> source_of(const proto::ResidentTensor& tensor, const TensorSet& tensors) {
  const auto& named = tensor.source();
  const auto index = tensors.find(named.tensor());
  if (!index) return std::nullopt;
  const TensorInfo& info = tensors[*index];
  Box box = Box::whole(info.shape);
  if (named.extent_size() > 0) {
    const auto offset = Dims::from(std::vector(named.offset().begin(), named.offset().end()));
    const auto extent = Dims::from(std::vector(named.extent().begin(), named.extent().end()));
    if (!offset || !extent) return std::nullopt;
    box = {*offset, *extent};
    if (!check_box(box, info.shape)) return std::nullopt;
  }
  const std::uint64_t element_bytes = dtype_size_bytes(info.dtype);
  if (box.elements() * element_bytes != tensor.bytes()) return std::nullopt;
  return SourceBox{*index, box, element_bytes};
}

// Copies the bytes of runs that fall into `wanted`, a range of the destination, to `out`, which
// holds that range.
void copy_clipped(std::span<const StridedCopy> copies, std::span<const std::byte> from,
                  BlockRange wanted, std::span<std::byte> out) {
  for (const StridedCopy& copy : copies) {
    for (std::uint64_t i = 0; i < copy.count; ++i) {
      const std::uint64_t at = copy.dst_offset + i * copy.dst_stride;
      const std::uint64_t begin = std::max(at, wanted.begin);
      const std::uint64_t end = std::min(at + copy.run_bytes, wanted.end);
      if (begin >= end) continue;
      const std::uint64_t source = copy.src_offset + i * copy.src_stride + (begin - at);
      std::memcpy(out.data() + (begin - wanted.begin), from.data() + source, end - begin);
    }
  }
}

}  // namespace

Result<void> check_tensors(const proto::SealResident& request) {
  if (request.tensors_size() > kMostTensors) {
    return fail(ErrorCode::kInvalid, "{} tensors of a resident copy: at most {} are possible",
                request.tensors_size(), kMostTensors);
  }
  for (const auto& tensor : request.tensors()) {
    if (tensor.name().size() > kMostNameBytes) {
      return fail(ErrorCode::kInvalid,
                  "a tensor of a resident copy has a name of {} bytes: at most "
                  "{} are possible",
                  tensor.name().size(), kMostNameBytes);
    }
    const bool known = tensor.block() < static_cast<std::uint32_t>(request.block_bytes_size());
    const std::uint64_t bytes =
        known ? request.block_bytes(static_cast<int>(tensor.block())) : std::uint64_t{0};
    if (!known || tensor.offset() > bytes || tensor.bytes() > bytes - tensor.offset()) {
      return fail(ErrorCode::kInvalid, "{} does not lie in block {}: {} bytes at {}", tensor.name(),
                  tensor.block(), tensor.bytes(), tensor.offset());
    }
  }
  return {};
}

OpenResident::OpenResident(proto::ResidentRecord record, std::vector<UniqueFd> blocks)
    : record_(std::move(record)), blocks_(std::move(blocks)) {
  std::size_t tiles = 0;
  for (const std::uint64_t bytes : record_.block_bytes()) {
    first_tiles_.push_back(tiles);
    tiles += tiles_of(bytes);
  }
  first_tiles_.push_back(tiles);
  compared_.assign(tiles, true);
  for (const auto& tensor : record_.tensors()) {
    if (!tensor.changes() || tensor.bytes() == 0) continue;
    const std::size_t first = first_tiles_[tensor.block()];
    const std::uint64_t last = (tensor.offset() + tensor.bytes() - 1) / kTile;
    for (std::uint64_t at = tensor.offset() / kTile; at <= last; ++at)
      compared_[first + at] = false;
  }
}

Result<OpenResidentPtr> OpenResident::open(std::string_view bytes, std::vector<UniqueFd> blocks) {
  proto::ResidentRecord record;
  const Error malformed(ErrorCode::kCorrupt, "the record of a resident copy is malformed");
  if (!record.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) ||
      blocks.size() != static_cast<std::size_t>(record.block_bytes_size())) {
    return fail(malformed);
  }
  proto::SealResident sealed;
  *sealed.mutable_block_bytes() = record.block_bytes();
  *sealed.mutable_tensors() = record.tensors();
  if (!check_tensors(sealed)) return fail(malformed);
  std::shared_ptr<OpenResident> opened(new OpenResident(std::move(record), std::move(blocks)));
  if (opened->record_.digests().size() != opened->tiles() * sizeof(Digest)) return fail(malformed);
  return opened;
}

ResidentTile OpenResident::tile(std::size_t index) const {
  const auto after = std::ranges::upper_bound(first_tiles_, index);
  const auto block = static_cast<std::size_t>(after - first_tiles_.begin() - 1);
  const std::uint64_t bytes = record_.block_bytes(static_cast<int>(block));
  const std::uint64_t offset = (index - first_tiles_[block]) * kTile;
  return {static_cast<std::uint32_t>(block), offset, std::min(kTile, bytes - offset)};
}

Digest OpenResident::sealed(std::size_t tile) const {
  Digest digest;
  std::memcpy(&digest, record_.digests().data() + tile * sizeof digest, sizeof digest);
  return digest;
}

std::vector<const proto::ResidentTensor*> OpenResident::tensors_in(std::size_t index) const {
  const ResidentTile at = tile(index);
  std::vector<const proto::ResidentTensor*> found;
  for (const auto& tensor : record_.tensors()) {
    const bool shares = tensor.block() == at.block && tensor.offset() < at.offset + at.bytes &&
                        at.offset < tensor.offset() + tensor.bytes();
    if (shares) found.push_back(&tensor);
  }
  return found;
}

std::vector<std::size_t> OpenResident::differing(std::size_t first,
                                                 std::span<const Digest> digests) const {
  std::vector<std::size_t> wrong;
  for (std::size_t i = 0; i < digests.size() && first + i < tiles(); ++i) {
    if (compared_[first + i] && digests[i] != sealed(first + i)) wrong.push_back(first + i);
  }
  return wrong;
}

Result<std::vector<UniqueFd>> OpenResident::share() const {
  return duplicate_all(blocks_, "share a block of a resident copy");
}

Result<std::vector<bucket::BlockFile>> OpenResident::whole() const {
  TRY(auto copies, share());
  std::vector<bucket::BlockFile> files;
  for (std::size_t i = 0; i < copies.size(); ++i) {
    files.push_back({std::move(copies[i]), record_.block_bytes(static_cast<int>(i))});
  }
  return files;
}

Result<bucket::BlockFile> OpenResident::part(std::size_t first, std::size_t count) const {
  const ResidentTile begin = tile(first);
  const ResidentTile last = tile(first + count - 1);
  TRY(auto copy, duplicate(blocks_[begin.block].get(), "share a block of a resident copy"));
  return bucket::BlockFile{std::move(copy), record_.block_bytes(static_cast<int>(begin.block)),
                           begin.offset, last.offset + last.bytes - begin.offset};
}

Result<void> refill(const OpenResident& resident, std::size_t index,
                    const store::StoredVersion& stored, std::span<std::byte> bytes) {
  const ResidentTile tile = resident.tile(index);
  const TensorSet& tensors = stored.manifest.checkpoint->tensors;
  for (const proto::ResidentTensor* const tensor : resident.tensors_in(index)) {
    const auto source = tensor->has_source() ? source_of(*tensor, tensors) : std::nullopt;
    if (!source) continue;
    const std::uint64_t begin = std::max(tensor->offset(), tile.offset);
    const std::uint64_t end =
        std::min(tensor->offset() + tensor->bytes(), tile.offset + tile.bytes);
    const BlockRange wanted{begin - tensor->offset(), end - tensor->offset()};
    const auto out = bytes.subspan(begin - tile.offset, end - begin);
    for (const LayoutEntry& entry : stored.manifest.layout.entries_of(source->tensor)) {
      const auto region = intersect(entry.box, source->box);
      if (!region) continue;
      std::vector<StridedCopy> copies;
      strided_copies(*region, entry.box, source->box, source->element_bytes, copies);
      TRY_VOID(store::guard_mapping_access(
          "segment", [&] { copy_clipped(copies, stored.array(entry), wanted, out); }));
    }
  }
  return {};
}

}  // namespace rekindle::worker
