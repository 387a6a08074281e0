#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/bucket/device.h"

struct ncclComm;

// The part of NCCL that a broadcast needs, found at run time. <nccl.h> stays inside nccl.cc. All
// communicators are non-blocking: NCCL works on in a thread of its own, and every wait here has a
// deadline.
namespace rekindle::cuda {

class Communicator;
class Context;

// Thread-safe. The library is never unloaded.
class Nccl {
 public:
  // kNotFound: it is not here, or older than 2.14.
  static Result<std::shared_ptr<const Nccl>> load(const char* library = "libnccl.so.2");
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  int version() const { return version_; }  // 22809: 2.28.9
  // One rank makes it and gives it to all.
  using UniqueId = std::array<std::byte, 128>;
  Result<UniqueId> make_id() const;
  // What `body` queues, on any communicators of the calling thread, starts together: sends with
  // their receives, ranks of one thread with each other. Then each of them has to settle(). `any`
  // is one of them.
  Result<void> group(const Communicator& any, const std::function<Result<void>()>& body) const;

 private:
  friend class Communicator;
  struct Calls;
  explicit Nccl(std::unique_ptr<Calls> calls);
  Error error(int result, ncclComm* communicator, std::string_view what) const;
  // In progress is no failure.
  Result<void> check(int result, ncclComm* communicator, std::string_view what) const;

  const std::unique_ptr<Calls> calls_;
  int version_ = 0;
};

// One device's rank. One thread at a time. After any error only abort() and the destructor: its
// peers are then to be told by other means.
class Communicator {
 public:
  struct Rank {
    int rank = 0;
    int ranks = 1;
  };
  // Begins to meet the other ranks, of this thread or any other; settle() tells when they have met.
  // The device, of src/cuda, outlives it. kInvalid: no such device.
  static Result<std::unique_ptr<Communicator>> start(std::shared_ptr<const Nccl> nccl,
                                                     bucket::Device& device, Rank rank,
                                                     const Nccl::UniqueId& id);
  ~Communicator();  // aborts, unless finalize() has succeeded
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_.rank; }
  int ranks() const { return rank_.ranks; }

  // Queue on a stream of the device. Before the next call, and before other work is queued behind
  // them, the communicator has to settle().
  Result<void> broadcast(bucket::DeviceAddress from, bucket::DeviceAddress to, std::uint64_t bytes,
                         int root, bucket::Stream& stream);
  // `bytes` of each rank, in the order of ranks at `to`; in place when `from` is its own part.
  Result<void> all_gather(bucket::DeviceAddress from, bucket::DeviceAddress to, std::uint64_t bytes,
                          bucket::Stream& stream);
  Result<void> send(bucket::DeviceAddress from, std::uint64_t bytes, int peer,
                    bucket::Stream& stream);
  Result<void> receive(bucket::DeviceAddress to, std::uint64_t bytes, int peer,
                       bucket::Stream& stream);

  // Whether what was begun has been queued. What failed on the way, kPeerLost among it, shows here:
  // to be asked also while the device works.
  Result<bool> settled();
  Result<void> settle(TimePoint deadline);    // kTimeout: it is in progress
  Result<void> finalize(TimePoint deadline);  // waits for the other ranks to do the same
  void abort();                               // what is queued ends, and fails

 private:
  friend class Nccl;
  Communicator(std::shared_ptr<const Nccl> nccl, std::shared_ptr<const Context> context, Rank rank);
  template <typename Call>
  int run(Call&& call) const;

  const std::shared_ptr<const Nccl> nccl_;
  const std::shared_ptr<const Context> context_;
  const Rank rank_;
  ncclComm* communicator_ = nullptr;
};

}  // namespace rekindle::cuda
