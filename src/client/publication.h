#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "src/base/clock.h"
#include "src/client/connection.h"
#include "src/client/host_tensors.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::client {

// A version that a trainer fills in memory of the agent's store. Any thread.
class Publication {
 public:
  // data() numbers the tensors in this order.
  static Result<std::shared_ptr<Publication>> begin(std::shared_ptr<Connection> connection,
                                                    const ModelVersion& id,
                                                    std::vector<TensorInfo> tensors,
                                                    std::chrono::milliseconds timeout);
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;
  // Abandons a publication that was not committed.
  ~Publication();

  // Writable memory, until commit() or abandon() unmap it. Afterwards kStale.
  Result<std::span<std::byte>> data(std::size_t index) const;
  Result<void> commit(std::chrono::milliseconds timeout);
  void abandon();

  const Connection& connection() const { return *connection_; }

 private:
  struct Place {
    std::uint32_t segment = 0;
    std::uint64_t offset_bytes = 0;
    std::uint64_t bytes = 0;
  };
  Publication(std::shared_ptr<Connection> connection, std::shared_ptr<Inbox> inbox,
              std::uint64_t id)
      : connection_(std::move(connection)), inbox_(std::move(inbox)), id_(id) {}
  Result<void> place(std::vector<TensorInfo> tensors, const PublishBegunReply& begun);
  // True for the one caller that ends it. Unmaps the memory, which the agent then digests.
  bool end();

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<Inbox> inbox_;
  const std::uint64_t id_;
  // By the caller's index.
  std::vector<Place> places_;
  mutable std::mutex mutex_;
  // Both are guarded by mutex_.
  bool ended_ = false;
  std::vector<Mapping> segments_;
};

}  // namespace rekindle::client
