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
#include "src/client/mapping.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::client {

// A version that a trainer fills in memory of the agent's store. Any thread.
class Publication {
 public:
  // `tensors` in the caller's order, which is that of data()'s index.
  static Result<std::shared_ptr<Publication>> begin(std::shared_ptr<Connection> connection,
                                                    const ModelVersion& id,
                                                    std::vector<TensorInfo> tensors,
                                                    std::chrono::milliseconds timeout);
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;
  ~Publication();  // abandons what was not committed

  // Writable until commit or abandon, which unmap it: from then on kStale.
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
  // True for the one caller that ends it. Unmaps first: the agent digests what is there.
  bool end();

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<Inbox> inbox_;
  const std::uint64_t id_;
  std::vector<Place> places_;  // by the caller's index
  mutable std::mutex mutex_;
  bool ended_ = false;             // guarded by mutex_
  std::vector<Mapping> segments_;  // guarded by mutex_
};

}  // namespace rekindle::client
