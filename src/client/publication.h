#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/base/unique_fd.h"
#include "src/client/connection.h"
#include "src/client/copy_threads.h"
#include "src/client/host_tensors.h"
#include "src/tensor/layout.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::client {

// A box of a tensor that a rank of a joint publication has.
struct PublishedPart {
  TensorInfo tensor;
  Box box;
};
struct JointRank {
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
};

// A version, or this rank's part of it, that a trainer fills in memory of the agent's store. Any
// thread.
class Publication {
 public:
  // data() numbers the tensors in this order.
  static Result<std::shared_ptr<Publication>> begin(std::shared_ptr<Connection> connection,
                                                    const ModelVersion& id,
                                                    std::vector<TensorInfo> tensors,
                                                    std::chrono::milliseconds timeout);
  // Waits for the other ranks. pieces() numbers the parts in this order. kTimeout: the message
  // names the ranks that are missing.
  static Result<std::shared_ptr<Publication>> begin_joint(std::shared_ptr<Connection> connection,
                                                          const ModelVersion& id, JointRank rank,
                                                          std::vector<PublishedPart> parts,
                                                          std::chrono::milliseconds timeout);
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;
  // Abandons a publication that was not committed.
  ~Publication();

  // Writable memory, until commit() or abandon() unmap it. Afterwards kStale.
  Result<std::span<std::byte>> data(std::size_t index) const;
  // What this rank writes of a part: all of it, or less if other ranks of this host have the same
  // elements. Row-major; valid as long as data().
  struct Piece {
    Box box;
    std::span<std::byte> bytes;
  };
  Result<std::span<const Piece>> pieces(std::size_t index) const;
  // Threads that copy into this memory, until commit() or abandon(). When all bytes of a segment
  // have arrived through them, it is unmapped, and the agent begins to digest it. `threads`: as for
  // CopyThreads. kInvalid: there are some already.
  Result<std::shared_ptr<CopyThreads>> open_copies(std::size_t threads);
  // Before CopyThreads::put(). kInvalid: the targets are no memory of this publication, or its
  // bytes are given twice. kStale: it is over.
  Result<void> expect(std::span<const Copy> copies);
  Result<void> commit(std::chrono::milliseconds timeout);
  void abandon();

  const Connection& connection() const { return *connection_; }

 private:
  Publication(std::shared_ptr<Connection> connection, std::shared_ptr<Inbox> inbox,
              std::uint64_t id)
      : connection_(std::move(connection)), inbox_(std::move(inbox)), id_(id) {}
  static Result<std::shared_ptr<Publication>> start(std::shared_ptr<Connection> connection,
                                                    const PublishBeginRequest& request,
                                                    std::span<const PublishedPart> parts,
                                                    std::chrono::milliseconds timeout);
  Result<void> place(std::span<const PublishedPart> parts, const TensorSet& tensors,
                     const Layout& layout);
  // In a thread of the copies.
  void write(const Copy& copy);
  bool write_to_file(const Copy& copy);
  void arrived(const Copy& copy);
  // True for the one caller that ends it. Unmaps the memory, which the agent then digests.
  bool end();
  struct Segment {
    Mapping memory;  // empty: handed over
    // Empty: stores to the mapping are quicker, or the only way.
    UniqueFd file;
    // A thread writes into the file. The kernel lets in one at a time, so the others store.
    bool writing = false;
    // Of tensors: to be expected, and to arrive.
    std::uint64_t unexpected_bytes = 0;
    std::uint64_t missing_bytes = 0;
  };
  Segment* segment_of(const std::byte* target);

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<Inbox> inbox_;
  const std::uint64_t id_;
  // By the caller's index.
  std::vector<std::vector<Piece>> pieces_;
  mutable std::mutex mutex_;
  // All are guarded by mutex_.
  bool ended_ = false;
  std::vector<Segment> segments_;
  std::shared_ptr<CopyThreads> copies_;
};

}  // namespace rekindle::client
