#include "recovery/pull/local_source.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <utility>

#include "src/base/units.h"
#include "src/store/fault_guard.h"
#include "src/tensor/safetensors.h"
#include "transport/read_op.h"

namespace rekindle::pull {

using transport::Completion;
using transport::OpStatus;
using transport::ReadOp;

namespace {

constexpr std::size_t kMaxQueued = 64;
constexpr std::uint64_t kBytesPerPoll = 8 * kMiB;

struct FoundTensor {
  TensorInfo info;
  std::uint32_t segment = 0;
  std::uint64_t offset_bytes = 0;
};

struct FoundFiles {
  std::vector<SegmentSpec> specs;
  std::vector<std::unique_ptr<store::MappedSegment>> files;
  std::vector<FoundTensor> tensors;
};

Result<void> map_file(const std::filesystem::path& path, FoundFiles& found) {
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error) return fail_errno(error.value(), fmt::format("fallback file {}", path.string()));
  TRY(auto mapped, store::MappedSegment::open_read(path, size));
  found.specs.push_back({path.filename().string(), size});
  found.files.push_back(std::move(mapped));
  return {};
}

Result<FoundFiles> find_tensors(const std::filesystem::path& directory) {
  TRY(const auto checkpoint, safetensors::find_checkpoint(directory));
  FoundFiles found;
  for (const auto& path : checkpoint.weights) {
    const auto segment = static_cast<std::uint32_t>(found.files.size());
    TRY(const auto header, safetensors::read_header(path));
    TRY_VOID(map_file(path, found));
    for (const auto& entry : header.entries) {
      found.tensors.push_back({entry.info, segment, entry.offset_bytes});
    }
  }
  for (const auto& [name, path] : checkpoint.extras) {
    const auto segment = static_cast<std::uint32_t>(found.files.size());
    std::error_code error;
    if (std::filesystem::file_size(path, error) == 0 || error) continue;  // nothing to map
    TRY_VOID(map_file(path, found));
    const std::uint64_t bytes = found.specs.back().size_bytes;
    // A layout needs distinct names of this form. No store has these files.
    found.specs.back().name =
        fmt::format("file-{}-{}.safetensors", segment, found.specs.back().name);
    found.tensors.push_back(
        {{std::string(kFileTensorPrefix) + name, DType::kU8, Shape{bytes}}, segment, 0});
  }
  return found;
}

Result<std::shared_ptr<FileSource>> make_source(FoundFiles found,
                                                std::shared_ptr<const Checkpoint> checkpoint) {
  std::vector<LayoutEntry> entries;
  for (const auto& tensor : found.tensors) {
    const auto index = checkpoint->tensors.find(tensor.info.name);
    if (!index || checkpoint->tensors[*index] != tensor.info) continue;
    entries.push_back({*index, Box::whole(tensor.info.shape), tensor.segment, tensor.offset_bytes});
  }
  TRY(auto layout, Layout::create(checkpoint->tensors, std::move(found.specs), std::move(entries)));
  auto source = std::make_shared<FileSource>();
  source->checkpoint = std::move(checkpoint);
  source->layout = std::make_shared<const Layout>(std::move(layout));
  source->files = std::move(found.files);
  return source;
}

}  // namespace

std::vector<std::span<const std::byte>> FileSource::segments() const {
  std::vector<std::span<const std::byte>> spans;
  spans.reserve(files.size());
  for (const auto& file : files) spans.push_back(file->bytes());
  return spans;
}

Result<std::shared_ptr<FileSource>> open_file_source(const std::filesystem::path& directory,
                                                     std::shared_ptr<const Checkpoint> known) {
  TRY(auto found, find_tensors(directory));
  return make_source(std::move(found), std::move(known));
}

Result<std::shared_ptr<FileSource>> adopt_file_source(const std::filesystem::path& directory,
                                                      const ModelVersion& id, WorkerPool& pool) {
  TRY(auto found, find_tensors(directory));
  std::vector<TensorInfo> infos;
  for (const auto& tensor : found.tensors) infos.push_back(tensor.info);
  TRY(auto tensors, TensorSet::create(std::move(infos)));
  TRY(const auto tiles, TileMap::create(tensors));
  std::vector<Digest> digests(tiles.tile_count());
  std::mutex mutex;
  std::optional<Error> error;
  pool.parallel_for(found.tensors.size(), [&](std::size_t i) {
    const FoundTensor& tensor = found.tensors[i];
    const TensorIndex index = *tensors.find(tensor.info.name);
    const TileGrid& grid = tiles.grid(index);
    const auto array =
        found.files[tensor.segment]->bytes().subspan(tensor.offset_bytes, tensor.info.size_bytes());
    const auto read = store::guard_mapping_access(tensor.info.name.c_str(), [&] {
      for (std::uint64_t tile = 0; tile < grid.tile_count(); ++tile) {
        digests[tiles.first_tile(index) + tile] =
            digest_tile(tensor.info, grid, tile, array, Box::whole(tensor.info.shape));
      }
    });
    if (!read) {
      const std::lock_guard lock(mutex);
      error = read.error();
    }
  });
  if (error) return fail(std::move(*error));
  const Digest root = checkpoint_root(id, tensors, tiles, digests);
  TRY(auto checkpoint, Checkpoint::create(id, std::move(tensors), std::move(digests), root));
  return make_source(std::move(found), std::move(checkpoint));
}

MemoryPath::MemoryPath(std::string name, std::vector<std::span<const std::byte>> segments,
                       std::shared_ptr<const void> keep_alive)
    : name_(std::move(name)), segments_(std::move(segments)), keep_alive_(std::move(keep_alive)) {}

Result<std::size_t> MemoryPath::post(std::span<const ReadOp> ops) {
  if (aborted_) return fail(ErrorCode::kPeerLost, "{} was closed", name_);
  const std::size_t taken = std::min(ops.size(), kMaxQueued - std::min(kMaxQueued, queue_.size()));
  queue_.insert(queue_.end(), ops.begin(), ops.begin() + static_cast<std::ptrdiff_t>(taken));
  return taken;
}

std::size_t MemoryPath::poll(std::span<Completion> out) {
  std::size_t finished = 0;
  std::uint64_t copied = 0;
  while (finished < out.size() && !queue_.empty() && copied < kBytesPerPoll) {
    const ReadOp& op = queue_.front();
    const OpStatus status = aborted_ ? OpStatus::kAborted : execute(op);
    if (status == OpStatus::kOk) {
      copied += op.total_bytes();
      bytes_landed_ += op.total_bytes();
    }
    out[finished++] = {op.wr_id, status};
    queue_.pop_front();
  }
  return finished;
}

void MemoryPath::abort() { aborted_ = true; }

OpStatus MemoryPath::execute(const ReadOp& op) {
  if (op.remote.region >= segments_.size()) return OpStatus::kStale;
  const auto segment = segments_[op.remote.region];
  if (op.count == 0 || op.run_bytes == 0) return OpStatus::kInvalid;
  std::uint64_t span_bytes = 0;
  if (__builtin_mul_overflow(op.remote_stride, op.count - 1, &span_bytes) ||
      __builtin_add_overflow(span_bytes, op.run_bytes, &span_bytes) ||
      !in_range(op.remote_offset, span_bytes, segment.size())) {
    return OpStatus::kInvalid;
  }
  return transport::guard_op(op, [&] {
    for (std::uint64_t i = 0; i < op.count; ++i) {
      std::memcpy(op.local + i * op.local_stride,
                  segment.data() + op.remote_offset + i * op.remote_stride, op.run_bytes);
    }
  });
}

}  // namespace rekindle::pull
