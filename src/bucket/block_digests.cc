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
  Result<void> prepare(Device& device) {
    TRY(stream_, device.make_stream());
    return digests_.reserve(kBatchPieces);
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

std::vector<BoxBytes> pieces_of(std::span<const std::unique_ptr<Block>> blocks) {
  std::vector<BoxBytes> pieces;
  for (const auto& block : blocks) {
    for (std::uint64_t at = 0; at < block->bytes(); at += kPieceBytes) {
      const std::uint64_t bytes = std::min(kPieceBytes, block->bytes() - at);
      pieces.push_back(
          {.address = block->address() + at, .run_bytes = static_cast<std::uint32_t>(bytes)});
    }
  }
  return pieces;
}

}  // namespace

Result<std::vector<Digest>> digest_blocks(Device& device, std::span<const BlockFile> blocks,
                                          TimePoint deadline) {
  std::vector<std::unique_ptr<Block>> opened;
  for (const BlockFile& file : blocks) {
    TRY(auto block, device.open_block(file.descriptor, file.bytes, Access::kRead));
    opened.push_back(std::move(block));
  }
  const std::vector<BoxBytes> pieces = pieces_of(opened);
  std::vector<Digest> digests;
  digests.reserve(pieces.size());
  // They go before the blocks, which their work reads.
  std::array<Batch, kBatches> batches{Batch(device), Batch(device)};
  for (Batch& batch : batches) TRY_VOID(batch.prepare(device));
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

}  // namespace rekindle::bucket
