#include "src/bucket/block_digests.h"

#include <algorithm>
#include <array>
#include <memory>

#include "src/bucket/bucket_verify.h"

namespace rekindle::bucket {

namespace {

// While the device digests one batch, the host takes the digests of the one before.
constexpr std::size_t kBatches = 2;
constexpr std::size_t kBatchPieces = 2048;

// Digests that are queued on a stream of their own.
class Batch {
 public:
  explicit Batch(Device& device) : digests_(device) {}
  Result<void> prepare(Device& device, std::size_t pieces) {
    TRY(stream_, device.make_stream());
    return digests_.reserve(pieces);
  }
  // The last batch was taken.
  Result<void> queue(std::span<const BoxBytes> boxes) {
    TRY_VOID(digests_.queue(boxes, *stream_));
    queued_ = true;
    return {};
  }
  // Appends the digests to `out`, if some are queued.
  Result<void> take(TimePoint deadline, std::vector<Digest>& out) {
    if (!queued_) return {};
    TRY_VOID(stream_->finish(deadline));
    queued_ = false;
    const auto values = digests_.values();
    out.insert(out.end(), values.begin(), values.end());
    return {};
  }

 private:
  BoxDigests digests_;
  // Goes before the digests, which its work may still write.
  std::unique_ptr<Stream> stream_;
  bool queued_ = false;
};

struct OpenPart {
  std::unique_ptr<Block> block;
  DeviceAddress address = 0;
  std::uint64_t bytes = 0;
};

Result<OpenPart> open_part(Device& device, const BlockFile& file, Access access) {
  const bool all = file.length == 0;
  if (file.offset > file.bytes || file.length > file.bytes - file.offset) {
    return fail(ErrorCode::kInvalid, "a block of {} bytes has no part of {} bytes at {}",
                file.bytes, file.length, file.offset);
  }
  TRY(auto block, device.open_block(file.descriptor, file.bytes, access));
  const std::uint64_t from = all ? 0 : file.offset;
  const std::uint64_t bytes = all ? block->bytes() : file.length;
  const DeviceAddress address = block->address() + from;
  return OpenPart{std::move(block), address, bytes};
}

std::vector<BoxBytes> pieces_of(std::span<const OpenPart> parts) {
  std::vector<BoxBytes> pieces;
  for (const OpenPart& part : parts) {
    for (std::uint64_t at = 0; at < part.bytes; at += kPieceBytes) {
      const std::uint64_t bytes = std::min(kPieceBytes, part.bytes - at);
      pieces.push_back(
          {.address = part.address + at, .run_bytes = static_cast<std::uint32_t>(bytes)});
    }
  }
  return pieces;
}

// At most kPieceBytes.
Result<OpenPart> open_piece(Device& device, const BlockFile& file, Access access) {
  TRY(auto part, open_part(device, file, access));
  if (part.bytes > kPieceBytes) {
    return fail(ErrorCode::kInvalid, "{} bytes of a block are too many to copy: at most {}",
                part.bytes, kPieceBytes);
  }
  return part;
}

}  // namespace

Result<std::vector<Digest>> digest_blocks(Device& device, std::span<const BlockFile> blocks,
                                          TimePoint deadline) {
  std::vector<OpenPart> opened;
  for (const BlockFile& file : blocks) {
    TRY(auto part, open_part(device, file, Access::kRead));
    opened.push_back(std::move(part));
  }
  const std::vector<BoxBytes> pieces = pieces_of(opened);
  std::vector<Digest> digests;
  digests.reserve(pieces.size());
  // They go before the blocks, which their work reads.
  std::array<Batch, kBatches> batches{Batch(device), Batch(device)};
  const std::size_t in_batch = std::min(kBatchPieces, pieces.size());
  for (Batch& batch : batches) TRY_VOID(batch.prepare(device, in_batch));
  std::size_t next = 0;
  for (std::span<const BoxBytes> left = pieces; !left.empty();) {
    const std::size_t count = std::min(kBatchPieces, left.size());
    Batch& batch = batches[next++ % kBatches];
    TRY_VOID(batch.take(deadline, digests));
    TRY_VOID(batch.queue(left.first(count)));
    left = left.subspan(count);
  }
  for (std::size_t i = 0; i < kBatches; ++i) {
    TRY_VOID(batches[next++ % kBatches].take(deadline, digests));
  }
  return digests;
}

Result<std::string> read_block(Device& device, const BlockFile& from, TimePoint deadline) {
  TRY(auto part, open_piece(device, from, Access::kRead));
  std::string bytes(part.bytes, '\0');
  TRY(auto stream, device.make_stream());
  const Download copy{
      .from = part.address, .to = reinterpret_cast<std::byte*>(bytes.data()), .bytes = part.bytes};
  TRY_VOID(stream->download(std::span(&copy, 1)));
  TRY_VOID(stream->finish(deadline));
  return bytes;
}

Result<void> write_block(Device& device, const BlockFile& to, std::string_view bytes,
                         TimePoint deadline) {
  TRY(auto part, open_piece(device, to, Access::kWrite));
  if (part.bytes != bytes.size()) {
    return fail(ErrorCode::kInvalid, "{} bytes came for {} bytes of a block", bytes.size(),
                part.bytes);
  }
  TRY(auto stream, device.make_stream());
  const Upload copy{.from = reinterpret_cast<const std::byte*>(bytes.data()),
                    .to = part.address,
                    .run_bytes = part.bytes};
  TRY_VOID(stream->upload(std::span(&copy, 1)));
  return stream->finish(deadline);
}

}  // namespace rekindle::bucket
